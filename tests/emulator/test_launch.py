import numpy as np
import pytest

from cuda.emulator import BarrierFaultError, DeadlockError, EmulationError, Output, emulate
from tests.emulator.text import module, store_words


def _run(body: str, words: list[str] = (), **options):
    threads = options.pop("threads", 32)
    text = module(
        body + (store_words(list(words)) if words else ""), "p", shared=options.pop("shared", 0), threads=threads
    )
    return emulate(text, [Output(np.zeros((max(1, len(words)), threads), np.uint32))], 1, **options)


def test_a_deadlock_says_who_waits_for_what():
    body = """
    mov.u32 %r1, %tid.x; mov.b32 %r2, buffer; setp.ne.u32 %p1, %r1, 0; @%p1 bra WAIT;
    mbarrier.init.shared.b64 [%r2], 2; mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 4096;
    WAIT: bar.warp.sync -1;
    AGAIN: mbarrier.try_wait.parity.shared.b64 %p2, [%r2], 0; @!%p2 bra AGAIN;
    """
    with pytest.raises(
        DeadlockError,
        match=r"warp 0 of CTA \(0, 0, 0\) \(all lanes\) waits.*1 of 2 arrivals and 4096 bytes.*: mbarrier.try_wait",
    ):
        _run(body, shared=16)


def test_a_barrier_that_one_warp_never_reaches():
    body = "mov.u32 %r1, %tid.x; setp.ge.u32 %p1, %r1, 32; @%p1 ret; bar.sync 1, 64;"
    with pytest.raises(DeadlockError, match=r"named barrier 1 .*32 of 64 threads"):
        _run(body, threads=64)


def test_barriers_of_different_sizes_do_not_mix():
    body = "mov.u32 %r1, %tid.x; setp.ge.u32 %p1, %r1, 32; @%p1 bra B; bar.sync 1, 96; ret; B: bar.sync 1, 64;"
    with pytest.raises(BarrierFaultError, match=r"is used for \d\d threads while 32 threads"):
        _run(body, threads=96)


def test_an_endless_loop_ends():
    with pytest.raises(EmulationError, match="1000 instructions were run without an end"):
        _run("L: add.u32 %r1, 1, 2; bra L;", max_instructions=1000)


def test_lanes_that_part_meet_again():
    body = """
    mov.u32 %r1, %tid.x; mov.b32 %r2, 0; setp.lt.u32 %p1, %r1, 16; @%p1 bra A; mov.b32 %r2, 1; bra B;
    A: mov.b32 %r2, 2;
    B: vote.sync.ballot.b32 %r3, %p1, -1; activemask.b32 %r4;
    """
    (run,) = _run(body, ["%r2", "%r3", "%r4"]).arrays
    np.testing.assert_array_equal(run[0][0], [2] * 16 + [1] * 16)
    assert (run[0][1] == 0xFFFF).all() and (run[0][2] == 0xFFFFFFFF).all()


def test_lanes_that_exit_are_not_waited_for():
    body = """
    mov.u32 %r1, %tid.x; setp.lt.u32 %p1, %r1, 5; @%p1 ret; setp.lt.u32 %p2, %r1, 9; @%p2 bra A; bra B;
    A: setp.lt.u32 %p3, %r1, 7; @%p3 ret;
    B: activemask.b32 %r2;
    """
    values = _run(body, ["%r2"]).arrays[0][0][0]
    assert (values[7:] == 0xFFFFFF80).all() and not values[:7].any()


def test_nested_parting_and_loops_with_exits():
    body = """
    mov.u32 %r1, %tid.x; mov.b32 %r2, 0; mov.b32 %r3, 0;
    L: add.u32 %r3, %r3, 1; and.b32 %r4, %r1, 1; setp.eq.u32 %p1, %r4, 0; @%p1 bra EVEN; add.u32 %r2, %r2, 10;
    setp.gt.u32 %p2, %r3, %r1; @%p2 bra OUT; bra NEXT;
    EVEN: add.u32 %r2, %r2, 1;
    NEXT: setp.lt.u32 %p3, %r3, 20; @%p3 bra L;
    OUT: activemask.b32 %r5;
    """
    (run,) = _run(body, ["%r2", "%r5"]).arrays
    expected = [20 if t % 2 == 0 else 10 * min(20, t + 1) for t in range(32)]
    np.testing.assert_array_equal(run[0][0], expected)
    assert (run[0][1] == 0xFFFFFFFF).all()


def test_special_registers():
    names = ["%tid.x", "%ntid.x", "%ctaid.x", "%nctaid.x", "%laneid", "%warpid", "%lanemask_lt", "%nwarpid"]
    body = "".join(f"mov.u32 %r{i + 1}, {name};" for i, name in enumerate(names))
    (run,) = _run(body, [f"%r{i + 1}" for i in range(len(names))], threads=64).arrays
    t = np.arange(64)
    expected = [t, t * 0 + 64, t * 0, t * 0 + 1, t % 32, t // 32, (1 << t % 32) - 1, t * 0 + 2]
    np.testing.assert_array_equal(run[0], np.array(expected, np.uint32))


def test_tensor_memory_that_is_not_freed_is_told():
    body = "mov.b32 %r1, buffer; tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 32;"
    result = _run(body, shared=16)
    assert [f.kind for f in result.findings] == ["leak"]
    assert "ends without freeing tensor memory" in str(next(iter(result.findings)))


def test_lanes_that_spin_do_not_keep_the_others_from_running():
    body = """
    mov.u32 %r1, %tid.x; mov.u32 %r20, buffer; setp.eq.u32 %p1, %r1, 0; @%p1 st.volatile.shared.u32 [%r20], 0;
    bar.warp.sync -1; @%p1 bra SET;
    SPIN: ld.volatile.shared.u32 %r2, [%r20]; setp.eq.u32 %p2, %r2, 0; @%p2 bra SPIN; bra DONE;
    SET: st.volatile.shared.u32 [%r20], 1;
    DONE:
    """
    result = _run(body, ["%r1"], shared=16, max_instructions=20_000, seeds=range(4))
    np.testing.assert_array_equal(result.arrays[0][0][0], np.arange(32))


_COUNTED_WAIT = """
    mov.u32 %r1, %tid.x; mov.u32 %r20, buffer; setp.eq.u32 %p1, %r1, 0; @%p1 mbarrier.init.shared.b64 [%r20], 1;
    bar.sync 0; mov.u32 %r3, 0;
    LOOP: mbarrier.try_wait.parity.shared.b64 %p2, [%r20], 0; @%p2 bra DONE;
    add.u32 %r3, %r3, 1; setp.lt.u32 %p3, %r3, 20; @%p3 bra LOOP;
    {fall_back} bra LOOP;
    DONE:
"""


def test_a_kernel_may_count_its_waits():
    body = _COUNTED_WAIT.format(fall_back="@%p1 mbarrier.arrive.shared.b64 %d5, [%r20];")
    result = _run(body, ["%r3"], shared=16, max_instructions=20_000, seeds=range(4))
    assert all((run[0] >= 20).all() for run in result.arrays)


def test_a_deadlock_with_counted_waits_ends_soon():
    with pytest.raises(DeadlockError, match="waits for parity 0"):
        _run(_COUNTED_WAIT.format(fall_back=""), shared=16, max_instructions=20_000)
