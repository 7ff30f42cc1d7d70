"""cp.async: copies of 4, 8 or 16 bytes a thread that land later, through the generic proxy."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from ..checks.races import Actor
from ..errors import BarrierFaultError, MemoryFaultError
from ..ptx.syntax import Immediate, Instruction, Negated, Register
from .async_groups import commit_handler, groups_of, wait_handler
from .bulk_completion import address_input, check_own_cta, check_qualifiers, shared_address
from .handler import Handler, Value, handles, lanes, per_lane, unsupported

if TYPE_CHECKING:
    from ..machine.warp import Warp

_GROUPS, _COPIES = "cp.async groups", "cp.async copies"
_HINTS = {"L2::cache_hint", "L2::64B", "L2::128B", "L2::256B"}
_WIDEST = 8  # bytes of one generic access of shared memory


class _Copies:
    """The copies of a warp for cp.async.mbarrier.arrive.

    Attributes:
      flying: those that have not landed.
      known: events of those that have landed, and what they knew.
      published: likewise.
    """

    def __init__(self) -> None:
        self.flying: list[_Copy] = []
        self.known = self.published = 0


class _Copy:
    """The copies of one instruction; they land once, at the latest when something waits for them."""

    __slots__ = ("_move", "actor", "landed", "lanes")

    def __init__(self, lanes: np.ndarray, move: Callable[[Actor | None], None]) -> None:
        self.lanes, self._move, self.landed = lanes, move, False
        self.actor: Actor | None = None

    def land(self, copies: _Copies) -> None:
        if self.landed:
            return
        self._move(self.actor)
        self.landed = True
        copies.flying.remove(self)
        if self.actor is not None:
            copies.known |= self.actor.known | 1 << self.actor.event
            copies.published |= self.actor.published


@handles("cp.async.ca", "cp.async.cg")
def copy(instruction: Instruction) -> Handler:
    """cp.async.ca and cp.async.cg."""
    check_qualifiers(instruction, {"cp", "async", "ca", "cg", "shared", "shared::cta", "global"} | _HINTS)
    operands = list(instruction.operands)
    if "L2::cache_hint" in instruction.parts:
        operands.pop()
    if len(operands) not in (3, 4) or not isinstance(operands[2], Immediate):
        raise unsupported(instruction)
    size = operands[2].value
    if size not in ((16,) if "cg" in instruction.parts else (4, 8, 16)):
        raise unsupported(instruction, f"{size} bytes")
    inputs = [address_input(operands[0], shared=True), address_input(operands[1], shared=False)]
    ignoring = len(operands) == 4 and _is_predicate(operands[3])
    if len(operands) == 4:
        inputs.append(Value(operands[3], "pred" if ignoring else "u32"))

    def run(warp: Warp, mask: np.ndarray | None, destination, source, given=None) -> None:
        running = np.array(lanes(mask))
        sizes = _source_sizes(given, size, ignoring)[running]
        if sizes.max(initial=0) > size:
            raise MemoryFaultError(f"{instruction.where}: the source size {sizes.max()} is more than {size}")
        addresses = per_lane(source, np.uint64).astype(np.uint64)[running]
        if (addresses[sizes > 0] % np.uint64(size)).any():
            raise MemoryFaultError(f"{instruction.where}: a source is no multiple of {size} bytes")
        offsets = np.array([_offset(warp, destination, lane, size, instruction) for lane in running])
        _issue(warp, mask, instruction, _moving(warp, addresses, offsets, sizes, size, instruction))

    return Handler(run, inputs)


@handles("cp.async.commit_group")
def commit_group(instruction: Instruction) -> Handler:
    """cp.async.commit_group."""
    return commit_handler(_GROUPS)


@handles("cp.async.wait_group")
def wait_group(instruction: Instruction) -> Handler:
    """cp.async.wait_group N."""
    return wait_handler((_GROUPS,), instruction.operands[0].value)


@handles("cp.async.wait_all")
def wait_all(instruction: Instruction) -> Handler:
    """cp.async.wait_all, also for what was not committed."""
    return wait_handler((_GROUPS,), -1)


@handles("cp.async.mbarrier.arrive")
def arrive(instruction: Instruction) -> Handler:
    """cp.async.mbarrier.arrive{.noinc}: one arrival of each thread, when its earlier copies have landed."""
    check_qualifiers(instruction, {"cp", "async", "mbarrier", "arrive", "noinc", "shared", "shared::cta", "b64"})
    increments = "noinc" not in instruction.parts

    def run(warp: Warp, mask: np.ndarray | None, barrier) -> None:
        arrivals: dict[int, list[int]] = {}
        for lane in lanes(mask):
            arrivals.setdefault(shared_address(barrier, lane), []).append(lane)
        for address, arriving in arrivals.items():
            bar = warp.cta.mbarrier(address, warp.actor, instruction)
            if increments:
                bar.pending += len(arriving)
            _issue_arrival(warp, address, arriving, instruction)

    return Handler(run, [address_input(instruction.operands[0], shared=True)])


def _is_predicate(operand) -> bool:
    return isinstance(operand, Negated) or (isinstance(operand, Register) and operand.kind == "pred")


def _source_sizes(given, size: int, ignoring: bool) -> np.ndarray:
    """(32,) bytes that each lane reads."""
    if given is None:
        return np.full(32, size)
    if ignoring:
        return np.where(per_lane(given, bool), 0, size)
    return per_lane(given, np.int64).astype(np.int64)


def _offset(warp: Warp, destination, lane: int, size: int, instruction: Instruction) -> int:
    cta, offset = warp.cta.shared_target(shared_address(destination, lane), instruction)
    check_own_cta(warp, cta, "the destination", instruction)
    if offset % size:
        raise MemoryFaultError(f"{instruction.where}: the destination {offset:#x} is no multiple of {size} bytes")
    return offset


def _moving(warp: Warp, addresses, offsets, sizes, size: int, instruction: Instruction):
    """A function of the actor that copies the lanes' bytes and fills with zeros."""

    def move(actor) -> None:
        values = np.zeros((len(offsets), size), np.uint8)
        for nbytes in set(sizes.tolist()) - {0}:
            of = sizes == nbytes
            values[of, :nbytes] = warp.machine.global_memory.read(addresses[of], nbytes, actor, instruction)
        unit = min(size, _WIDEST)
        where = (offsets[:, None] + np.arange(0, size, unit)).reshape(-1)
        warp.cta.shared.write(where, values.reshape(-1).view(f"u{unit}"), unit, actor, instruction)

    return move


