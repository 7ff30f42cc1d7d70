import numpy as np
import pytest

from cuda.emulator import Output, emulate
from cuda.emulator.errors import BarrierFaultError, DeadlockError
from tests.emulator.kernels.case import entry

# One thread initialises the barrier behind 256 bytes of data for {count} arrivals.
_INIT = """
setp.eq.u32 %p0, %r0, 0;
setp.ge.u32 %p1, %r0, 32;
@%p0 mbarrier.init.shared::cta.b64 [%r1+256], {count};
bar.sync 0;
"""
_WAIT = """
{label}:
mbarrier.{wait}.shared::cta.b64 %p2, [%r1+256], {phase};
@!%p2 bra {label};
"""


def _wait(phase: int | str, label: str = "WAIT", wait: str = "try_wait.parity") -> str:
    return _WAIT.format(label=label, phase=phase, wait=wait)


def _run(parameters, body, arguments, **options):
    options = {"block": 64, "shared_bytes": 288} | options
    return emulate(entry(parameters, body), arguments, options.pop("grid", 1), **options)


def _message(arrive: str, wait: str = "try_wait.parity", count: int = 1) -> str:
    """Warp 1 sends 32 words to warp 0."""
    return f"""{_INIT.format(count=count)}
shl.b32 %r10, %r0, 2;
add.u32 %r11, %r1, %r10;
@%p1 bra SEND;
{_wait(0, wait=wait)}
ld.shared.b32 %r12, [%r11+128];
mul.wide.u32 %d1, %r0, 4;
add.u64 %d1, %out, %d1;
st.global.b32 [%d1], %r12;
ret;
SEND:
st.shared.b32 [%r11], %r0;
bar.warp.sync 0xffffffff;
setp.eq.u32 %p3, %r0, 32;
{arrive}
"""


@pytest.mark.parametrize(
    ("arrive", "count", "races"),
    [
        ("@%p3 mbarrier.arrive.shared::cta.b64 _, [%r1+256];", 1, False),
        ("mbarrier.arrive.shared::cta.b64 %d2, [%r1+256];", 32, False),
        ("mbarrier.arrive_drop.release.cta.shared::cta.b64 %d2, [%r1+256];", 32, False),
        ("@%p3 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r1+256], 3;", 3, False),
        ("@%p3 mbarrier.arrive.relaxed.cluster.shared::cta.b64 _, [%r1+256];", 1, True),
        ("fence.acq_rel.cta;\n@%p3 mbarrier.arrive.relaxed.cluster.shared::cta.b64 _, [%r1+256];", 1, False),
    ],
)
def test_a_message(arrive, count, races):
    result = _run({"out": "pointer"}, _message(arrive, count=count), [Output(np.zeros(32, np.uint32))], seeds=range(4))
    for (out,) in result.arrays:
        np.testing.assert_array_equal(out, np.arange(32, 64))
    assert bool(result.of_kind("race")) == races


def test_a_relaxed_wait_acquires_at_the_next_fence():
    arrive = "@%p3 mbarrier.arrive.shared::cta.b64 _, [%r1+256];"
    body = _message(arrive, wait="try_wait.parity.relaxed.cta")
    outputs = [Output(np.zeros(32, np.uint32))]
    assert _run({"out": "pointer"}, body, outputs, seeds=range(4)).of_kind("race")
    fenced = body.replace("ld.shared.b32", "fence.acq_rel.cta;\nld.shared.b32")
    assert not _run({"out": "pointer"}, fenced, outputs, seeds=range(4)).findings


@pytest.mark.parametrize("wait", ["test_wait.parity", "try_wait.parity.acquire.cluster"])
def test_a_wait_of_either_kind(wait):
    arrive = "@%p3 mbarrier.arrive.shared::cta.b64 _, [%r1+256];"
    result = _run({"out": "pointer"}, _message(arrive, wait=wait), [Output(np.zeros(32, np.uint32))], seeds=range(3))
    assert not result.findings
    np.testing.assert_array_equal(result.arrays[0][0], np.arange(32, 64))


