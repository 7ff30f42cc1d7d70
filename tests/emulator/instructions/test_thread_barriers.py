import numpy as np
import pytest

from cuda.emulator import Output, emulate
from cuda.emulator.errors import BarrierFaultError, DeadlockError, MemoryFaultError, UnsupportedInstructionError
from tests.emulator.kernels.case import entry

_LANES = np.arange(32)


def _run(parameters, body, arguments, grid=1, **options):
    options = {"block": 64, "shared_bytes": 512} | options
    return emulate(entry(parameters, body), arguments, grid, **options)


# Every thread passes its number on to the thread with the same lane in the next warp.
_EXCHANGE = """
shl.b32 %r10, %r0, 2;
add.u32 %r11, %r1, %r10;
st.shared.b32 [%r11], %r0;
{barrier}
xor.b32 %r12, %r10, 128;
add.u32 %r11, %r1, %r12;
ld.shared.b32 %r13, [%r11];
cvt.u64.u32 %d1, %r10;
add.u64 %d1, %out, %d1;
st.global.b32 [%d1], %r13;
"""


@pytest.mark.parametrize(
    ("barrier", "races"),
    [
        ("bar.sync 0;", False),
        ("bar.sync 3, 64;", False),
        ("barrier.sync 0;", False),
        ("barrier.cta.sync.aligned 0, 64;", False),
        ("mov.u32 %r20, 5;\nmov.u32 %r21, 64;\nbarrier.sync %r20, %r21;", False),
        ("bar.red.popc.u32 %r20, 0, 64, %p1;", False),
        ("barrier.cluster.arrive;\nbarrier.cluster.wait;", False),
        ("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;", False),
        ("barrier.cluster.arrive.relaxed;\nbarrier.cluster.wait;", True),
        ("fence.acq_rel.cluster;\nbarrier.cluster.arrive.relaxed;\nbarrier.cluster.wait;", False),
        ("bar.warp.sync 0xffffffff;", True),
        ("bar.sync 0, 32;", True),
    ],
)
def test_what_orders_two_warps(barrier, races):
    body = "setp.eq.u32 %p1, %r0, 0;\n" + _EXCHANGE.format(barrier=barrier)
    found = 0
    for seed in range(4):
        try:
            result = _run({"out": "pointer"}, body, [Output(np.zeros(64, np.uint32))], seeds=[seed])
        except MemoryFaultError as fault:  # Without a barrier the word may not have been written yet.
            assert "never written" in str(fault)
            found += 1
            continue
        found += len(result.of_kind("race"))
        if not races:
            np.testing.assert_array_equal(result.arrays[0][0], np.arange(64) ^ 32)
    assert bool(found) == races


def test_a_producer_arrives_and_goes_on():
    body = """
setp.ge.u32 %p1, %r0, 32;
shl.b32 %r10, %r0, 2;
add.u32 %r11, %r1, %r10;
@%p1 bra CONSUMER;
st.shared.b32 [%r11], %r0;
bar.arrive 1, 64;
ret;
CONSUMER:
bar.sync 1, 64;
ld.shared.b32 %r12, [%r11+-128];
add.s32 %r10, %r10, -128;
cvt.u64.u32 %d1, %r10;
add.u64 %d1, %out, %d1;
st.global.b32 [%d1], %r12;
"""
    result = _run({"out": "pointer"}, body, [Output(np.zeros(32, np.uint32))], seeds=range(4))
    np.testing.assert_array_equal(result.arrays[0][0], _LANES)
    assert not result.findings


def test_reductions_over_the_threads():
    body = """
setp.lt.u32 %p1, %r0, 37;
bar.red.popc.u32 %r10, 0, %p1;
bar.red.and.pred %p2, 1, 64, %p1;
barrier.red.or.aligned.pred %p3, 2, !%p1;
selp.b32 %r11, 1, 0, %p2;
selp.b32 %r12, 1, 0, %p3;
mul.wide.u32 %d1, %r0, 16;
add.u64 %d1, %out, %d1;
st.global.v4.b32 [%d1], {%r10, %r11, %r12, 0};
"""
    result = _run({"out": "pointer"}, body, [Output(np.zeros((64, 4), np.uint32))], seeds=range(3))
    for (out,) in result.arrays:
        np.testing.assert_array_equal(out, [[37, 0, 1, 0]] * 64)


@pytest.mark.parametrize("barrier", ["bar.sync 0;", "barrier.cluster.arrive;\nbarrier.cluster.wait;"])
@pytest.mark.parametrize("lanes", [0, 7])
def test_threads_that_have_exited_are_not_waited_for(barrier, lanes):
    body = f"""
mov.u32 %r2, %cluster_ctarank;
add.u32 %r3, %r2, %r0;
setp.lt.u32 %p1, %r0, {32 + lanes};
@!%p1 ret;
{barrier}
st.global.b32 [%out], 1;
"""
    result = _run({"out": "pointer"}, body, [np.zeros(1, np.uint32)], seeds=range(6), races=False)
    assert [run[0][0] for run in result.arrays] == [1] * 6