def _issue(warp: Warp, mask: np.ndarray | None, instruction: Instruction, move) -> None:
    copies = _copies(warp)
    flight = _Copy(np.ones(32, bool) if mask is None else mask.copy(), move)

    def effect(operation) -> None:
        flight.land(copies)
        warp.machine.changed()

    flight.actor = warp.machine.issue(warp, "copy", instruction, effect).actor
    copies.flying.append(flight)
    groups_of(warp, _GROUPS).add(mask, lambda: flight.landed, flight.actor, instruction)


def _issue_arrival(warp: Warp, address: int, arriving: list[int], instruction: Instruction) -> None:
    copies, machine = _copies(warp), warp.machine
    before = [flight for flight in copies.flying if flight.lanes[arriving].any()]
    known, published = copies.known, copies.published

    def effect(operation) -> None:
        for flight in before:
            flight.land(copies)
            if machine.monitor is not None and flight.actor is not None:
                machine.monitor.join(operation.actor, flight.actor)
        if machine.monitor is not None:
            operation.actor.known |= known
            operation.actor.published |= published
        bar = warp.cta.mbarrier(address, operation.actor, instruction)
        try:
            bar.arrive(len(arriving), operation.actor)
        except BarrierFaultError as e:
            raise BarrierFaultError(f"{instruction.where}: {e}") from None
        machine.changed()

    machine.issue(warp, "copy", instruction, effect)


def _copies(warp: Warp) -> _Copies:
    kept = warp.pending[_COPIES]
    if not kept:
        kept.append(_Copies())
    return kept[0]
