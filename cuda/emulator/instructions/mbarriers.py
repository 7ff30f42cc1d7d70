"""mbarrier.*: barriers in shared memory that count arrivals and bytes.

What is reported as a missed phase (kind "phase"): a warp that tests a phase, finds it incomplete, and tests again with
the same parity only after that phase and the next one are over; or that tests a state of an arrival two or more
phases ago. Whatever it waited for had then been replaced before it looked. A warp that waits for some phases only is
never reported, nor is one that comes too late to its first test: there its accesses of the data race.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..errors import BarrierFaultError
from ..machine.barriers import MBarrier
from ..machine.memory import RANK_SHIFT, SHARED_BASE
from ..machine.wait import Wait
from ..ptx.syntax import Address, Immediate, Instruction, Register
from .access import address_value
from .handler import Handler, Value, handles, lane_value, lanes, unsupported

# A state is the phase of an arrival, above the arrivals that were pending before it.
_PENDING_BITS = 20

_KNOWN = {"mbarrier", "b64", "parity", "expect_tx", "noComplete", "release", "acquire", "relaxed", "cta", "cluster"}
_OPERATIONS = {"init", "inval", "expect_tx", "complete_tx", "arrive", "arrive_drop", "test_wait", "try_wait"}


def _check_form(instruction: Instruction) -> None:
    for part in instruction.parts:
        if part not in _KNOWN and part not in _OPERATIONS and part.split("::")[0] != "shared":
            raise unsupported(instruction, f"the modifier .{part}")


def _address(instruction: Instruction) -> tuple[Address, tuple]:
    """The address and the operands behind it."""
    for i, operand in enumerate(instruction.operands):
        if isinstance(operand, Address):
            return operand, instruction.operands[i + 1 :]
    raise unsupported(instruction, "no address")


def _by_address(mask: np.ndarray | None, address) -> Iterator[tuple[int, list[int]]]:
    """Each address with the lanes that name it."""
    if isinstance(address, int):
        yield address, lanes(mask)
        return
    groups: dict[int, list[int]] = {}
    for lane in lanes(mask):
        groups.setdefault(int(address[lane]), []).append(lane)
    yield from groups.items()


def _barrier(warp, address: int, instruction: Instruction) -> MBarrier:
    barrier = warp.cta.mbarrier(address, warp.actor, instruction)
    if address >> RANK_SHIFT != warp.cta.rank and "shared::cluster" not in instruction.parts:
        raise BarrierFaultError(f"{instruction.where}: uses {barrier}, of another CTA, without ::cluster")
    return barrier


@handles("mbarrier.init")
def init(instruction: Instruction) -> Handler:
    """mbarrier.init{.shared}.b64 [address], count."""
    _check_form(instruction)
    address, (count,) = _address(instruction)

    def run(warp, mask, address, count):
        actor, monitor = warp.actor, warp.machine.monitor
        if monitor is not None:
            # An event of its own, which fence.mbarrier_init can release without the rest.
            monitor.next_event(actor)
            warp.pending["initialised"].append(actor.event)
        for where, active in _by_address(mask, address):
            if len(active) > 1:
                warp.machine.report(
                    "issue", f"{len(active)} threads of a warp initialise one barrier at {instruction.where}"
                )
            _init_one(warp, where, lane_value(count, active[-1]), instruction)
        if monitor is not None:
            monitor.next_event(actor)
        warp.machine.changed()

    return Handler(run, inputs=[address_value(address), Value(count, "u32")])


def _init_one(warp, address: int, count: int, instruction: Instruction) -> None:
    cta, offset = warp.cta.shared_target(address, instruction)
    shared = cta.shared
    if cta is not warp.cta:
        raise BarrierFaultError(f"{instruction.where}: initialises a barrier of CTA rank {cta.rank}")
    previous = shared.barriers.pop(offset, None)
    if previous is not None:
        warp.machine.report(
            "issue", f"{instruction.where} initialises {previous.name}, which is in use, without mbarrier.inval"
        )
    shared.write(np.array([offset]), np.uint64(0), 8, warp.actor, instruction)
    name = f"mbarrier at shared byte {offset - SHARED_BASE} of CTA {cta.index}"
    try:
        barrier = MBarrier(name, count, warp.actor, warp.machine.monitor)
    except BarrierFaultError as e:
        raise BarrierFaultError(f"{instruction.where}: {e}") from None
    shared.place_barrier(offset, barrier)


@handles("mbarrier.inval")
def invalidate(instruction: Instruction) -> Handler:
    """mbarrier.inval{.shared}.b64 [address]: the bytes may be used for something else."""
    _check_form(instruction)
    address, _ = _address(instruction)

    def run(warp, mask, address):
        for where, _active in _by_address(mask, address):
            barrier = _barrier(warp, where, instruction)
            _check_unused(warp, barrier, instruction)
            cta, offset = warp.cta.shared_target(where, instruction)
            del cta.shared.barriers[offset]
            cta.shared.write(np.array([offset]), np.uint64(0), 8, warp.actor, instruction)
            cta.shared.written[offset : offset + 8] = 0
        warp.machine.changed()

    return Handler(run, inputs=[address_value(address)])


def _check_unused(warp, barrier: MBarrier, instruction: Instruction) -> None:
    actor = warp.actor
    if actor is None:
        return
    if any(event != actor.event and not actor.known >> event & 1 for event in barrier.users.values()):
        warp.machine.report(
            "race", f"the end of {barrier.name} at {instruction.where} is not ordered after the last use of it"
        )


@handles("mbarrier.expect_tx")
def expect(instruction: Instruction) -> Handler:
    """mbarrier.expect_tx{.relaxed.scope}{.space}.b64 [address], bytes."""
    _check_form(instruction)
    address, (nbytes,) = _address(instruction)

    def run(warp, mask, address, nbytes):
        for where, active in _by_address(mask, address):
            barrier = _barrier(warp, where, instruction)
            _do(instruction, barrier.expect, sum(lane_value(nbytes, lane) for lane in active))
        warp.machine.changed()

    return Handler(run, inputs=[address_value(address), Value(nbytes, "u32")])


@handles("mbarrier.complete_tx")
def complete(instruction: Instruction) -> Handler:
    """mbarrier.complete_tx{.relaxed.scope}{.space}.b64 [address], bytes: as if that much data had arrived."""
    _check_form(instruction)
    address, (nbytes,) = _address(instruction)

    def run(warp, mask, address, nbytes):
        for where, active in _by_address(mask, address):
            barrier = _barrier(warp, where, instruction)
            _do(instruction, barrier.complete, sum(lane_value(nbytes, lane) for lane in active), warp.actor, True)
        warp.machine.changed()

    return Handler(run, inputs=[address_value(address), Value(nbytes, "u32")])


def _do(instruction: Instruction, function, *args) -> None:
    """Call a method of a barrier; what it raises says where."""
    try:
        function(*args)
    except BarrierFaultError as e:
        raise BarrierFaultError(f"{instruction.where}: {e}") from None


@handles("mbarrier.arrive", "mbarrier.arrive_drop")
def arrive(instruction: Instruction) -> Handler:
    """mbarrier.arrive{_drop}{.expect_tx}{.noComplete}{.sem.scope}{.space}.b64 {state,} [address]{, count or bytes}."""
    _check_form(instruction)
    address, operands = _address(instruction)
    first = instruction.operands[0]
    returns = isinstance(first, Register)
    expects = "expect_tx" in instruction.parts
    dropping = instruction.parts[1] == "arrive_drop"
    relaxed = "relaxed" in instruction.parts
    number = operands[0] if operands else Immediate(1)

    def one(warp, where: int, active: list[int], number, states: np.ndarray) -> None:
        barrier = _barrier(warp, where, instruction)
        amounts = [lane_value(number, lane) for lane in active]
        counts = [1] * len(active) if expects else amounts
        if returns:
            _note_states(barrier, active, counts, states)
        if expects:
            _do(instruction, barrier.expect, sum(amounts))
        total = sum(counts)
        if "noComplete" in instruction.parts and total >= barrier.pending:
            raise BarrierFaultError(f"{instruction.where}: completes the phase of {barrier} in spite of .noComplete")
        if dropping:
            barrier.drop(total)
        _do(instruction, barrier.arrive, total, warp.actor, relaxed)

    def run(warp, mask, address, number):
        states = np.zeros(32, np.uint64)
        for where, active in _by_address(mask, address):
            one(warp, where, active, number, states)
        if warp.actor is not None:
            warp.machine.monitor.next_event(warp.actor)
        warp.machine.changed()
        return states if returns else None

    outputs = [Value(first, "b64")] if returns else []
    return Handler(run, inputs=[address_value(address), Value(number, "u32")], outputs=outputs)


def _note_states(barrier: MBarrier, active: list[int], counts: list[int], states: np.ndarray) -> None:
    pending = barrier.pending
    for lane, count in zip(active, counts, strict=True):
        states[lane] = barrier.phase << _PENDING_BITS | max(pending, 0)
        pending -= count


@handles("mbarrier.pending_count")
def pending_count(instruction: Instruction) -> Handler:
    """mbarrier.pending_count.b64 count, state."""
    count, state = instruction.operands

    def run(warp, mask, state):
        if isinstance(state, int):
            return state & (1 << _PENDING_BITS) - 1
        return (state & np.uint64((1 << _PENDING_BITS) - 1)).astype(np.uint32)

    return Handler(run, inputs=[Value(state, "b64")], outputs=[Value(count, "u32")], uniform="inputs")


@handles("mbarrier.test_wait", "mbarrier.try_wait")
def wait(instruction: Instruction) -> Handler:
    """mbarrier.{test,try}_wait{.parity}{.sem.scope}{.space}.b64 predicate, [address], state or parity{, time}.

    try_wait blocks until the phase is over, or returns false at a time of the machine's choice.
    """
    _check_form(instruction)
    address, (phase, *_) = _address(instruction)
    predicate = instruction.operands[0]
    test = _Test(instruction)

    def run(warp, mask, address, phase):
        if isinstance(address, int) and isinstance(phase, int):
            barrier = _barrier(warp, address, instruction)
            passed = test.of_all(warp, [(barrier, phase)])
            return passed if isinstance(passed, Wait) else passed[0]
        keys = {lane: (lane_value(address, lane), lane_value(phase, lane)) for lane in lanes(mask)}
        different = list(dict.fromkeys(keys.values()))
        passed = test.of_all(warp, [(_barrier(warp, a, instruction), p) for a, p in different])
        if isinstance(passed, Wait):
            return passed
        result = np.zeros(32, bool)
        for lane, key in keys.items():
            result[lane] = passed[different.index(key)]
        return result

    return Handler(
        run,
        inputs=[address_value(address), Value(phase, "u32" if test.by_parity else "b64")],
        outputs=[Value(predicate, "pred")],
        blocking=True,
        uniform="inputs",
    )


def _gives_up(warp) -> bool:
    machine = warp.machine
    return warp.group.timed_out or machine.rng.random() < machine.false_wait_rate


class _Test:
    """The test of one wait instruction."""

    def __init__(self, instruction: Instruction) -> None:
        self.instruction = instruction
        self.blocks = instruction.parts[1] == "try_wait"
        self.by_parity = "parity" in instruction.parts
        self.relaxed = "relaxed" in instruction.parts

    def of_all(self, warp, wanted: list[tuple[MBarrier, int]]) -> list[bool] | Wait:
        """Whether each (barrier, phase) is over; waits while none is, if the instruction blocks."""
        passed = [self.passed(barrier, phase) for barrier, phase in wanted]
        for (barrier, phase), over in zip(wanted, passed, strict=True):
            self.note(warp, barrier, phase, over)
        if self.blocks and not any(passed) and not _gives_up(warp):
            return Wait(
                lambda: any(self.passed(barrier, phase) for barrier, phase in wanted),
                lambda: ", ".join(self.describe(barrier, phase) for barrier, phase in wanted),
                may_time_out=True,
            )
        warp.group.timed_out = False
        return passed

    def passed(self, barrier: MBarrier, phase: int) -> bool:
        """Whether the phase is over; `phase` is a parity or a state."""
        if not self.by_parity:
            return barrier.phase > phase >> _PENDING_BITS
        if phase > 1:
            raise BarrierFaultError(f"{self.instruction.where}: waits for parity {phase}")
        return barrier.passed(phase)

    def describe(self, barrier: MBarrier, phase: int) -> str:
        wanted = f"parity {phase}" if self.by_parity else f"phase {phase >> _PENDING_BITS}"
        return f"{wanted} of {barrier}"

    def note(self, warp, barrier: MBarrier, phase: int, passed: bool) -> None:
        """The warp has tested: it learns what a completed phase released, and must not have missed one."""
        if passed and warp.actor is not None:
            warp.machine.monitor.acquire(barrier, warp.actor, self.relaxed)
        began = phase >> _PENDING_BITS
        if self.by_parity:
            key = warp, phase
            began = barrier.awaited.pop(key, barrier.phase)
            if not passed:
                barrier.awaited[key] = began
        if barrier.phase - began >= 2:
            warp.machine.report(
                "phase",
                f"{warp.name} at {self.instruction.where} waits for phase {began} of {barrier.name} "
                f"and finds it in phase {barrier.phase}",
            )
            barrier.awaited.pop((warp, phase), None)
