"""cp.async.bulk, cp.reduce.async.bulk and bulk groups, as programs."""

from __future__ import annotations

import numpy as np
import pytest

from cuda.emulator.errors import BarrierFaultError, DeadlockError, MemoryFaultError, UnsupportedInstructionError
from cuda.emulator.front import emulate
from tests.emulator.text import module

_SEEDS = range(4)
_LOAD = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
_STORE = "cp.async.bulk.global.shared::cta.bulk_group"
_TO_CTA = "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes"
_WAIT = """
    WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p9, [%r8], 0;
    @!%p9 bra WAIT;"""


def _init(nbytes: int, barrier: int = 1024) -> str:
    """%r1 is the buffer, %r8 its mbarrier, %p1 true in thread 0; thread 0 of each CTA announces bytes."""
    return f"""
    mov.u32 %r0, %tid.x;
    mov.u32 %r1, buffer;
    add.u32 %r8, %r1, {barrier};
    setp.eq.u32 %p1, %r0, 0;
    @!%p1 bra READY;
    mbarrier.init.shared::cta.b64 [%r8], 1;
    fence.mbarrier_init.release.cluster;
    mbarrier.arrive.expect_tx.shared::cta.b64 %d9, [%r8], {nbytes};
    READY: bar.warp.sync 0xffffffff;
"""


def _fill(words: int = 1, start: int = 0) -> str:
    """Thread t stores 10 * t + i to word i * 32 + t of the buffer."""
    lines = [
        "mov.u32 %r0, %tid.x;",
        "mov.u32 %r1, buffer;",
        f"mad.lo.u32 %r2, %r0, 4, {start};",
        "add.u32 %r2, %r2, %r1;",
    ]
    for i in range(words):
        lines += [f"mad.lo.u32 %r3, %r0, 10, {i};", f"st.shared.u32 [%r2+{128 * i}], %r3;"]
    return "\n".join(lines)


_PATTERN = 10 * np.arange(32, dtype=np.uint32)


def _copy_out(pointer: str = "a1") -> str:
    """Thread t stores word t of the buffer to word t of an array."""
    return f"""
    mul.wide.u32 %d5, %r0, 4;
    ld.param.u64 %d6, [{pointer}];
    add.s64 %d6, %d6, %d5;
    shl.b32 %r5, %r0, 2;
    add.u32 %r5, %r5, %r1;
    ld.shared.u32 %r6, [%r5];
    st.global.u32 [%d6], %r6;"""


def _run(body: str, parameters: str, arguments: list, **options):
    shared = options.pop("shared", 2048)
    seeds = options.pop("seeds", _SEEDS)
    return emulate(module(body, parameters, shared=shared), arguments, options.pop("grid", 1), seeds=seeds, **options)


def _load_body(announced: int = 128, wait: str = _WAIT, size: int = 128, source_offset: int = 0) -> str:
    return f"""
    {_init(announced)}
    ld.param.u64 %d1, [a0];
    add.s64 %d1, %d1, {source_offset};
    @%p1 {_LOAD} [%r1], [%d1], {size}, [%r8];
    {wait}
    {_copy_out()}"""


def test_load():
    source = np.arange(1000, 1064, dtype=np.uint32)
    result = _run(_load_body(source_offset=64), "pp", [source, np.zeros(32, np.uint32)])
    for arrays in result.arrays:
        np.testing.assert_array_equal(arrays[1], source[16:48])
    assert not result.findings


def test_a_load_that_nobody_waits_for_races():
    source = np.arange(64, dtype=np.uint32)
    fill = _fill() + "\nfence.proxy.async.shared::cta;"
    result = _run(fill + _load_body(wait=""), "pp", [source, np.zeros(32, np.uint32)])
    assert any("ld.shared" in f.text and "cp.async.bulk" in f.text for f in result.of_kind("race"))