def test_a_wait_for_the_state_of_ones_own_arrival():
    body = f"""{_INIT.format(count=64)}
mbarrier.arrive.shared::cta.b64 %d2, [%r1+256];
{_wait("%d2", wait="try_wait")}
mbarrier.arrive.shared::cta.b64 %d3, [%r1+256];
{_wait("%d3", label="AGAIN", wait="test_wait")}
mbarrier.test_wait.parity.shared::cta.b64 %p3, [%r1+256], 1;
selp.b32 %r10, 1, 0, %p3;
st.global.b32 [%out], %r10;
"""
    result = _run({"out": "pointer"}, body, [Output(np.zeros(1, np.uint32))], seeds=range(3), races=False)
    assert [run[0][0] for run in result.arrays] == [1, 1, 1]


def test_lanes_wait_for_barriers_of_their_own():
    body = f"""{_INIT.format(count=1)}
@%p0 mbarrier.init.shared::cta.b64 [%r1+264], 1;
bar.sync 0;
@%p1 bra ARRIVE;
and.b32 %r10, %r0, 1;
shl.b32 %r10, %r10, 3;
add.u32 %r10, %r1, %r10;
{_wait(0).replace("%r1", "%r10")}
ret;
ARRIVE:
setp.eq.u32 %p3, %r0, 32;
@%p3 mbarrier.arrive.shared::cta.b64 _, [%r1+264];
@%p3 mbarrier.arrive.shared::cta.b64 _, [%r1+256];
"""
    assert not _run({}, body, [], seeds=range(3)).findings


def test_arrivals_in_the_other_cta_of_a_cluster():
    body = f"""{_INIT.format(count=64)}
fence.mbarrier_init.release.cluster;
barrier.cluster.arrive.relaxed;
barrier.cluster.wait;
mov.u32 %r2, %cluster_ctarank;
xor.b32 %r3, %r2, 1;
mapa.shared::cluster.u32 %r4, %r1, %r3;
shl.b32 %r10, %r0, 2;
add.u32 %r11, %r4, %r10;
mad.lo.u32 %r12, %r2, 1000, %r0;
st.shared::cluster.b32 [%r11], %r12;
mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r4+256];
{_wait(0, wait="try_wait.parity.acquire.cluster")}
add.u32 %r11, %r1, %r10;
ld.shared.b32 %r13, [%r11];
mad.lo.u32 %r14, %r2, 64, %r0;
mul.wide.u32 %d1, %r14, 4;
add.u64 %d1, %out, %d1;
st.global.b32 [%d1], %r13;
barrier.cluster.arrive;
barrier.cluster.wait;
"""
    outputs = [Output(np.zeros((2, 64), np.uint32))]
    result = _run({"out": "pointer"}, body, outputs, grid=2, cluster=2, seeds=range(3))
    for (out,) in result.arrays:
        np.testing.assert_array_equal(out, [1000 + np.arange(64), np.arange(64)])
    assert not result.findings
    local = body.replace("mbarrier.arrive.release.cluster.shared::cluster.b64", "mbarrier.arrive.shared::cta.b64")
    with pytest.raises(BarrierFaultError, match="without ::cluster"):
        _run({"out": "pointer"}, local, outputs, grid=2, cluster=2)
    without = body.replace("fence.mbarrier_init.release.cluster;", "")
    found = _run({"out": "pointer"}, without, outputs, grid=2, cluster=2).of_kind("race")
    assert any("initialisation" in finding.text for finding in found)


def test_use_before_initialisation_is_ordered():
    body = (
        f"{_INIT.format(count=1)}".replace("bar.sync 0;", "")
        + """
@!%p1 bra DONE;
nanosleep.u32 1000;
DONE:
setp.eq.u32 %p3, %r0, 32;
@%p3 mbarrier.arrive.shared::cta.b64 _, [%r1+256];
"""
    )
    for seed in range(8):
        try:
            assert _run({}, body, [], seeds=[seed]).of_kind("race")
        except BarrierFaultError as fault:
            assert "no mbarrier was initialised" in str(fault)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("@%p0 mbarrier.arrive.shared::cta.b64 _, [%r1+256], 3;", "more than its 2 arrivals"),
        ("@%p0 mbarrier.arrive.noComplete.shared::cta.b64 %d2, [%r1+256], 2;", "in spite of .noComplete"),
        ("@%p0 mbarrier.init.shared::cta.b64 [%r1+264], 0;", "1 to 1048575 are possible"),
        ("@%p0 mbarrier.arrive.shared::cta.b64 _, [%r1+264];", "no mbarrier was initialised at shared byte 264"),
        ("mbarrier.test_wait.parity.shared::cta.b64 %p2, [%r1+256], 2;", "waits for parity 2"),
        ("@%p0 mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r1+256], 0x100000;", "pending transaction bytes"),
        ("@%p0 st.shared.b32 [%r1+260], 0;", "overwrites mbarrier at shared byte 256"),
        ("@%p0 st.shared.b8 [%r1+256], 0;", "overwrites mbarrier at shared byte 256"),
    ],
)
def test_faults(body, message):
    with pytest.raises(BarrierFaultError, match=message) as caught:
        _run({}, _INIT.format(count=2) + body, [])
    assert "line " in str(caught.value)


