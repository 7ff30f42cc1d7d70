"""Clusters of two CTAs: special registers, distributed shared memory, remote arrivals, multicast."""

import numpy as np

from tests.emulator.device import TiledMap
from tests.emulator.kernels.case import Case, copy_from_shared, entry, fill_shared, wait
from tests.emulator.kernels.tensor_copies import box_bytes, elements, swizzled

_PAIR = {"grid": (2, 1, 1), "cluster": (2, 1, 1)}
_SYNC = "barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;\n"
_MULTICAST = "shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
_WORDS = 32

# %r2 is the rank, %r3 that of the peer, %r4 shared memory of the peer, %r5 and %r6 the thread's word here and there,
# %d1 the byte offset of the thread's word of this CTA's part of an output.
_PROLOGUE = f"""
mov.u32 %r2, %cluster_ctarank;
xor.b32 %r3, %r2, 1;
mapa.shared::cluster.u32 %r4, %r1, %r3;
shl.b32 %r10, %r0, 2;
add.u32 %r5, %r1, %r10;
add.u32 %r6, %r4, %r10;
mad.lo.u32 %r11, %r2, {4 * _WORDS}, %r10;
cvt.u64.u32 %d1, %r11;
setp.ne.u32 %p0, %r0, 0;
"""


def _init(barrier: int, count: int, nbytes: int = 0) -> str:
    """Initialises the mbarrier at a shared offset, and announces bytes, in one thread of each CTA."""
    expect = f"@!%p0 mbarrier.arrive.expect_tx.shared::cta.b64 %d9, [%r1+{barrier}], {nbytes};\n" if nbytes else ""
    return f"""
@!%p0 mbarrier.init.shared::cta.b64 [%r1+{barrier}], {count};
@!%p0 fence.mbarrier_init.release.cluster;
{expect}bar.warp.sync 0xffffffff;
"""


