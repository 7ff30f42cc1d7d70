"""cp.async.bulk.tensor and cp.reduce.async.bulk.tensor, as programs."""

from __future__ import annotations

import numpy as np
import pytest

from cuda.emulator.errors import (
    BarrierFaultError,
    DeadlockError,
    DescriptorFaultError,
    MemoryFaultError,
    UnsupportedInstructionError,
)
from cuda.emulator.front import emulate
from cuda.emulator.tensor_map import TensorMap
from tests.emulator.text import module

_SEEDS = range(4)
_COLUMNS, _ROWS = 32, 8  # of the box
_BYTES = 2 * _COLUMNS * _ROWS
_LOAD = "cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes"
_CLUSTER_LOAD = "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
_STORE = "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group"
_WAIT = """
    WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p9, [%r8], 0;
    @!%p9 bra WAIT;"""
_SYNC = "barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;"


def _init(nbytes: int) -> str:
    """%r1 is the buffer, %r8 its mbarrier, %p1 true in thread 0, %d1 the tensor map a0."""
    return f"""
    mov.u32 %r0, %tid.x;
    mov.u32 %r1, buffer;
    add.u32 %r8, %r1, 4096;
    setp.eq.u32 %p1, %r0, 0;
    mov.b64 %d1, a0;
    @!%p1 bra READY;
    mbarrier.init.shared::cta.b64 [%r8], 1;
    fence.mbarrier_init.release.cluster;
    mbarrier.arrive.expect_tx.shared::cta.b64 %d9, [%r8], {nbytes};
    READY: bar.warp.sync 0xffffffff;
"""


def _move(label: str, load: str, store: str, nbytes: int) -> str:
    """A loop over words: %d6 is where one is in the array a1, from the offset in %d7 on, and %r5 in the buffer."""
    return f"""
    ld.param.u64 %d6, [a1];
    add.s64 %d6, %d6, %d7;
    mul.wide.u32 %d5, %r0, 4;
    add.s64 %d6, %d6, %d5;
    shl.b32 %r5, %r0, 2;
    add.u32 %r5, %r5, %r1;
    mov.u32 %r7, 0;
    {label}: {load}
    {store}
    add.u32 %r5, %r5, 128;
    add.s64 %d6, %d6, 128;
    add.u32 %r7, %r7, 128;
    setp.lt.u32 %p5, %r7, {nbytes};
    @%p5 bra {label};"""


def _copy_out(nbytes: int, offset: str = "mov.u64 %d7, 0;") -> str:
    """The first bytes of the buffer to the array a1, behind the offset in %d7."""
    return offset + _move("COPY", "ld.shared.u32 %r6, [%r5];", "st.global.u32 [%d6], %r6;", nbytes)


def _copy_in(nbytes: int) -> str:
    """The array a1 to the first bytes of the buffer; %d1 is the tensor map a0, %p1 true in thread 0."""
    start = """
    mov.u32 %r0, %tid.x;
    mov.u32 %r1, buffer;
    setp.eq.u32 %p1, %r0, 0;
    mov.b64 %d1, a0;
    mov.u64 %d7, 0;"""
    return start + _move("FILL", "ld.global.u32 %r6, [%d6];", "st.shared.u32 [%r5], %r6;", nbytes)


def _run(body: str, parameters: str, arguments: list, **options):
    shared, seeds = options.pop("shared", 4608), options.pop("seeds", _SEEDS)
    return emulate(module(body, parameters, shared=shared), arguments, options.pop("grid", 1), seeds=seeds, **options)


def _matrix(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1 << 16, (20, 40), np.uint16)


def _map(array: np.ndarray, swizzle: str = "64B", element: str = "bf16", box=(_COLUMNS, _ROWS)) -> TensorMap:
    return TensorMap(array, (array.shape[1], array.shape[0]), (array.strides[0],), box, element, swizzle)