def test_bytes_beside_a_barrier_can_be_written():
    _run({}, _INIT.format(count=2) + "st.shared.b32 [%r1+252], 0;\nst.shared.b32 [%r1+264], 0;", [], block=32)


@pytest.mark.parametrize(
    ("announced", "arrived"), [(128, 112), (112, 128)], ids=["too many announced", "too few announced"]
)
def test_a_wrong_count_of_bytes_is_reported_at_the_deadlock(announced, arrived):
    body = f"""{_INIT.format(count=1)}
@%p0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1+256], {announced};
@%p0 mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%r1+256], {arrived};
{_wait(0)}
"""
    with pytest.raises(DeadlockError) as caught:
        _run({}, body, [], block=32)
    text = str(caught.value)
    assert "parity 0 of mbarrier at shared byte 256" in text
    assert f"0 of 1 arrivals and {announced - arrived} bytes to come" in text
    assert "mbarrier.try_wait.parity" in text and "warp 0 of CTA (0, 0, 0)" in text


def test_a_missing_arrival_is_reported_at_the_deadlock():
    body = f"{_INIT.format(count=3)}mbarrier.arrive.shared::cta.b64 %d2, [%r1+256], 1;\n{_wait(0)}".replace(
        "mbarrier.arrive", "@%p0 mbarrier.arrive"
    )
    with pytest.raises(DeadlockError, match="2 of 3 arrivals and 0 bytes to come"):
        _run({}, body, [])


def test_invalidated_bytes_are_undefined_and_can_be_used_again():
    body = f"""{_INIT.format(count=1)}
bar.sync 0;
@%p0 mbarrier.inval.shared::cta.b64 [%r1+256];
{{}}
"""
    _run({}, body.format("@%p0 st.shared.b32 [%r1+256], 0;\n@%p0 ld.shared.b32 %r10, [%r1+256];"), [])
    with pytest.raises(BarrierFaultError, match="no mbarrier"):
        _run({}, body.format("@%p0 mbarrier.arrive.shared::cta.b64 _, [%r1+256];"), [])


def test_an_invalidation_comes_after_all_uses():
    body = f"""{_INIT.format(count=1)}
setp.eq.u32 %p3, %r0, 32;
@%p3 mbarrier.arrive.shared::cta.b64 _, [%r1+256];
{{}}
@%p0 mbarrier.inval.shared::cta.b64 [%r1+256];
"""
    assert not _run({}, body.format("bar.sync 0;"), [], seeds=range(4)).findings
    waiting = f"@%p1 bra DONE;\n{_wait(0)}\nDONE:\n"
    assert not _run({}, body.format(waiting), [], seeds=range(4)).findings
    unordered = [_outcome(body.format(""), seed) for seed in range(4)]
    assert set(unordered) <= {"race", "fault"}


def _outcome(body: str, seed: int) -> str:
    try:
        return "race" if _run({}, body, [], seeds=[seed]).of_kind("race") else "none"
    except BarrierFaultError:
        return "fault"


def test_a_second_initialisation_is_reported():
    body = _INIT.format(count=1) + "@%p0 mbarrier.init.shared::cta.b64 [%r1+256], 1;"
    (finding,) = _run({}, body, []).findings
    assert finding.kind == "issue" and "without mbarrier.inval" in finding.text


