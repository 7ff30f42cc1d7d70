"""cp.async and its groups, as programs."""

from __future__ import annotations

import numpy as np
import pytest

from cuda.emulator.errors import BarrierFaultError, DeadlockError, MemoryFaultError, UnsupportedInstructionError
from cuda.emulator.front import emulate
from tests.emulator.text import module

_SEEDS = range(4)


def _run(body: str, parameters: str, arguments: list, **options):
    return emulate(module(body, parameters, shared=2048), arguments, 1, seeds=options.pop("seeds", _SEEDS), **options)


def _body(copies: str, wait: str = "cp.async.wait_all;", size: int = 16) -> str:
    """%r2 and %d2 are the thread's `size` bytes of the buffer and of a0; they are copied to a1 behind the wait."""
    return f"""
    mov.u32 %r0, %tid.x;
    mov.u32 %r1, buffer;
    mad.lo.u32 %r2, %r0, {size}, %r1;
    mul.wide.u32 %d1, %r0, {size};
    ld.param.u64 %d2, [a0];
    add.s64 %d2, %d2, %d1;
    {copies}
    {wait}
    ld.param.u64 %d3, [a1];
    add.s64 %d3, %d3, %d1;
    mov.u32 %r9, 0;
    COPY: ld.shared.u32 %r3, [%r2];
    st.global.u32 [%d3], %r3;
    add.u32 %r2, %r2, 4;
    add.s64 %d3, %d3, 4;
    add.u32 %r9, %r9, 4;
    setp.lt.u32 %p9, %r9, {size};
    @%p9 bra COPY;"""


def _source(size: int = 16) -> np.ndarray:
    return np.random.default_rng(size).integers(1, 256, 32 * size, np.uint8)


@pytest.mark.parametrize(
    ("opcode", "size"),
    [
        ("cp.async.ca.shared.global", 4),
        ("cp.async.ca.shared::cta.global.L2::128B", 8),
        ("cp.async.ca.shared.global", 16),
        ("cp.async.cg.shared.global", 16),
    ],
)
def test_copies(opcode, size):
    source = _source(size)
    result = _run(_body(f"{opcode} [%r2], [%d2], {size};", size=size), "pp", [source, np.zeros_like(source)])
    for arrays in result.arrays:
        np.testing.assert_array_equal(arrays[1], source)
    assert not result.findings


def test_cache_policy_and_some_lanes():
    source = _source()
    guarded = """
    setp.lt.u32 %p1, %r0, 20;
    mov.u32 %r4, 0;
    st.shared.v4.u32 [%r2], {%r4, %r4, %r4, %r4};
    @%p1 cp.async.cg.shared.global.L2::cache_hint [%r2], [%d2], 16, %d9;"""
    result = _run("mov.u64 %d9, 0;" + _body(guarded), "pp", [source, np.zeros_like(source)])
    expected = source.copy()
    expected[320:] = 0
    for arrays in result.arrays:
        np.testing.assert_array_equal(arrays[1], expected)


def test_the_rest_of_a_short_source_is_zero():
    source = _source()
    copies = "and.b32 %r4, %r0, 3;\nshl.b32 %r4, %r4, 2;\ncp.async.ca.shared.global [%r2], [%d2], 16, %r4;"
    result = _run(_body(copies), "pp", [source, np.zeros_like(source)])
    expected = source.reshape(32, 16).copy()
    for lane in range(32):
        expected[lane, 4 * (lane % 4) :] = 0
    for arrays in result.arrays:
        np.testing.assert_array_equal(arrays[1].reshape(32, 16), expected)


def test_a_source_of_no_bytes_is_not_read():
    copies = "mov.u64 %d2, 0;\ncp.async.cg.shared.global [%r2], [%d2], 16, 0;"
    result = _run(_body(copies), "pp", [_source(), np.ones(512, np.uint8)])
    assert not result.arrays[0][1].any()


@pytest.mark.parametrize(("predicate", "ignored"), [("%p1", range(1, 32, 2)), ("!%p1", range(0, 32, 2))])
def test_ignored_sources(predicate, ignored):
    source = _source()
    copies = f"and.b32 %r4, %r0, 1;\nsetp.eq.u32 %p1, %r4, 1;\ncp.async.cg.shared.global [%r2], [%d2], 16, {predicate};"
    result = _run(_body(copies), "pp", [source, np.zeros_like(source)])
    expected = source.reshape(32, 16).copy()
    expected[list(ignored)] = 0
    for arrays in result.arrays:
        np.testing.assert_array_equal(arrays[1].reshape(32, 16), expected)


_COPY = "cp.async.cg.shared.global [%r2], [%d2], 16;"


@pytest.mark.parametrize(
    ("copies", "wait", "races"),
    [
        (_COPY, "", True),
        (_COPY, "cp.async.wait_group 0;", True),
        (_COPY + "cp.async.commit_group;", "cp.async.wait_group 0;", False),
        (_COPY + "cp.async.commit_group;", "cp.async.wait_group 1;", True),
        (_COPY + "cp.async.commit_group;cp.async.commit_group;", "cp.async.wait_group 1;", False),
        (_COPY + "cp.async.commit_group;", "bar.warp.sync 0xffffffff;", True),
        (_COPY, "cp.async.wait_all;", False),
    ],
)
def test_what_the_waits_cover(copies, wait, races):
    fill = "mov.u32 %r4, 0;\nst.shared.v4.u32 [%r2], {%r4, %r4, %r4, %r4};\n"
    result = _run(_body(fill + copies, wait), "pp", [_source(), np.zeros(512, np.uint8)])
    assert bool(result.of_kind("race")) == races