@pytest.mark.parametrize("announced", [112, 144])
def test_a_wrong_count_of_bytes_deadlocks(announced):
    with pytest.raises(DeadlockError, match="bytes to come"):
        _run(_load_body(announced), "pp", [np.zeros(64, np.uint32), np.zeros(32, np.uint32)])


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"size": 120}, MemoryFaultError, "the size 0x78 is no multiple of 16"),
        ({"source_offset": 8}, MemoryFaultError, "the source .* is no multiple of 16"),
        ({"source_offset": 192}, MemoryFaultError, r"reaches bytes 192\.\.319"),
        ({"size": 4096}, MemoryFaultError, "bytes"),
    ],
)
def test_faults_of_a_load(changes, error, text):
    with pytest.raises(error, match=text):
        _run(_load_body(**changes), "pp", [np.zeros(64, np.uint32), np.zeros(32, np.uint32)])


def test_an_uninitialised_barrier_is_a_fault():
    body = _load_body().replace("mbarrier.init.shared::cta.b64 [%r8], 1;", "").replace("mbarrier.arrive", "// ")
    with pytest.raises(BarrierFaultError, match="no mbarrier"):
        _run(body, "pp", [np.zeros(64, np.uint32), np.zeros(32, np.uint32)])


def test_a_load_by_all_lanes_is_reported():
    body = _load_body(32 * 128).replace("@%p1 " + _LOAD, _LOAD)
    result = _run(body, "pp", [np.arange(64, dtype=np.uint32), np.zeros(32, np.uint32)])
    (finding,) = result.of_kind("issue")
    assert "issued by 32 threads" in finding.text


def _store_body(
    fence: str = "fence.proxy.async.shared::cta;", wait: str = "cp.async.bulk.wait_group 0;", behind: str = ""
) -> str:
    return f"""
    {_fill()}
    {fence}
    bar.warp.sync 0xffffffff;
    setp.eq.u32 %p1, %r0, 0;
    ld.param.u64 %d1, [a0];
    @!%p1 bra DONE;
    {_STORE} [%d1], [%r1], 128;
    cp.async.bulk.commit_group;
    {wait}
    DONE: bar.warp.sync 0xffffffff;
    {behind}"""


def test_store():
    result = _run(_store_body(), "p", [np.zeros(32, np.uint32)])
    for arrays in result.arrays:
        np.testing.assert_array_equal(arrays[0], _PATTERN)
    assert not result.findings


def test_a_store_without_proxy_fence_is_reported():
    result = _run(_store_body(fence=""), "p", [np.zeros(32, np.uint32)])
    assert any("fence.proxy.async" in f.text for f in result.of_kind("proxy"))


_OVERWRITE = "st.shared.u32 [%r2], %r0;"
_READ_BACK = "mul.wide.u32 %d5, %r0, 4;\nadd.s64 %d6, %d1, %d5;\nld.global.u32 %r6, [%d6];"


@pytest.mark.parametrize(
    ("wait", "behind", "races"),
    [
        ("", _OVERWRITE, True),
        ("cp.async.bulk.wait_group.read 0;", _OVERWRITE, False),
        ("cp.async.bulk.wait_group 0;", _OVERWRITE, False),
        ("cp.async.bulk.wait_group 1;", _OVERWRITE, True),
        ("cp.async.bulk.wait_group.read 1;", _OVERWRITE, True),
        ("cp.async.bulk.wait_group.read 0;", _READ_BACK, True),
        ("cp.async.bulk.wait_group 0;", _READ_BACK, False),
    ],
)
def test_what_the_forms_of_wait_group_cover(wait, behind, races):
    result = _run(_store_body(wait=wait, behind=behind), "p", [np.zeros(32, np.uint32)], seeds=range(6))
    assert bool(result.of_kind("race")) == races


def test_waiting_for_the_source_leaves_the_destination_for_later():
    body = _store_body(wait="cp.async.bulk.wait_group.read 0;", behind=_READ_BACK + "\nst.global.u32 [%d6+128], %r6;")
    result = _run(body, "p", [np.zeros(64, np.uint32)], seeds=range(12), races=False)
    seen = {tuple(arrays[0][32:]) for arrays in result.arrays}
    assert seen == {(0,) * 32, tuple(_PATTERN)}


