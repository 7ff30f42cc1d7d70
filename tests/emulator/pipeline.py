"""A warp-specialised block-scaled product in a loop, with every kind of hand-over between warps and engines.

Tile i is A_i B_i^T of 128 rows, 32 columns and 64 elements of K, e2m1 with a ue4m3 scale factor for each 16 elements.
Warps 0-3 put A into tensor memory; warp 8 copies B and the scale factors to shared memory; warp 9 multiplies; warps 4-7
bring the accumulators to shared memory and from there to the output. There are two stages of everything but the output.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cuda.emulator import Output, TensorMap
from tests.emulator.tensor_core import layouts
from tests.emulator.text import module

ROWS, COLUMNS, K, FACTORS = 128, 32, 64, 4
_B_BYTES, _SCALE_BYTES = COLUMNS * K // 2, 512
_STAGE = _B_BYTES + 2 * _SCALE_BYTES
_STAGING = 2 * _STAGE
_TILE = 4 * ROWS * COLUMNS
_BARRIERS = _STAGING + _TILE
_SLOT = _BARRIERS + 96
# Of the two barriers of each kind.
_LOADED, _RELEASED, _A_READY, _A_READ, _DONE, _DRAINED = range(0, 96, 16)
_COUNTS = {_LOADED: 1, _RELEASED: 1, _A_READY: 128, _A_READ: 1, _DONE: 1, _DRAINED: 128}
# Columns of tensor memory.
_D, _A, _A_SCALES, _B_SCALES, _ALLOCATED = 0, 64, 80, 84, 128
_DESCRIPTOR = layouts.scaled_descriptor(ROWS, COLUMNS, 1, 1, scale="ue4m3")


def _wait(barrier: int, parity: str) -> str:
    return f"{{ W: mbarrier.try_wait.parity.shared::cta.b64 %p8, [%r20+{barrier}], {parity}; @!%p8 bra W; }}"


def _loop(name: str, tiles: int, body: str) -> str:
    """`body` for each tile.

    It finds the tile in %r10, the stage in %r11, its barriers at %r20 and data at %r21, the parity of this use of the
    stage in %r12 and that of the use before in %r13.
    """
    return f"""
{name}:
    mov.u32 %r10, 0;
{name}_TILE:
    and.b32 %r11, %r10, 1;
    shr.u32 %r12, %r10, 1;
    and.b32 %r12, %r12, 1;
    xor.b32 %r13, %r12, 1;
    shl.b32 %r20, %r11, 3;
    add.u32 %r20, %r20, %r3;
    add.u32 %r20, %r20, {_BARRIERS};
    mad.lo.u32 %r21, %r11, {_STAGE}, %r3;
    {body}
    add.u32 %r10, %r10, 1;
    setp.lt.u32 %p9, %r10, {tiles};
    @%p9 bra {name}_TILE;
    bra END;"""


def _initialise() -> str:
    lines = [
        f"mbarrier.init.shared::cta.b64 [%r3+{_BARRIERS + kind + 8 * stage}], {count};"
        for kind, count in _COUNTS.items()
        for stage in range(2)
    ]
    return "\n    ".join(lines)


def _descriptor(register: str, offset: int, leading: int, stride: int) -> str:
    constant = layouts.matrix_descriptor("none", 0, leading, stride)
    return f"""
    add.u32 %r22, %r21, {offset};
    shr.u32 %r22, %r22, 4;
    cvt.u64.u32 {register}, %r22;
    or.b64 {register}, {register}, {constant};"""


_PUT_A = f"""
    ld.global.v4.b32 {{%r40, %r41, %r42, %r43}}, [%d1];
    ld.global.v4.b32 {{%r44, %r45, %r46, %r47}}, [%d1+16];
    add.s64 %d1, %d1, {ROWS * K // 2};
    mad.lo.u32 %r23, %r11, 8, %r5;
    {_wait(_A_READ, "%r13")}
    tcgen05.fence::after_thread_sync;
    tcgen05.st.sync.aligned.32x32b.x8.b32 [%r23+{_A}], {{%r40, %r41, %r42, %r43, %r44, %r45, %r46, %r47}};
    tcgen05.wait::st.sync.aligned;
    tcgen05.fence::before_thread_sync;
    mbarrier.arrive.shared::cta.b64 _, [%r20+{_A_READY}];"""

_LOAD = f"""
    {_wait(_RELEASED, "%r13")}
    shl.b32 %r24, %r10, 2;
    elect.sync _|%p2, 0xffffffff;
    @!%p2 bra LOADED;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r20+{_LOADED}], {_STAGE};
    cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes
        [%r21], [%d2, {{0, %r24}}], [%r20+{_LOADED}];
    cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes
        [%r21+{_B_BYTES}], [%d3], {2 * _SCALE_BYTES}, [%r20+{_LOADED}];