def _special_registers() -> Case:
    names = ("ctarank", "nctarank", "ctaid.x", "ctaid.y", "nctaid.x", "nctaid.y")
    reads = [f"%cluster_{name}" for name in names] + ["%clusterid.x", "%clusterid.y", "%nclusterid.x", "%nclusterid.y"]
    body = """
mov.u32 %r10, %ctaid.x;
mov.u32 %r11, %ctaid.y;
mov.u32 %r12, %nctaid.x;
mad.lo.u32 %r10, %r11, %r12, %r10;
"""
    body += f"mul.wide.u32 %d1, %r10, {4 * len(reads)};\nadd.u64 %d1, %out, %d1;\n"
    for i, name in enumerate(reads):
        body += f"mov.u32 %r20, {name};\nst.global.u32 [%d1+{4 * i}], %r20;\n"
    grid, cluster = (4, 4), (2, 2)
    expected = [
        [x % 2 + 2 * (y % 2), 4, x % 2, y % 2, *cluster, x // 2, y // 2, 2, 2]
        for y in range(grid[1])
        for x in range(grid[0])
    ]
    expected = np.array(expected, np.uint32)
    ptx = entry({"out": "pointer"}, body)
    return Case(
        "cluster_registers",
        ptx,
        (np.zeros_like(expected),),
        {0: expected},
        grid=(*grid, 1),
        block=(1, 1, 1),
        cluster=(*cluster, 1),
    )


def _distributed_loads_and_stores() -> Case:
    """Reads the peer's words, then writes words there and arrives at its barrier."""
    body = f"""{_PROLOGUE}
{_init(256, 32)}
mad.lo.u32 %r12, %r2, 1000, %r0;
st.shared.u32 [%r5], %r12;
{_SYNC}
ld.shared::cluster.u32 %r13, [%r6];
add.u64 %d2, %read, %d1;
st.global.u32 [%d2], %r13;
add.u32 %r14, %r13, 7;
st.shared::cluster.u32 [%r6+128], %r14;
add.u32 %r15, %r4, 256;
mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r15];
{wait(256, 0).replace("parity.shared::cta", "parity.acquire.cluster.shared::cta")}
ld.shared.u32 %r16, [%r5+128];
add.u64 %d2, %received, %d1;
st.global.u32 [%d2], %r16;
{_SYNC}
"""
    lanes = np.arange(_WORDS)
    own = np.stack([lanes, 1000 + lanes]).astype(np.uint32)
    out = np.zeros_like(own)
    ptx = entry({"read": "pointer", "received": "pointer"}, body)
    return Case("cluster_memory", ptx, (out, out.copy()), {0: own[::-1], 1: own + 7}, shared_bytes=264, **_PAIR)


def _asynchronous_stores() -> Case:
    body = f"""{_PROLOGUE}
{_init(256, 1, 128)}
{_SYNC}
mad.lo.u32 %r12, %r2, 1000, %r0;
add.u32 %r15, %r4, 256;
st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%r6], %r12, [%r15];
{wait(256, 0)}
ld.shared.u32 %r16, [%r5];
add.u64 %d2, %out, %d1;
st.global.u32 [%d2], %r16;
{_SYNC}
"""
    lanes = np.arange(_WORDS)
    expected = np.stack([1000 + lanes, lanes]).astype(np.uint32)
    ptx = entry({"out": "pointer"}, body, version="8.1")
    return Case("cluster_st_async", ptx, (np.zeros_like(expected),), {0: expected}, shared_bytes=264, **_PAIR)


def _copies(reduction: str) -> Case:
    """Copies a CTA's words to the second half of its peer's, or adds them."""
    opcode = f"cp{'.reduce' * bool(reduction)}.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes"
    body = f"""{_PROLOGUE}
{_init(256, 1, 128)}
mad.lo.u32 %r12, %r2, 1000, %r0;
st.shared.u32 [%r5], %r12;
st.shared.u32 [%r5+128], %r0;
fence.proxy.async.shared::cta;
{_SYNC}
add.u32 %r14, %r4, 128;
add.u32 %r15, %r4, 256;
@!%p0 {opcode}{reduction} [%r14], [%r1], 128, [%r15];
bar.warp.sync 0xffffffff;
{wait(256, 0)}
ld.shared.u32 %r16, [%r5+128];
add.u64 %d2, %out, %d1;
st.global.u32 [%d2], %r16;
{_SYNC}
"""
    lanes = np.arange(_WORDS)
    expected = np.stack([1000 + lanes, lanes]).astype(np.uint32)
    if reduction:
        expected += lanes.astype(np.uint32)
    name = "cluster_reduce" if reduction else "cluster_copy"
    ptx = entry({"out": "pointer"}, body)
    return Case(name, ptx, (np.zeros_like(expected),), {0: expected}, shared_bytes=264, **_PAIR)


def _multicast(rng: np.random.Generator) -> Case:
    """Each CTA loads one half of a tile for both."""
    array = rng.integers(0, 2**16, (24, 72), np.uint16)
    map_ = TiledMap(array, "bfloat16", (65, 23), (144,), (64, 8), swizzle=128)
    nbytes = box_bytes(map_)
    barrier = 2 * nbytes
    body = f"""
mov.u32 %r2, %cluster_ctarank;
setp.ne.u32 %p0, %r0, 0;
{fill_shared(0, barrier, 0)}
fence.proxy.async.shared::cta;
{_init(barrier, 1, 2 * nbytes)}
{_SYNC}
mov.b64 %d2, map;
cvta.param.u64 %d2, %d2;
mov.u32 %r20, 8;
mad.lo.u32 %r21, %r2, 8, 9;
mad.lo.u32 %r22, %r2, {nbytes}, %r1;
add.u32 %r23, %r1, {barrier};
mov.u16 %h1, 3;
@!%p0 cp.async.bulk.tensor.2d.{_MULTICAST}
  [%r22], [%d2, {{%r20, %r21}}], [%r23], %h1;
bar.warp.sync 0xffffffff;
{wait(barrier, 0)}
bar.warp.sync 0xffffffff;
mul.wide.u32 %d3, %r2, {2 * nbytes};
add.u64 %out, %out, %d3;
{copy_from_shared("out", 0, 2 * nbytes)}
{_SYNC}
"""
    image = np.zeros(2 * nbytes, np.uint8)
    source = array.reshape(-1).view(np.uint8)
    for half in range(2):
        for offset, place in elements(map_, (8, 9 + 8 * half)):
            for byte in range(2):
                value = 0 if place is None else source[place + byte]
                image[swizzled(half * nbytes + offset + byte, 128)] = value
    ptx = entry({"source": "pointer", "map": "map", "out": "pointer"}, body)
    expected = np.stack([image, image])
    return Case(
        "cluster_multicast",
        ptx,
        (array, map_, np.zeros_like(expected)),
        {1: expected},
        shared_bytes=barrier + 8,
        **_PAIR,
    )


def _store_remotely_copied(rng: np.random.Generator) -> Case:
    """A bulk load whose data and completion go to the peer alone: a multicast to one CTA."""
    source = rng.integers(0, 2**32, (2, _WORDS), np.uint32)
    body = f"""{_PROLOGUE}
{_init(256, 1, 128)}
{_SYNC}
add.u64 %d2, %source, %d1;
mov.u32 %r12, 1;
shl.b32 %r12, %r12, %r3;
cvt.u16.u32 %h1, %r12;
add.u32 %r15, %r1, 256;
@!%p0 cp.async.bulk.{_MULTICAST} [%r1], [%d2], 128, [%r15], %h1;
bar.warp.sync 0xffffffff;
{wait(256, 0)}
ld.shared.u32 %r16, [%r5];
add.u64 %d2, %out, %d1;
st.global.u32 [%d2], %r16;
{_SYNC}
"""
    ptx = entry({"source": "pointer", "out": "pointer"}, body)
    arguments = (source, np.zeros_like(source))
    return Case("cluster_bulk_multicast", ptx, arguments, {1: source[::-1]}, shared_bytes=264, **_PAIR)


def cases() -> list[Case]:
    """All cases."""
    rng = np.random.default_rng(9)
    return [
        _special_registers(),
        _distributed_loads_and_stores(),
        _asynchronous_stores(),
        _copies(""),
        _copies(".add.u32"),
        _multicast(rng),
        _store_remotely_copied(rng),
    ]