def test_groups_are_those_of_a_thread():
    """Half of the lanes commit once more, so that their older group is complete and the others' need not be."""
    copies = f"""
    mov.u32 %r4, 0;
    st.shared.v4.u32 [%r2], {{%r4, %r4, %r4, %r4}};
    setp.lt.u32 %p1, %r0, 16;
    {_COPY}
    cp.async.commit_group;
    @%p1 cp.async.commit_group;
    @%p1 cp.async.wait_group 1;"""
    body = _body(copies, "@!%p1 bra END;") + "\nEND:"
    result = _run(body, "pp", [_source(), np.zeros(512, np.uint8)])
    assert not result.of_kind("race")
    late = _run(body.replace("@%p1 cp.async.commit_group;", ""), "pp", [_source(), np.zeros(512, np.uint8)])
    assert late.of_kind("race")


def _arrival(arrive: str, count: int) -> str:
    return f"""
    mov.u32 %r8, buffer;
    add.u32 %r8, %r8, 1024;
    setp.eq.u32 %p1, %r0, 0;
    @%p1 mbarrier.init.shared::cta.b64 [%r8], {count};
    bar.warp.sync 0xffffffff;
    {_COPY}
    {arrive}
    """


_WAIT = """
    WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p8, [%r8], 0;
    @!%p8 bra WAIT;"""


@pytest.mark.parametrize(
    ("arrive", "count"),
    [
        ("cp.async.mbarrier.arrive.noinc.shared.b64 [%r8];", 32),
        ("cp.async.mbarrier.arrive.shared::cta.b64 [%r8];\n@%p1 mbarrier.arrive.shared::cta.b64 %d9, [%r8];", 1),
    ],
)
def test_arrival_when_the_copies_have_landed(arrive, count):
    source = _source()
    result = _run(_body(_arrival(arrive, count), _WAIT), "pp", [source, np.zeros_like(source)], seeds=range(8))
    for arrays in result.arrays:
        np.testing.assert_array_equal(arrays[1], source)
    assert not result.findings


def test_an_arrival_covers_copies_that_have_landed_before_it():
    spin = """
    mov.u32 %r7, 0;
    SPIN: add.u32 %r7, %r7, 1;
    setp.lt.u32 %p7, %r7, 200;
    @%p7 bra SPIN;
    cp.async.mbarrier.arrive.noinc.shared.b64 [%r8];"""
    source = _source()
    result = _run(_body(_arrival(spin, 32), _WAIT), "pp", [source, np.zeros_like(source)], seeds=range(10))
    assert not result.findings


def test_an_arrival_without_noinc_pays_for_itself():
    with pytest.raises(DeadlockError):
        _run(
            _body(_arrival("cp.async.mbarrier.arrive.shared.b64 [%r8];", 32), _WAIT),
            "pp",
            [_source(), np.zeros(512, np.uint8)],
        )


def test_too_many_arrivals_are_a_fault():
    with pytest.raises(BarrierFaultError, match=r"line \d+: cp.async.mbarrier.arrive.*more than its 20 arrivals"):
        _run(
            _body(_arrival("cp.async.mbarrier.arrive.noinc.shared.b64 [%r8];", 20)),
            "pp",
            [_source(), np.zeros(512, np.uint8)],
        )


def test_the_asynchronous_proxy_needs_a_fence():
    store = """
    FENCE
    bar.warp.sync 0xffffffff;
    setp.eq.u32 %p1, %r0, 0;
    ld.param.u64 %d4, [a1];
    @%p1 cp.async.bulk.global.shared::cta.bulk_group [%d4], [%r1], 512;
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group.read 0;
    ret;"""
    body = _body(_COPY, "cp.async.wait_all;" + store)
    arguments = [_source(), np.zeros(512, np.uint8)]
    assert _run(body.replace("FENCE", ""), "pp", arguments).of_kind("proxy")
    assert not _run(body.replace("FENCE", "fence.proxy.async.shared::cta;"), "pp", arguments).findings


@pytest.mark.parametrize(
    ("copy", "error", "text"),
    [
        ("cp.async.cg.shared.global [%r2+8], [%d2], 16;", MemoryFaultError, "the destination .* is no multiple of 16"),
        ("cp.async.cg.shared.global [%r2], [%d2+8], 16;", MemoryFaultError, "a source is no multiple of 16"),
        ("cp.async.cg.shared.global [%r2], [%d2+512], 16;", MemoryFaultError, "which has 512"),
        ("cp.async.ca.shared.global [%r2], [%d2], 8, 12;", MemoryFaultError, "the source size 12 is more than 8"),
        ("cp.async.cg.shared.global [%r2], [%d2], 8;", UnsupportedInstructionError, "8 bytes"),
        ("cp.async.ca.shared.global [%r2], [%d2], 12;", UnsupportedInstructionError, "12 bytes"),
    ],
)
def test_faults(copy, error, text):
    with pytest.raises(error, match=text):
        _run(_body(copy), "pp", [_source(), np.zeros(512, np.uint8)], seeds=[0])