LOADED:
    add.s64 %d3, %d3, {2 * _SCALE_BYTES};"""

_MULTIPLY = f"""
    {_wait(_LOADED, "%r12")}
    {_wait(_A_READY, "%r12")}
    {_wait(_DRAINED, "%r13")}
    tcgen05.fence::after_thread_sync;
    {_descriptor("%d11", _B_BYTES, 0, 128)}
    {_descriptor("%d12", _B_BYTES + _SCALE_BYTES, 0, 128)}
    {_descriptor("%d13", 0, 128, 256)}
    mad.lo.u32 %r25, %r11, {COLUMNS}, %r4;
    mad.lo.u32 %r26, %r11, 8, %r4;
    add.u32 %r26, %r26, {_A};
    setp.ne.u32 %p3, %r4, %r4;
    elect.sync _|%p2, 0xffffffff;
    @!%p2 bra ISSUED;
    tcgen05.cp.cta_group::1.32x128b.warpx4 [%r4+{_A_SCALES}], %d11;
    tcgen05.cp.cta_group::1.32x128b.warpx4 [%r4+{_B_SCALES}], %d12;
    tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.block16 [%r25], [%r26], %d13, {_DESCRIPTOR},
        [%r4+{_A_SCALES}], [%r4+{_B_SCALES}], %p3;
    tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r20+{_RELEASED}];
    tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r20+{_A_READ}];
    tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r20+{_DONE}];
ISSUED:"""

_SUMS = [f"%r{i}" for i in range(60, 60 + COLUMNS)]
_STORES = "\n    ".join(
    f"st.shared.v4.b32 [%r7+{4 * i}], {{{', '.join(_SUMS[i : i + 4])}}};" for i in range(0, COLUMNS, 4)
)
_DRAIN = f"""
    mad.lo.u32 %r23, %r11, {COLUMNS}, %r5;
    {_wait(_DONE, "%r12")}
    tcgen05.fence::after_thread_sync;
    tcgen05.ld.sync.aligned.32x32b.x{COLUMNS}.b32 {{{", ".join(_SUMS)}}}, [%r23+{_D}];
    tcgen05.wait::ld.sync.aligned;
    tcgen05.fence::before_thread_sync;
    mbarrier.arrive.shared::cta.b64 _, [%r20+{_DRAINED}];
    cp.async.bulk.wait_group.read 0;
    bar.sync 1, {ROWS};
    {_STORES}
    fence.proxy.async.shared::cta;
    bar.sync 1, {ROWS};
    @!%p4 bra STORED;
    cp.async.bulk.global.shared::cta.bulk_group [%d4], [%r6], {_TILE};
    cp.async.bulk.commit_group;
STORED:
    add.s64 %d4, %d4, {_TILE};"""


def kernel(tiles: int) -> str:
    """The PTX; parameters: A, a tensor map of B, scale factors, output."""
    body = f"""
    mov.u32 %r1, %tid.x;
    shr.u32 %r2, %r1, 5;
    mov.u32 %r3, buffer;
    setp.ne.u32 %p1, %r2, 8;
    @%p1 bra READY;
    elect.sync _|%p2, 0xffffffff;
    @!%p2 bra ALLOCATE;
    {_initialise()}
    fence.mbarrier_init.release.cluster;
