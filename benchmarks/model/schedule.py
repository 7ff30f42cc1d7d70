"""Clock by clock: warps of one sub-partition that issue in order, as the assembler scheduled them.

An instruction is issued when the stall count of the one before has passed, the scoreboard barriers that it waits for
are released, and its unit is free. Softmax warps also wait for scores, and products for probabilities.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

from benchmarks.model.machine import BARRIER_CLOCKS, TMEM_CLOCKS
from benchmarks.model.pipes import issue_clocks, pipe_of, tmem_columns
from benchmarks.model.sass import NO_BARRIER, Instruction
from benchmarks.model.warps import Turn

_LATENCY = {"mufu": 16, "tmem load": TMEM_CLOCKS, "tmem store": TMEM_CLOCKS, "shared": 24}
"""Clocks after its unit is free until a result can be used; fixed latencies are in the stall counts."""
_OTHER_LATENCY = 16


@dataclasses.dataclass(frozen=True)
class Marks:
    """Places in a softmax turn.

    Attributes:
      scores: Index of the wait for scores, the last before a tensor-memory load.
      first: Index of the first arrival after a store of probabilities: the first legal P V.
      last: Index of the last such arrival.
      share: Part of the probabilities that is stored before ``first``.
    """

    scores: int
    first: int
    last: int
    share: float


def find_marks(turn: Turn) -> Marks:
    """The hand-offs of a softmax turn.

    Args:
      turn: The turn.

    Returns:
      Their places.
    """
    load = next(i for i, x in enumerate(turn) if x.operation == "LDTM")
    stores = [i for i, x in enumerate(turn) if x.operation == "STTM"]
    waits = [i for i, x in enumerate(turn[:load]) if _is_wait(x)]
    arrivals = [i for i, x in enumerate(turn) if i > stores[0] and _is_arrival(x)]
    # Behind the last store there are arrivals for other warps too.
    last = next(i for i in arrivals if i > stores[-1])
    first = arrivals[0]
    before = sum(tmem_columns(turn[i]) for i in stores if i < first)
    return Marks(waits[-1], first, last, before / sum(tmem_columns(turn[i]) for i in stores))


def _is_wait(x: Instruction) -> bool:
    return x.operation == "SYNCS" and "PHASECHK" in x.modifiers


def _is_arrival(x: Instruction) -> bool:
    return x.operation == "SYNCS" and "ARRIVE" in x.modifiers


@dataclasses.dataclass
class Warp:
    """A warp that repeats a turn.

    Attributes:
      turn: Its instructions.
      gate: Time before which an instruction of a turn may not be issued, by index of instruction and turn.
      issued: Called with index, turn and time of every instruction.
    """

    turn: Turn
    gate: Callable[[int, int], float] = lambda index, turn: 0
    issued: Callable[[int, int, float], None] = lambda index, turn, time: None
    index: int = 0
    turns: int = 0
    ready: float = 0
    stored: float = 0
    barriers: list[float] = dataclasses.field(default_factory=lambda: [0.0] * 6)

    def earliest(self, units: dict[str, float], mufu_clocks: int) -> float:
        """Time at which the next instruction may be issued."""
        x = self.turn[self.index]
        waits = [release for i, release in enumerate(self.barriers) if x.wait_mask >> i & 1]
        unit, _ = issue_clocks(x, mufu_clocks)
        return max(self.ready, units.get(unit, 0), self.gate(self.index, self.turns), *waits)

    def issue(self, time: float, units: dict[str, float], mufu_clocks: int) -> None:
        """Issues the next instruction."""
        x = self.turn[self.index]
        unit, clocks = issue_clocks(x, mufu_clocks)
        units[unit] = time + clocks
        done = time + clocks + _LATENCY.get(pipe_of(x), _OTHER_LATENCY)
        if x.operation == "STTM":
            self.stored = max(self.stored, done)
        if x.operation == "FENCE":
            done = max(done, self.stored)
        for barrier, release in ((x.write_barrier, done), (x.read_barrier, time + clocks)):
            if barrier != NO_BARRIER:
                self.barriers[barrier] = max(self.barriers[barrier], release)
        self.ready = time + max(1, x.stall)
        self.issued(self.index, self.turns, time)
        self.index += 1
        if self.index == len(self.turn):
            self.index, self.turns = 0, self.turns + 1


def run(warps: Sequence[Warp], mufu_clocks: int, until: Callable[[], bool]) -> None:
    """Issues instructions of warps in turn, one a clock.

    Args:
      warps: Of the sub-partition.
      mufu_clocks: Of a warp's exponentials.
      until: Whether to stop.
    """
    units: dict[str, float] = {}
    free, previous = 0.0, 0
    while not until():
        times = [warp.earliest(units, mufu_clocks) for warp in warps]
        time = max(free, min(times))
        if math.isinf(time):
            raise RuntimeError("every warp waits for a product that nobody issues")
        # The warp after the one that was served last comes first.
        order = sorted(range(len(warps)), key=lambda i: (i - previous - 1) % len(warps))
        previous = next(i for i in order if times[i] <= time)
        warps[previous].issue(time, units, mufu_clocks)
        free = time + 1


@dataclasses.dataclass(frozen=True)
class Products:
    """Products of one query tile and one key tile.

    Attributes:
      scores: Clocks of Q K.
      output: Clocks of P V.
    """

    scores: float
    output: float


def dependency_path(turn: Turn, products: Products, mufu_clocks: int) -> tuple[float, float]:
    """Clocks of a turn that has the sub-partition to itself.

    Args:
      turn: Of a softmax warp.
      products: Of a turn.
      mufu_clocks: Of a warp's exponentials.

    Returns:
      From scores to the first legal P V, and from scores to the next scores.
    """
    marks = find_marks(turn)
    times: dict[int, float] = {}
    # The first turn fills the barriers; nothing waits for it.
    start = 1e5

    def gate(index: int, turn: int) -> float:
        return start if (index, turn) == (marks.scores, 1) else 0

    def issued(index: int, turn: int, time: float) -> None:
        if turn == 1:
            times[index] = time

    run([Warp(turn, gate, issued)], mufu_clocks, lambda: marks.last in times)
    first, last = (times[i] - start + BARRIER_CLOCKS for i in (marks.first, marks.last))
    end = max(last + products.output * (1 - marks.share), first + products.output)
    return first, end + products.scores + BARRIER_CLOCKS


def period(turn: Turn, correction: Turn, products: Products, mufu_clocks: int, turns: int = 12) -> float:
    """Clocks between turns when two query tiles share the sub-partition and the tensor core.

    The issuing warp goes P V and Q K of the first tile, then of the second.

    Args:
      turn: Of a softmax warp.
      correction: Of the warp that serves both; empty if there is none.
      products: Of a turn.
      mufu_clocks: Of a warp's exponentials.
      turns: How many to run; the last third is measured.

    Returns:
      Clocks.
    """
    marks = find_marks(turn)
    core = _TensorCore(products, marks.share)

    def softmax(tile: int) -> Warp:
        def gate(index: int, turn: int) -> float:
            return core.scores_ready(tile, turn) if index == marks.scores else 0

        def issued(index: int, turn: int, time: float) -> None:
            if index == marks.first:
                core.first[tile, turn] = time + BARRIER_CLOCKS
            if index == marks.last:
                core.last[tile, turn] = time + BARRIER_CLOCKS

        return Warp(turn, gate, issued)

    warps = [softmax(0), softmax(1)]
    if correction:
        warps.append(Warp(correction, gate=lambda index, turn: core.last.get((1, turn), math.inf)))
    run(warps, mufu_clocks, lambda: (1, turns) in core.last)
    measured = turns // 3
    return (core.last[1, turns] - core.last[1, turns - measured]) / measured


class _TensorCore:
    """Products in the order of issue, as late as their operands are."""

    def __init__(self, products: Products, share: float):
        self.products, self.share = products, share
        self.first: dict[tuple[int, int], float] = {}
        self.last: dict[tuple[int, int], float] = {}
        self._scores: dict[tuple[int, int], float] = {(0, 0): products.scores, (1, 0): 2 * products.scores}
        self._free = 2 * products.scores
        self._next = (0, 0)

    def scores_ready(self, tile: int, turn: int) -> float:
        """When the scores of a turn can be read; infinite while their product is not issued."""
        while self._next in self.last:
            self._issue(*self._next)
        return self._scores.get((tile, turn), math.inf) + BARRIER_CLOCKS

    def _issue(self, tile: int, turn: int) -> None:
        part = self.share * self.products.output
        free = max(self._free, self.first[tile, turn]) + part
        free = max(free, self.last[tile, turn]) + self.products.output - part
        self._free = free + self.products.scores
        self._scores[tile, turn + 1] = self._free
        self._next = (1, turn) if tile == 0 else (0, turn + 1)