def test_wait_group_keeps_the_newest_groups():
    body = f"""
    {_fill(3)}
    fence.proxy.async.shared::cta;
    bar.warp.sync 0xffffffff;
    setp.eq.u32 %p1, %r0, 0;
    ld.param.u64 %d1, [a0];
    @!%p1 bra DONE;
    {_STORE} [%d1], [%r1], 128;
    cp.async.bulk.commit_group;
    {_STORE} [%d1+128], [%r1+128], 128;
    {_STORE} [%d1+256], [%r1+256], 128;
    cp.async.bulk.commit_group;
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group.read 2;
    DONE: bar.warp.sync 0xffffffff;
    st.shared.u32 [%r2+OFFSET], %r0;
    cp.async.bulk.wait_group.read 0;"""
    for offset, races in ((0, False), (128, True), (256, True)):
        result = _run(body.replace("OFFSET", str(offset)), "p", [np.zeros(96, np.uint32)])
        assert bool(result.of_kind("race")) == races, offset


def test_a_store_by_all_lanes_is_done_once():
    body = _store_body().replace("@!%p1 bra DONE;", "")
    result = _run(body, "p", [np.zeros(32, np.uint32)])
    assert [f.kind for f in result.findings] == ["issue"]
    np.testing.assert_array_equal(result.arrays[0][0], _PATTERN)


def test_store_of_some_bytes_of_each_chunk():
    body = _store_body().replace(_STORE, _STORE + ".cp_mask").replace("[%r1], 128;", "[%r1], 128, 0x8001;")
    result = _run(body, "p", [np.full(128, 0xEE, np.uint8)])
    expected = np.full((8, 16), 0xEE, np.uint8)
    expected[:, [0, 15]] = _PATTERN.view(np.uint8).reshape(8, 16)[:, [0, 15]]
    np.testing.assert_array_equal(result.arrays[0][0], expected.reshape(-1))


def test_reduction_of_global_memory():
    opcode = "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32"
    start = np.arange(500, 532, dtype=np.uint32)
    result = _run(_store_body().replace(_STORE, opcode), "p", [start], grid=3)
    for arrays in result.arrays:
        np.testing.assert_array_equal(arrays[0], start + 3 * _PATTERN)
    assert not result.findings


def test_a_store_races_with_a_reduction_of_another_cta():
    body = f"""
    mov.u32 %r7, %ctaid.x;
    setp.eq.u32 %p2, %r7, 0;
    {_store_body()}"""
    other = "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%d1], [%r1], 128;"
    body = body.replace(f"{_STORE} [%d1], [%r1], 128;", f"@%p2 {_STORE} [%d1], [%r1], 128;\n@!%p2 {other}")
    assert _run(body, "p", [np.zeros(32, np.uint32)], grid=2, resident=2).of_kind("race")


def _to_peer(opcode: str, barrier: str = "mapa.shared::cluster.u32 %r12, %r8, %r10;") -> str:
    return f"""
    {_fill()}
    add.u32 %r4, %r2, 128;
    st.shared.u32 [%r4], %r0;
    fence.proxy.async.shared::cta;
    {_init(128)}
    barrier.cluster.arrive.release.aligned;
    barrier.cluster.wait.acquire.aligned;
    mov.u32 %r9, %cluster_ctarank;
    xor.b32 %r10, %r9, 1;
    mapa.shared::cluster.u32 %r11, %r1, %r10;
    {barrier}
    @%p1 {opcode} [%r11+128], [%r1], 128, [%r12];
    {_WAIT}
    ld.shared.u32 %r6, [%r4];
    mul.wide.u32 %d5, %r0, 4;
    mul.wide.u32 %d4, %r9, 128;
    ld.param.u64 %d6, [a0];
    add.s64 %d6, %d6, %d5;
    add.s64 %d6, %d6, %d4;
    st.global.u32 [%d6], %r6;
    barrier.cluster.arrive.release.aligned;
    barrier.cluster.wait.acquire.aligned;"""