ALLOCATE:
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r3+{_SLOT}], {_ALLOCATED};
    tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
READY:
    tcgen05.fence::before_thread_sync;
    bar.sync 0;
    tcgen05.fence::after_thread_sync;
    ld.shared.b32 %r4, [%r3+{_SLOT}];
    and.b32 %r5, %r2, 3;
    shl.b32 %r5, %r5, 21;
    add.u32 %r5, %r5, %r4;
    and.b32 %r14, %r1, {ROWS - 1};
    ld.param.u64 %d1, [a0];
    mul.wide.u32 %d5, %r14, {K // 2};
    add.s64 %d1, %d1, %d5;
    mov.b64 %d2, a1;
    ld.param.u64 %d3, [a2];
    ld.param.u64 %d4, [a3];
    add.u32 %r6, %r3, {_STAGING};
    mad.lo.u32 %r7, %r14, {4 * COLUMNS}, %r6;
    setp.eq.u32 %p4, %r1, {ROWS};
    setp.eq.u32 %p5, %r2, 8;
    @%p5 bra LOAD;
    setp.eq.u32 %p5, %r2, 9;
    @%p5 bra MULTIPLY;
    setp.ge.u32 %p5, %r2, 4;
    @%p5 bra DRAIN;
    {_loop("PUT", tiles, _PUT_A)}
    {_loop("LOAD", tiles, _LOAD)}
    {_loop("MULTIPLY", tiles, _MULTIPLY)}
    {_loop("DRAIN", tiles, _DRAIN)}
END:
    cp.async.bulk.wait_group.read 0;
    tcgen05.fence::before_thread_sync;
    bar.sync 0;
    @%p1 bra FREED;
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r4, {_ALLOCATED};
FREED:"""
    return module(body, "pmpp", target="sm_100a", shared=_SLOT + 16, threads=320)


@dataclass(frozen=True)
class Problem:
    """Arguments of the kernel, and what it should write."""

    arguments: list
    expected: np.ndarray


def problem(tiles: int, seed: int = 0) -> Problem:
    """Random codes and scale factors; `expected` is (tiles, ROWS, COLUMNS) float32."""
    rng = np.random.default_rng(seed)
    a, b = (layouts.random_codes(rng, (tiles, rows, K), "e2m1") for rows in (ROWS, COLUMNS))
    scales = [rng.integers(0x28, 0x48, (tiles, rows, FACTORS)).astype(np.uint8) for rows in (ROWS, COLUMNS)]
    images = np.zeros((tiles, 2, 32, 4, FACTORS), np.uint8)
    images[:, 0] = scales[0].reshape(tiles, 4, 32, FACTORS).swapaxes(1, 2)
    images[:, 1, :, 0] = scales[1]
    tile_b = np.zeros((tiles, _B_BYTES), np.uint8)
    places = layouts.k_major(COLUMNS, K // 2, "none", 0, 128, 256)
    for image, codes in zip(tile_b, b, strict=True):
        image[places] = layouts.packed(codes, "e2m1", dense=True)
    factors = [np.repeat(s.view(layouts.SCALES["ue4m3"]).astype(np.float64), K // FACTORS, -1) for s in scales]
    left, right = (layouts.decoded(codes, "e2m1") * f for codes, f in zip((a, b), factors, strict=True))
    out = np.zeros((tiles, ROWS, COLUMNS), np.float32)
    rows_of_b = tile_b.reshape(tiles * 4, 256)
    packed_a = layouts.packed(a.reshape(-1, K), "e2m1", dense=True)
    arguments = [packed_a, TensorMap.for_array(rows_of_b, (256, 4)), images, Output(out)]
    return Problem(arguments, (left @ right.swapaxes(1, 2)).astype(np.float32))
