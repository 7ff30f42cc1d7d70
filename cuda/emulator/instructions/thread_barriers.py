"""bar, barrier and barrier.cluster.

A warp counts as 32 threads, and arrives when all of its lanes have that have not exited: in the aligned forms at the
same instruction, in the others at any that names the barrier. Where the number of threads is left out, warps that
have exited count as arrived.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..errors import BarrierFaultError
from ..machine.barriers import Generation, ThreadBarrier
from ..machine.wait import Wait
from ..ptx.syntax import Immediate, Instruction
from .handler import Handler, Value, handles, lane_value, lanes, unsupported

_WARP = 32


@handles("bar", "barrier")
def barrier(instruction: Instruction) -> Handler:
    """bar{.cta}.sync/arrive/red and barrier{.cta}.sync/arrive/red{.aligned}."""
    parts = [p for p in instruction.parts[1:] if p not in ("cta", "aligned")]
    if parts == ["sync"]:
        return _sync(instruction)
    if parts == ["arrive"]:
        return _arrive(instruction)
    if parts in (["red", "popc", "u32"], ["red", "and", "pred"], ["red", "or", "pred"]):
        return _reduction(instruction, parts[1])
    raise unsupported(instruction)


def _one_value(value, mask: np.ndarray | None, instruction: Instruction, what: str) -> int:
    """A value that all lanes must agree on."""
    if isinstance(value, int):
        return value
    running = value if mask is None else value[mask]
    if (running != running[0]).any():
        raise BarrierFaultError(f"{instruction.where}: the lanes of a warp give different {what}")
    return int(running[0])


def _rest_has_exited(bar: ThreadBarrier, warps: list) -> bool:
    """Whether a barrier of all the threads of these warps waits only for warps that have exited."""
    exited = sum(1 for w in warps if not w.live.any() and w.pending[bar] != [bar.generation])
    return exited > 0 and 0 < bar.arrived == bar.expected - _WARP * exited


class _Meeting:
    """One bar or barrier instruction."""

    def __init__(self, instruction: Instruction) -> None:
        self.instruction = instruction
        self.aligned = instruction.parts[0] == "bar" or "aligned" in instruction.parts

    def barrier(self, warp, mask, number, count) -> tuple[ThreadBarrier, int]:
        """The barrier, and the threads that it is for."""
        number = _one_value(number, mask, self.instruction, "barriers")
        count = _one_value(count, mask, self.instruction, "counts of threads")
        if not 0 <= number < 16:
            raise BarrierFaultError(f"{self.instruction.where}: named barrier {number}; 0 to 15 exist")
        if count % _WARP:
            raise BarrierFaultError(f"{self.instruction.where}: {count} threads are no multiple of the warp size")
        return warp.cta.named_barrier(number), count or _WARP * len(warp.cta.warps)

    def arrive(self, warp, mask, bar: ThreadBarrier, expected: int) -> None:
        """The lanes that run arrive, and the warp when they are the last ones."""
        here = warp.pending[bar.name]
        here.append(np.ones(32, bool) if mask is None else mask)
        self.arrive_if_all_here(warp, bar, expected)

    def arrive_if_all_here(self, warp, bar: ThreadBarrier, expected: int) -> None:
        """Let the warp arrive when its lanes have."""
        if self.all_here(warp, bar):
            warp.pending[bar.name].clear()
            warp.pending[bar] = [bar.generation]
            bar.arrive(_WARP, expected, warp.actor, self.instruction)
            warp.machine.changed()

    @staticmethod
    def all_here(warp, bar: ThreadBarrier) -> bool:
        """Whether all live lanes of the warp have arrived, but the warp has not."""
        here = warp.pending[bar.name]
        return bool(here) and not (warp.live & ~np.logical_or.reduce(here)).any()

    def meet(self, warp, mask, number, count, votes=None) -> Wait | Generation:
        """A Wait, or the generation of the barrier that has completed."""
        wait = warp.converged(mask) if self.aligned else None
        if wait is not None:
            return wait
        group = warp.group
        bar, expected = self.barrier(warp, mask, number, count)
        if group.token is None:
            group.token = bar.generation
            if votes is not None:
                _vote(bar.generation, [lane_value(votes, lane) for lane in lanes(mask)])
            self.arrive(warp, mask, bar, expected)
        elif not group.token.over:
            self.arrive_if_all_here(warp, bar, expected)
        generation, of_all = group.token, isinstance(count, int) and count == 0
        if not generation.over and of_all and _rest_has_exited(bar, warp.cta.warps):
            bar.end_generation()
        if not generation.over:
            return Wait(
                lambda: (
                    generation.over or self.all_here(warp, bar) or (of_all and _rest_has_exited(bar, warp.cta.warps))
                ),
                lambda: str(bar),
            )
        group.token = None
        if warp.actor is not None:
            warp.machine.monitor.acquire(generation, warp.actor)
        return generation


def _vote(generation: Generation, ballot: list[int]) -> None:
    generation.true += sum(ballot)
    generation.votes += len(ballot)


def _number_and_count(operands: Sequence) -> list[Value]:
    """A count of 0 stands for all threads of the CTA."""
    count = operands[1] if len(operands) > 1 else Immediate(0)
    return [Value(operands[0], "u32"), Value(count, "u32")]


def _sync(instruction: Instruction) -> Handler:
    meeting = _Meeting(instruction)

    def run(warp, mask, number, count):
        result = meeting.meet(warp, mask, number, count)
        return result if isinstance(result, Wait) else None

    inputs = _number_and_count(instruction.operands)
    return Handler(run, inputs, blocking=True, convergent=meeting.aligned)


def _arrive(instruction: Instruction) -> Handler:
    if len(instruction.operands) != 2:
        raise unsupported(instruction, "the number of threads must be given")
    meeting = _Meeting(instruction)

    def run(warp, mask, number, count):
        wait = warp.converged(mask) if meeting.aligned else None
        if wait is None:
            meeting.arrive(warp, mask, *meeting.barrier(warp, mask, number, count))
        return wait

    return Handler(run, _number_and_count(instruction.operands), convergent=meeting.aligned)


def _reduction(instruction: Instruction, operation: str) -> Handler:
    meeting = _Meeting(instruction)
    target, *operands, predicate = instruction.operands

    def run(warp, mask, number, count, votes):
        result = meeting.meet(warp, mask, number, count, votes)
        if isinstance(result, Wait):
            return result
        return {"popc": result.true, "and": result.true == result.votes, "or": result.true > 0}[operation]

    return Handler(
        run,
        inputs=[*_number_and_count(operands), Value(predicate, "pred")],
        outputs=[Value(target, "u32" if operation == "popc" else "pred")],
        blocking=True,
        convergent=meeting.aligned,
        uniform="always",
    )


def gathered(warp, mask: np.ndarray | None, members) -> Wait | None:
    """None when the lanes that a member mask names are here, but for those that have exited; else a wait for them."""
    if mask is None:
        return None
    if isinstance(members, int):
        named = members
    else:
        named = int(np.bitwise_or.reduce(members[mask]))
    wanted = (named >> np.arange(32) & 1).astype(bool) & warp.live
    if not (wanted & ~mask).any():
        return None
    group = warp.group
    return Wait(
        lambda: group.mask is None or not (wanted & warp.live & ~group.mask).any(),
        lambda: f"the other lanes of its warp in {named:#010x}",
    )


@handles("bar.warp.sync")
def warp_barrier(instruction: Instruction) -> Handler:
    """bar.warp.sync members: the lanes of one warp meet."""
    (members,) = instruction.operands

    def run(warp, mask, members):
        return gathered(warp, mask, members)

    return Handler(run, inputs=[Value(members, "b32")], convergent=True)


@handles("barrier.cluster.arrive")
def cluster_arrive(instruction: Instruction) -> Handler:
    """barrier.cluster.arrive{.release, .relaxed}{.aligned}: a relaxed one releases what the last fence covers."""
    relaxed = "relaxed" in instruction.parts

    def run(warp, mask):
        wait = warp.converged(mask)
        if wait is not None:
            return wait
        bar = warp.cta.cluster_barrier
        if warp.pending[bar]:
            raise BarrierFaultError(f"{instruction.where}: {warp.name} arrives again before barrier.cluster.wait")
        warp.pending[bar].append(bar.generation)
        bar.arrive(_WARP, _WARP * len(_warps_of_cluster(warp)), warp.actor, instruction, relaxed)
        warp.machine.changed()
        return None

    return Handler(run, convergent=True)


@handles("barrier.cluster.wait")
def cluster_wait(instruction: Instruction) -> Handler:
    """barrier.cluster.wait{.acquire}{.aligned}."""

    def run(warp, mask):
        wait = warp.converged(mask)
        if wait is not None:
            return wait
        bar, warps = warp.cta.cluster_barrier, _warps_of_cluster(warp)
        if not warp.pending[bar]:
            raise BarrierFaultError(f"{instruction.where}: {warp.name} waits without barrier.cluster.arrive")
        generation = warp.pending[bar][0]
        if not generation.over and _rest_has_exited(bar, warps):
            bar.end_generation()
        if not generation.over:
            return Wait(
                lambda: generation.over or _rest_has_exited(bar, warps),
                lambda: str(bar),
            )
        warp.pending[bar].clear()
        if warp.actor is not None:
            warp.machine.monitor.acquire(generation, warp.actor)
        return None

    return Handler(run, blocking=True, convergent=True)


def _warps_of_cluster(warp) -> list:
    return [w for cta in warp.cta.cluster for w in cta.warps]