@pytest.mark.parametrize(
    ("opcode", "expected"),
    [
        (_TO_CTA, _PATTERN),
        (_TO_CTA.replace("cp.async", "cp.reduce.async") + ".add.u32", _PATTERN + np.arange(32)),
        (_TO_CTA.replace("cp.async", "cp.reduce.async") + ".max.s32", _PATTERN),
    ],
    ids=["copy", "add", "max"],
)
def test_to_another_cta(opcode, expected):
    result = _run(_to_peer(opcode), "p", [np.zeros((2, 32), np.uint32)], grid=2, cluster=2)
    for arrays in result.arrays:
        np.testing.assert_array_equal(arrays[0], np.stack([expected, expected]))
    assert not result.findings


def test_the_barrier_is_that_of_the_destination():
    body = _to_peer(_TO_CTA, barrier="mov.u32 %r12, %r8;")
    with pytest.raises(BarrierFaultError, match=r"the mbarrier is in CTA rank (\d), the destination in rank (?!\1)"):
        _run(body, "p", [np.zeros((2, 32), np.uint32)], grid=2, cluster=2, seeds=[0])


def test_multicast():
    body = f"""
    {_init(256)}
    barrier.cluster.arrive.release.aligned;
    barrier.cluster.wait.acquire.aligned;
    mov.u32 %r9, %cluster_ctarank;
    mul.wide.u32 %d4, %r9, 128;
    ld.param.u64 %d1, [a0];
    add.s64 %d1, %d1, %d4;
    and.b32 %r10, %r9, 1;
    mad.lo.u32 %r12, %r10, 128, %r1;
    shr.u32 %r11, %r9, 1;
    mov.u16 %h1, 5;
    shl.b16 %h1, %h1, %r10;
    mul.lo.u32 %r13, %r11, 128;
    add.u32 %r14, %r1, %r13;
    @%p1 {_LOAD}.multicast::cluster [%r14], [%d1], 128, [%r8], %h1;
    {_WAIT}
    shl.b32 %r5, %r0, 2;
    add.u32 %r5, %r5, %r1;
    ld.param.u64 %d6, [a1];
    mul.wide.u32 %d7, %r9, 256;
    add.s64 %d6, %d6, %d7;
    mul.wide.u32 %d5, %r0, 4;
    add.s64 %d6, %d6, %d5;
    ld.shared.u32 %r6, [%r5];
    st.global.u32 [%d6], %r6;
    ld.shared.u32 %r6, [%r5+128];
    st.global.u32 [%d6+128], %r6;
    barrier.cluster.arrive.release.aligned;
    barrier.cluster.wait.acquire.aligned;"""
    source = np.random.default_rng(0).integers(0, 2**32, (4, 32), np.uint32)
    result = _run(body, "pp", [source, np.zeros((4, 2, 32), np.uint32)], grid=4, cluster=4)
    expected = np.stack([source[[rank % 2, rank % 2 + 2]] for rank in range(4)])
    for arrays in result.arrays:
        np.testing.assert_array_equal(arrays[1], expected)
    assert not result.findings


def test_a_multicast_must_stay_in_the_cluster():
    body = _load_body().replace(_LOAD, _LOAD + ".multicast::cluster").replace("128, [%r8];", "128, [%r8], 2;")
    with pytest.raises(MemoryFaultError, match="CTAs outside of the cluster"):
        _run(body, "pp", [np.zeros(64, np.uint32), np.zeros(32, np.uint32)])


def test_prefetch_does_nothing():
    body = "ld.param.u64 %d1, [a0];\ncp.async.bulk.prefetch.L2.global [%d1], 64;"
    result = _run(body, "p", [np.arange(16, dtype=np.uint32)])
    np.testing.assert_array_equal(result.arrays[0][0], np.arange(16))


@pytest.mark.parametrize(
    ("opcode", "why"),
    [
        (_STORE + ".relaxed", "qualifier .relaxed"),
        ("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.s64", "no reduction add of s64"),
        ("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.bf16", "requires .noftz"),
        ("cp.reduce.async.bulk.global.shared::cta.bulk_group.min.f32", "no reduction min of f32"),
    ],
)
def test_unsupported_forms(opcode, why):
    with pytest.raises(UnsupportedInstructionError, match=why):
        _run(_store_body().replace(_STORE, opcode), "p", [np.zeros(32, np.uint32)])