_SLOW_CONSUMER = """
@%p1 bra PRODUCER;
mov.u32 %r20, 0;
LOOP:
mbarrier.test_wait.parity.shared::cta.b64 %p2, [%r1+256], {parity};
nanosleep.u32 100;
{sync}
add.u32 %r20, %r20, 1;
setp.lt.u32 %p3, %r20, 4;
@%p3 bra LOOP;
ret;
PRODUCER:
mov.u32 %r20, 0;
SEND:
{sync}
setp.eq.u32 %p2, %r0, 32;
@%p2 mbarrier.arrive.shared::cta.b64 _, [%r1+256];
@%p2 mbarrier.arrive.shared::cta.b64 _, [%r1+256];
add.u32 %r20, %r20, 1;
setp.lt.u32 %p3, %r20, 4;
@%p3 bra SEND;
"""


def test_a_missed_phase_is_reported():
    """The consumer looks for the end of phase 0, and looks again when phase 1 is over as well."""
    body = _INIT.format(count=1) + _SLOW_CONSUMER.format(parity=0, sync="bar.sync 1;")
    findings = _run({}, body, []).of_kind("phase")
    assert findings and "waits for phase 0" in findings[0].text and "finds it in phase" in findings[0].text


def test_waiting_for_every_other_phase_is_no_missed_phase():
    """Each of two warps waits for phases of one parity."""
    body = f"""{_INIT.format(count=32)}
@%p0 mbarrier.init.shared::cta.b64 [%r1+264], 32;
bar.sync 0;
shr.u32 %r2, %r0, 5;
mov.u32 %r20, 0;
LOOP:
and.b32 %r21, %r20, 1;
setp.eq.u32 %p4, %r21, %r2;
@!%p4 bra OTHER;
mbarrier.arrive.shared::cta.b64 %d2, [%r1+256];
bra NEXT;
OTHER:
{_wait("%r21")}
NEXT:
bar.sync 1;
add.u32 %r20, %r20, 1;
setp.lt.u32 %p3, %r20, 6;
@%p3 bra LOOP;
"""
    assert not _run({}, body, [], seeds=range(4)).findings


def test_an_old_state_is_reported():
    body = f"""{_INIT.format(count=64)}
mbarrier.arrive.shared::cta.b64 %d2, [%r1+256];
{_wait(0)}
mbarrier.arrive.shared::cta.b64 %d3, [%r1+256];
{_wait(1, label="SECOND")}
mbarrier.test_wait.shared::cta.b64 %p2, [%r1+256], %d2;
"""
    findings = _run({}, body, []).of_kind("phase")
    assert findings and "waits for phase 0" in findings[0].text


def test_try_wait_fails_now_and_then_but_test_wait_does_not_block():
    """The consumer counts the attempts that it needs."""
    body = f"""{_INIT.format(count=1)}
@%p1 bra PRODUCER;
mov.u32 %r20, 0;
LOOP:
add.u32 %r20, %r20, 1;
mbarrier.{{wait}}.parity.shared::cta.b64 %p2, [%r1+256], 0;
@!%p2 bra LOOP;
st.global.b32 [%out], %r20;
ret;
PRODUCER:
mov.u32 %r21, 0;
SPIN:
add.u32 %r21, %r21, 1;
setp.lt.u32 %p2, %r21, 300;
@%p2 bra SPIN;
setp.eq.u32 %p3, %r0, 32;
@%p3 mbarrier.arrive.shared::cta.b64 _, [%r1+256];
"""
    attempts = {}
    for wait in ("try_wait", "test_wait"):
        result = _run({"out": "pointer"}, body.format(wait=wait), [Output(np.zeros(1, np.uint32))], seeds=range(12))
        attempts[wait] = [int(run[0][0]) for run in result.arrays]
    assert max(attempts["try_wait"]) > 1
    assert np.median(attempts["try_wait"]) < np.median(attempts["test_wait"])


def test_bytes_that_came_before_they_are_announced_complete_the_phase():
    body = f"""{_INIT.format(count=1)}
    @%p0 mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%r1+256], 128;
    @%p0 mbarrier.arrive.shared::cta.b64 _, [%r1+256];
    @%p0 mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r1+256], 128;
    {_wait(0)}"""
    assert not _run({}, body, []).findings