def _tile(array: np.ndarray, column: int, row: int, span: int = 64) -> np.ndarray:
    """The image of a box of rows of 64 bytes with the swizzle of 64 bytes, or without one."""
    tile = np.zeros((_ROWS, _COLUMNS), array.dtype)
    for i in range(_ROWS):
        for j in range(_COLUMNS):
            if 0 <= row + i < array.shape[0] and 0 <= column + j < array.shape[1]:
                tile[i, j] = array[row + i, column + j]
    chunks = tile.view(np.uint8).reshape(-1, 16)
    image = np.empty_like(chunks)
    for i in range(len(chunks)):
        image[i ^ (i // 8 % 4 if span else 0)] = chunks[i]
    return image.reshape(-1)


def _load_body(
    opcode: str = _LOAD, at: str = "{8, -2}", announced: int = _BYTES, wait: str = _WAIT, more: str = ""
) -> str:
    return f"""
    {_init(announced)}
    @%p1 {opcode} [%r1], [%d1, {at}], [%r8]{more};
    {wait}
    {_copy_out(_BYTES)}"""


@pytest.mark.parametrize(
    ("opcode", "more"),
    [
        (_LOAD, ""),
        (_CLUSTER_LOAD, ""),
        (_LOAD + ".L2::cache_hint", ", %d2"),
        (_CLUSTER_LOAD + ".cta_group::1", ""),
        (_CLUSTER_LOAD + ".cta_group::2.L2::cache_hint", ", %d2"),
        (_CLUSTER_LOAD + ".multicast::cluster", ", 1"),
    ],
)
def test_loads(opcode, more):
    array = _matrix()
    body = "mov.u64 %d2, 0;" + _load_body(opcode, more=more)
    result = _run(body, "mp", [_map(array), np.zeros(_BYTES, np.uint8)])
    for arrays in result.arrays:
        np.testing.assert_array_equal(arrays[1], _tile(array, 8, -2))
    assert not result.findings


@pytest.mark.parametrize("rank", [1, 2, 3, 4, 5])
def test_loads_of_every_rank(rank):
    array = np.random.default_rng(rank).integers(0, 256, (3,) * (rank - 1) + (256,), np.uint8)
    tensor = TensorMap.for_array(array, (128, 2, 2, 2, 2)[:rank], "128B")
    at = (16, 1, 0, 1, 0)[:rank]
    nbytes = 128 << rank - 1
    opcode = f"cp.async.bulk.tensor.{rank}d.shared::cta.global.tile.mbarrier::complete_tx::bytes"
    body = f"""
    {_init(nbytes)}
    @%p1 {opcode} [%r1], [%d1, {{{", ".join(map(str, at))}}}], [%r8];
    {_WAIT}
    {_copy_out(nbytes)}"""
    tile = array[tuple(slice(c, c + n) for c, n in zip(at[::-1], tensor.box[::-1], strict=True))].reshape(-1, 16)
    image = np.empty_like(tile)
    for i in range(len(tile)):
        image[i ^ (i // 8 % 8)] = tile[i]
    result = _run(body, "mp", [tensor, np.zeros(nbytes, np.uint8)], seeds=[0])
    np.testing.assert_array_equal(result.arrays[0][1], image.reshape(-1))


def test_a_load_that_nobody_waits_for_races():
    body = _load_body(wait="").replace("COPY: ld.shared", "st.shared.u32 [%r5], %r7;\nCOPY: ld.shared", 1)
    result = _run(body.replace("bra COPY", "bra END") + "\nEND:", "mp", [_map(_matrix()), np.zeros(_BYTES, np.uint8)])
    assert any("st.shared" in f.text and _LOAD in f.text for f in result.of_kind("race"))


def test_loading_over_generic_writes_needs_a_proxy_fence():
    body = "mov.u32 %r0, 0;\nmov.u32 %r1, buffer;\nst.shared.u32 [%r1], %r0;\nFENCE" + _load_body()
    arguments = [_map(_matrix()), np.zeros(_BYTES, np.uint8)]
    fenced = _run(body.replace("FENCE", "fence.proxy.async.shared::cta;"), "mp", arguments)
    assert not fenced.findings
    assert _run(body.replace("FENCE", ""), "mp", arguments).of_kind("proxy")


@pytest.mark.parametrize("announced", [_BYTES - 64, _BYTES + 64])
def test_a_wrong_count_of_bytes_deadlocks(announced):
    with pytest.raises(DeadlockError, match="bytes to come"):
        _run(_load_body(announced=announced), "mp", [_map(_matrix()), np.zeros(_BYTES, np.uint8)])


def test_bytes_out_of_bounds_count():
    result = _run(_load_body(at="{104, 100}"), "mp", [_map(_matrix()), np.ones(_BYTES, np.uint8)])
    assert not result.arrays[0][1].any()


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (("[%r1], [%d1", "[%r1+64], [%d1"), MemoryFaultError, "the destination .* is no multiple of 128"),
        ((".2d", ".3d"), UnsupportedInstructionError, "3 coordinates are expected, not 2"),
        (("mov.b64 %d1, a0", "mov.b64 %d1, a1"), Exception, "no tensor map at"),
        ((".tile.", ".im2col."), UnsupportedInstructionError, "im2col is not modelled"),
        ((".tile.", ".tile.multicast::cluster."), UnsupportedInstructionError, "4 operands are expected"),
    ],
)
def test_faults_of_a_load(change, error, text):
    with pytest.raises(error, match=text):
        _run(_load_body().replace(*change), "mp", [_map(_matrix()), np.zeros(_BYTES, np.uint8)])


def test_the_rank_is_that_of_the_map():
    tensor = TensorMap.for_array(np.zeros((2, 8, 32), np.uint16), (32, 8, 1))
    with pytest.raises(DescriptorFaultError, match="the tensor map has rank 3"):
        _run(_load_body(), "mp", [tensor, np.zeros(_BYTES, np.uint8)])


def test_packed_fp4_through_a_program():
    array = np.random.default_rng(3).integers(0, 256, (20, 80), np.uint8)
    tensor = TensorMap(array, (160, 20), (80,), (128, _ROWS), "fp4_align8", "64B")
    result = _run(_load_body(at="{32, 3}"), "mp", [tensor, np.zeros(_BYTES, np.uint8)])
    expected = _tile(np.ascontiguousarray(array).view(np.uint16), 8, 3)
    np.testing.assert_array_equal(result.arrays[0][1], expected)


def test_gather_of_four_rows():
    array = _matrix(4)
    opcode = _CLUSTER_LOAD.replace(".global", ".global.tile::gather4")
    body = f"""
    {_init(256)}
    @%p1 {opcode} [%r1], [%d1, {{8, 19, 0, -1, 7}}], [%r8];
    {_WAIT}
    {_copy_out(256)}"""
    tensor = _map(array, "none", box=(_COLUMNS, 1))
    result = _run(body, "mp", [tensor, np.zeros((4, _COLUMNS), np.uint16)])
    expected = np.stack([array[19, 8:40], array[0, 8:40], np.zeros(32, np.uint16), array[7, 8:40]])
    for arrays in result.arrays:
        np.testing.assert_array_equal(arrays[1], expected)
    with pytest.raises(DescriptorFaultError, match=r"boxDim\[1\] must be 1"):
        _run(body, "mp", [_map(array), np.zeros((4, _COLUMNS), np.uint16)])


_MULTICAST = """
    mov.u32 %r9, %cluster_ctarank;
    and.b32 %r10, %r9, 1;
    shr.u32 %r11, %r9, 1;
    mad.lo.u32 %r14, %r11, {nbytes}, %r1;
    mov.u16 %h1, 5;
    shl.b16 %h1, %h1, %r10;
    mul.lo.u32 %r15, %r9, 4;"""


def test_multicast_in_a_cluster_of_four():
    """CTA r sends the box at row 4 r to all CTAs of its parity, at the place of r / 2."""
    array = _matrix(5)
    body = f"""
    {_init(2 * _BYTES)}
    {_SYNC}
    {_MULTICAST.format(nbytes=_BYTES)}
    @%p1 {_CLUSTER_LOAD}.multicast::cluster [%r14], [%d1, {{0, %r15}}], [%r8], %h1;
    {_WAIT}
    {_copy_out(2 * _BYTES, f"mul.wide.u32 %d7, %r9, {2 * _BYTES};")}
    {_SYNC}"""
    result = _run(body, "mp", [_map(array), np.zeros((4, 2 * _BYTES), np.uint8)], grid=4, cluster=4)
    tiles = [_tile(array, 0, 4 * rank) for rank in range(4)]
    expected = np.stack([np.concatenate([tiles[rank % 2], tiles[rank % 2 + 2]]) for rank in range(4)])
    for arrays in result.arrays:
        np.testing.assert_array_equal(arrays[1], expected)
    assert not result.findings


def _pair_body(multicast: bool, barrier_of: int, announced: int) -> str:
    """Each CTA loads a box for itself (or for both), and all bytes are counted in the CTA `barrier_of` of the pair."""
    opcode = _CLUSTER_LOAD + (".multicast::cluster" if multicast else "") + ".cta_group::2"
    place = f"mad.lo.u32 %r14, %r9, {_BYTES}, %r1;" if multicast else "mapa.shared::cluster.u32 %r14, %r1, %r9;"
    return f"""
    {_init(announced)}
    {_SYNC}
    mov.u32 %r9, %cluster_ctarank;
    mov.u32 %r13, {barrier_of};
    mapa.shared::cluster.u32 %r12, %r8, %r13;
    mul.lo.u32 %r15, %r9, 4;
    {place}
    @%p1 {opcode} [%r14], [%d1, {{0, %r15}}], [%r12]{", 3" if multicast else ""};
    setp.ne.u32 %p2, %r9, {barrier_of};
    @%p2 bra WAITED;
    {_WAIT}
    WAITED:
    {_SYNC}
    {_copy_out(_BYTES * (2 if multicast else 1), f"mul.wide.u32 %d7, %r9, {2 * _BYTES};")}"""


@pytest.mark.parametrize("barrier_of", [0, 1])
@pytest.mark.parametrize("multicast", [False, True])
def test_a_pair_counts_its_bytes_in_one_cta(multicast, barrier_of):
    array = _matrix(6)
    body = _pair_body(multicast, barrier_of, (4 if multicast else 2) * _BYTES)
    result = _run(body, "mp", [_map(array), np.zeros((2, 2 * _BYTES), np.uint8)], grid=2, cluster=2)
    tiles = [_tile(array, 0, 0), _tile(array, 0, 4)]
    for arrays in result.arrays:
        for rank in range(2):
            expected = np.concatenate(tiles) if multicast else tiles[rank]
            np.testing.assert_array_equal(arrays[1][rank, : expected.size], expected)
    assert not result.findings


def test_the_barrier_of_a_single_cta_is_its_own():
    body = _pair_body(False, 0, 2 * _BYTES).replace(".cta_group::2", "")
    with pytest.raises(BarrierFaultError, match="the mbarrier is in CTA rank 0, the destination in rank 1"):
        _run(body, "mp", [_map(_matrix()), np.zeros((2, 2 * _BYTES), np.uint8)], grid=2, cluster=2)


def _store_body(
    opcode: str = _STORE,
    at: str = "{24, 15}",
    fence: str = "fence.proxy.async.shared::cta;",
    wait: str = "cp.async.bulk.wait_group 0;",
    behind: str = "",
) -> str:
    return f"""
    {_copy_in(_BYTES)}
    {fence}
    bar.warp.sync 0xffffffff;
    @!%p1 bra DONE;
    {opcode} [%d1, {at}], [%r1];
    cp.async.bulk.commit_group;
    {wait}
    DONE: bar.warp.sync 0xffffffff;
    {behind}"""


def _image() -> np.ndarray:
    return np.random.default_rng(7).integers(0, 256, _BYTES, np.uint8)


def _stored(array: np.ndarray, image: np.ndarray, column: int, row: int) -> np.ndarray:
    """The array after a store of the swizzled image."""
    tile = np.empty((_BYTES // 16, 16), np.uint8)
    for i in range(len(tile)):
        tile[i] = image.reshape(-1, 16)[i ^ (i // 8 % 4)]
    tile, result = tile.view(array.dtype).reshape(_ROWS, _COLUMNS), array.copy()
    rows, columns = result[row : row + _ROWS, column : column + _COLUMNS].shape
    result[row : row + rows, column : column + columns] = tile[:rows, :columns]
    return result


def test_store():
    array, image = _matrix(), _image()
    for (column, row), at in (((8, 2), "{8, 2}"), ((24, 15), "{24, 15}")):
        result = _run(_store_body(at=at), "mp", [_map(array), image])
        for arrays in result.arrays:
            np.testing.assert_array_equal(arrays[0], _stored(array, image, column, row))
        assert not result.findings


def test_a_store_from_negative_coordinates_is_reported():
    array, image = _matrix(), _image()
    result = _run(_store_body(at="{0, -8}"), "mp", [_map(array), image])
    (finding,) = result.of_kind("issue")
    assert "negative coordinates" in finding.text
    np.testing.assert_array_equal(result.arrays[0][0], array)


def test_a_store_by_all_lanes_is_done_once():
    array, image = _matrix(), _image()
    result = _run(_store_body().replace("@!%p1 bra DONE;", ""), "mp", [_map(array), image])
    assert [f.kind for f in result.findings] == ["issue"]
    np.testing.assert_array_equal(result.arrays[0][0], _stored(array, image, 24, 15))


def test_a_store_without_proxy_fence_is_reported():
    assert _run(_store_body(fence=""), "mp", [_map(_matrix()), _image()]).of_kind("proxy")


@pytest.mark.parametrize(
    ("wait", "races"),
    [
        ("", True),
        ("cp.async.bulk.wait_group.read 0;", False),
        ("cp.async.bulk.wait_group.read 1;", True),
        ("cp.async.bulk.wait_group 0;", False),
    ],
)
def test_overwriting_the_source_of_a_store(wait, races):
    body = _store_body(
        at="{0, 0}", wait=wait, behind="shl.b32 %r5, %r0, 2;\nadd.u32 %r5, %r5, %r1;\nst.shared.u32 [%r5], %r0;"
    )
    result = _run(body, "mp", [_map(_matrix()), _image()])
    assert bool(result.of_kind("race")) == races


def test_scatter_of_four_rows():
    array = _matrix(8)
    image = np.random.default_rng(9).integers(0, 1 << 16, (4, _COLUMNS), np.uint16)
    body = _store_body(_STORE.replace(".tile", ".tile::scatter4"), at="{16, 19, 0, 33, 7}").replace(
        f"{_BYTES};", "256;"
    )
    result = _run(body, "mp", [_map(array, "none", box=(_COLUMNS, 1)), image])
    expected = array.copy()
    for row, values in zip((19, 0, 33, 7), image, strict=True):
        if row < 20:
            expected[row, 16:] = values[:24]
    for arrays in result.arrays:
        np.testing.assert_array_equal(arrays[0], expected)


_REDUCE = "cp.reduce.async.bulk.tensor.2d.global.shared::cta.{}.tile.bulk_group"


@pytest.mark.parametrize(
    ("operation", "element", "function"),
    [
        ("add", "u32", np.add),
        ("add", "s32", np.add),
        ("min", "s32", np.minimum),
        ("max", "u32", np.maximum),
        ("and", "u32", np.bitwise_and),
        ("or", "u64", np.bitwise_or),
        ("xor", "u32", np.bitwise_xor),
        ("inc", "u32", lambda old, new: np.where(old >= new, 0, old + 1).astype(np.uint32)),
        ("dec", "u32", lambda old, new: np.where((old == 0) | (old > new), new, old - 1).astype(np.uint32)),
        ("max", "s64", np.maximum),
    ],
)
def test_integer_reductions(operation, element, function):
    dtype = np.dtype(f"{'u' if element[0] == 'u' else 'i'}{int(element[1:]) // 8}")
    columns = 64 // dtype.itemsize
    array = np.random.default_rng(10).integers(0, 256, (20, 160), np.uint8).view(dtype)
    image = _image()
    tensor = _map(array, "none", element, box=(columns, _ROWS))
    at = (columns + 48 // dtype.itemsize, 15)
    body = _store_body(_REDUCE.format(operation), at=f"{{{at[0]}, {at[1]}}}")
    result = _run(body, "mp", [tensor, image])
    expected, new = array.copy(), image.view(dtype).reshape(_ROWS, columns)
    window = expected[15:, at[0] : at[0] + columns]
    window[:] = function(window, new[: window.shape[0], : window.shape[1]])
    for arrays in result.arrays:
        np.testing.assert_array_equal(arrays[0], expected)
    assert not result.findings


def test_concurrent_float_reductions_do_not_race():
    array = np.zeros((20, 16), np.float32)
    image = np.arange(_BYTES // 4, dtype=np.float32)
    tensor = _map(array, "none", "f32", box=(16, _ROWS))
    result = _run(_store_body(_REDUCE.format("add"), at="{0, 2}"), "mp", [tensor, image], grid=3, resident=3)
    for arrays in result.arrays:
        np.testing.assert_array_equal(arrays[0][2:10], 3 * image.reshape(_ROWS, 16))
    assert not result.findings


def test_a_reduction_by_all_lanes_is_done_by_each():
    array, image = np.zeros((20, 16), np.uint32), np.arange(_BYTES // 4, dtype=np.uint32)
    body = _store_body(_REDUCE.format("add"), at="{0, 2}").replace("@!%p1 bra DONE;", "")
    result = _run(body, "mp", [_map(array, "none", "u32", box=(16, _ROWS)), image])
    assert [f.kind for f in result.findings] == ["issue"]
    np.testing.assert_array_equal(result.arrays[0][0][2:10], 32 * image.reshape(_ROWS, 16))


@pytest.mark.parametrize(
    ("operation", "element"),
    [("add", "u16"), ("add", "tf32"), ("min", "f32"), ("inc", "s32"), ("and", "f16"), ("add", "f64")],
)
def test_reductions_that_do_not_exist(operation, element):
    size = {"u16": 2, "f16": 2, "f64": 8}.get(element, 4)
    array = np.zeros((20, 64 // size), f"u{size}")
    with pytest.raises(DescriptorFaultError, match=f"of {element} cannot be reduced by {operation}"):
        _run(
            _store_body(_REDUCE.format(operation)), "mp", [_map(array, "none", element, box=(64 // size, 8)), _image()]
        )


def test_prefetches_do_nothing():
    body = f"""
    mov.b64 %d1, a0;
    prefetch.tensormap [%d1];
    cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%d1, {{0, 400}}];
    {_load_body()}"""
    array = _matrix()
    result = _run(body, "mp", [_map(array), np.zeros(_BYTES, np.uint8)])
    np.testing.assert_array_equal(result.arrays[0][1], _tile(array, 8, -2))


@pytest.mark.parametrize(
    "statement",
    [
        "tensormap.replace.tile.global_address.global.b1024.b64 [%d1], %d2;",
        "fence.proxy.tensormap::generic.acquire.gpu [%d1], 128;",
    ],
)
def test_maps_that_the_kernel_changes(statement):
    with pytest.raises(UnsupportedInstructionError, match="objects of the launch"):
        _run(f"mov.b64 %d1, a0;\nmov.u64 %d2, 0;\n{statement}", "m", [_map(_matrix())])