def test_an_explicit_count_waits_for_all():
    body = "setp.lt.u32 %p1, %r0, 32;\n@%p1 ret;\nbar.sync 1, 64;"
    with pytest.raises(DeadlockError, match=r"named barrier 1 of CTA \(0, 0, 0\) \(32 of 64 threads\)"):
        _run({}, body, [])


def test_a_partly_filled_warp_counts_as_a_whole_one():
    result = _run(
        {"out": "pointer"},
        _EXCHANGE.format(barrier="bar.sync 2, 64;").replace("128;", "0;"),
        [np.zeros(40, np.uint32)],
        block=40,
    )
    np.testing.assert_array_equal(result.arrays[0][0], np.arange(40))


def test_an_aligned_barrier_waits_for_the_lanes_of_its_warp():
    body = """
setp.lt.u32 %p1, %r0, 16;
@%p1 bra FIRST;
bar.sync 1, 32;
bra DONE;
FIRST:
{}
DONE:
"""
    with pytest.raises(DeadlockError, match="the other lanes of its warp"):
        _run({}, body.format("bar.sync 1, 32;"), [], block=32)
    unaligned = body.format("barrier.sync 1, 32;").replace("bar.sync", "barrier.sync")
    _run({}, unaligned, [], block=32)


def test_lanes_of_a_mask_meet():
    body = """
setp.lt.u32 %p1, %r0, 16;
@%p1 bra FIRST;
bar.warp.sync {others};
bra DONE;
FIRST:
bar.warp.sync 0x0000ffff;
DONE:
"""
    _run({}, body.format(others="0xffff0000"), [], block=32)
    with pytest.raises(DeadlockError, match="the other lanes of its warp in 0xffff8000"):
        _run({}, body.format(others="0xffff8000"), [], block=32)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("bar.sync 16;", "0 to 15 exist"),
        ("bar.sync 1, 48;", "no multiple of the warp size"),
        ("bar.sync %r0, 64;", "different barriers"),
        ("barrier.cluster.wait;", "waits without barrier.cluster.arrive"),
        ("barrier.cluster.arrive;\nbarrier.cluster.arrive;", "arrives again"),
        ("setp.lt.u32 %p1, %r0, 32;\nselp.b32 %r10, 64, 96, %p1;\nbar.sync 1, %r10;", "is used for"),
        ("bar.arrive 1, 64;\nbar.arrive 1, 96;\nbar.arrive 1, 32;", "is used for"),
    ],
)
def test_faults(body, message):
    with pytest.raises(BarrierFaultError, match=message) as caught:
        _run({}, body, [])
    assert "line " in str(caught.value)


def test_unknown_forms():
    with pytest.raises(UnsupportedInstructionError):
        _run({}, "bar.red.xor.pred %p1, 0, %p2;", [])
    with pytest.raises(UnsupportedInstructionError, match="number of threads must be given"):
        _run({}, "bar.arrive 0;", [])


def test_the_cluster_barrier_joins_all_ctas():
    body = """
mov.u32 %r2, %cluster_ctarank;
shl.b32 %r10, %r0, 2;
add.u32 %r11, %r1, %r10;
mad.lo.u32 %r12, %r2, 100, %r0;
st.shared.b32 [%r11], %r12;
barrier.cluster.arrive;
barrier.cluster.wait;
xor.b32 %r3, %r2, 1;
mapa.shared::cluster.u32 %r4, %r11, %r3;
ld.shared::cluster.b32 %r13, [%r4];
mad.lo.u32 %r14, %r2, 64, %r0;
mul.wide.u32 %d1, %r14, 4;
add.u64 %d1, %out, %d1;
st.global.b32 [%d1], %r13;
{}
st.shared.b32 [%r11], 0;
"""
    outputs = [Output(np.zeros((2, 64), np.uint32))]
    clean = body.format("barrier.cluster.arrive;\nbarrier.cluster.wait;")
    result = _run({"out": "pointer"}, clean, outputs, grid=2, cluster=2, seeds=range(3))
    for (out,) in result.arrays:
        np.testing.assert_array_equal(out, [100 + np.arange(64), np.arange(64)])
    assert not result.findings
    # A CTA that writes again while its peer may still read.
    result = _run({"out": "pointer"}, body.format("bar.sync 0;"), outputs, grid=2, cluster=2, seeds=range(3))
    assert result.of_kind("race")
