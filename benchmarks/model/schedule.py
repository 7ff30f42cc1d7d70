"""Clock by clock: warps of one sub-partition that issue in order, as the assembler scheduled them.

An instruction is issued when the stall count of the one before has passed, the scoreboard barriers that it waits for
are released, and its unit is free. Softmax warps also wait for scores, and products for probabilities.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

from benchmarks.model.machine import Rates
from benchmarks.model.pipes import issue_clocks, tmem_columns
from benchmarks.model.sass import NO_BARRIER, Instruction
from benchmarks.model.warps import Turn

_LATENCY = 16
"""Clocks after its unit is free until a result can be used, where a scoreboard barrier says so."""


@dataclasses.dataclass(frozen=True)
class Marks:
    """Places in a softmax turn.

    Attributes:
      scores: Index of the wait for scores, the last before a tensor-memory load.
      loaded: Index of an arrival between loads and stores, which says that the scores may be overwritten; None if the
        warp does not say so.
      first: Index of the first arrival after a store of probabilities: the first legal P V.
      last: Index of the last such arrival.
      share: Part of the probabilities that is stored before ``first``.
    """

    scores: int
    loaded: int | None
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
    load = min(i for i, x in enumerate(turn) if x.operation == "LDTM")
    stores = [i for i, x in enumerate(turn) if x.operation == "STTM"]
    waits = [i for i, x in enumerate(turn[:load]) if _is_wait(x)]
    arrivals = [i for i, x in enumerate(turn) if i > load and _is_arrival(x)]
    if not waits or not arrivals or arrivals[-1] < stores[-1]:
        raise ValueError("a softmax turn without a wait before its loads or an arrival after its stores")
    loaded = arrivals[0] if arrivals[0] < stores[0] else None
    first = min(i for i in arrivals if i > stores[0])
    # Behind the last store there are arrivals for other warps too.
    last = min(i for i in arrivals if i > stores[-1])
    before = sum(tmem_columns(turn[i]) for i in stores if i < first)
    return Marks(waits[-1], loaded, first, last, before / sum(tmem_columns(turn[i]) for i in stores))


def _is_wait(x: Instruction) -> bool:
    return x.operation == "SYNCS" and "PHASECHK" in x.modifiers


def _is_arrival(x: Instruction) -> bool:
    return x.operation == "SYNCS" and "ARRIVE" in x.modifiers


class Warp:
    """A warp that repeats a turn.

    Attributes:
      turns: That it has finished.
    """

    def __init__(
        self,
        turn: Turn,
        rates: Rates,
        gate: Callable[[int, int], float] = lambda index, turn: 0,
        issued: Callable[[int, int, float], None] = lambda index, turn, time: None,
    ):
        """A warp before its first instruction.

        Args:
          turn: Its instructions.
          rates: Of the multiprocessor.
          gate: Time before which an instruction of a turn may not be issued, by index of instruction and turn.
          issued: Called with index, turn and time of every instruction.
        """
        self.turns = 0
        self._turn, self._gate, self._issued = turn, gate, issued
        self._units = [issue_clocks(x, rates) for x in turn]
        self._waits = [[i for i in range(NO_BARRIER) if x.wait_mask >> i & 1] for x in turn]
        self._latency = [rates.tmem if tmem_columns(x) else _LATENCY for x in turn]
        self._operations = [x.operation for x in turn]
        self._index = 0
        self._ready = self._stored = 0.0
        self._barriers = [0.0] * NO_BARRIER

    def earliest(self, units: dict[str, float]) -> float:
        """Time at which the next instruction may be issued."""
        index = self._index
        time = max(self._ready, units.get(self._units[index][0], 0), self._gate(index, self.turns))
        for barrier in self._waits[index]:
            time = max(time, self._barriers[barrier])
        return time

    def issue(self, time: float, units: dict[str, float]) -> None:
        """Issues the next instruction."""
        index = self._index
        x, (unit, clocks) = self._turn[index], self._units[index]
        units[unit] = time + clocks
        done = time + clocks + self._latency[index]
        if self._operations[index] == "STTM":
            self._stored = max(self._stored, done)
        if self._operations[index] == "FENCE":
            done = max(done, self._stored)
        for barrier, release in ((x.write_barrier, done), (x.read_barrier, time + clocks)):
            if barrier != NO_BARRIER:
                self._barriers[barrier] = max(self._barriers[barrier], release)
        self._ready = time + max(1, x.stall)
        self._issued(index, self.turns, time)
        self._index += 1
        if self._index == len(self._turn):
            self._index, self.turns = 0, self.turns + 1


def run(warps: Sequence[Warp], until: Callable[[], bool]) -> None:
    """Issues instructions of warps in turn, one a clock.

    Args:
      warps: Of the sub-partition.
      until: Whether to stop.
    """
    units: dict[str, float] = {}
    free, previous = 0.0, 0
    while not until():
        times = [warp.earliest(units) for warp in warps]
        time = max(free, min(times))
        if math.isinf(time):
            raise RuntimeError("every warp waits for a product that nobody issues")
        # The warp after the one that was served last comes first.
        previous = (previous + 1) % len(warps)
        while times[previous] > time:
            previous = (previous + 1) % len(warps)
        warps[previous].issue(time, units)
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


@dataclasses.dataclass(frozen=True)
class DependencyPath:
    """Clocks from scores to the next scores of a query tile that has the sub-partition to itself.

    Attributes:
      load: Until the first scores can be used, the wait for them included.
      compute: From there to the last store of probabilities.
      store: From there to the arrival that allows the whole of P V.
      first_output: From scores to the first legal P V.
      total: From scores to the next scores.
    """

    load: float
    compute: float
    store: float
    first_output: float
    total: float


def dependency_path(turn: Turn, products: Products, rates: Rates) -> DependencyPath:
    """The path through a turn that has the sub-partition to itself.

    Args:
      turn: Of a softmax warp.
      products: Of a turn.
      rates: Of the multiprocessor.

    Returns:
      The path.
    """
    marks = find_marks(turn)
    times: dict[int, float] = {}
    # Scores come long after the turn before, which fills the barriers.
    start = 1e5

    def gate(index: int, number: int) -> float:
        return start + rates.barrier if (index, number) == (marks.scores, 1) else 0

    def issued(index: int, number: int, time: float) -> None:
        if number == 1:
            times[index] = time - start

    run([Warp(turn, rates, gate, issued)], lambda: marks.last in times)
    used, stored = times[_first_use(turn)], times[max(i for i, x in enumerate(turn) if x.operation == "STTM")]
    first, last = times[marks.first] + rates.barrier, times[marks.last] + rates.barrier
    end = max(last + products.output * (1 - marks.share), first + products.output)
    return DependencyPath(used, stored - used, times[marks.last] - stored, first, end + products.scores)


def _first_use(turn: Turn) -> int:
    """Index of the first instruction that waits for a tensor-memory load before it."""
    loads = [(i, x.write_barrier) for i, x in enumerate(turn) if x.operation == "LDTM"]
    return next(
        i for i, x in enumerate(turn) if any(load < i and x.wait_mask >> barrier & 1 for load, barrier in loads)
    )


def period(turns: tuple[Turn, Turn], correction: Turn, products: Products, rates: Rates, count: int = 24) -> float:
    """Clocks between turns when two query tiles share the sub-partition and the tensor core.

    The issuing warp goes P V and Q K of the first tile, then of the second.

    Args:
      turns: Of the softmax warps.
      correction: Of the warp that serves both; empty if there is none.
      products: Of a tile.
      rates: Of the multiprocessor.
      count: How many turns to run; the last third is measured.

    Returns:
      Clocks.
    """
    marks = tuple(map(find_marks, turns))
    core = _TensorCore(products, marks, rates)

    def softmax(tile: int) -> Warp:
        def gate(index: int, turn: int) -> float:
            return core.scores_ready(tile, turn) if index == marks[tile].scores else 0

        def issued(index: int, turn: int, time: float) -> None:
            for times, mark in (
                (core.loaded, marks[tile].loaded),
                (core.first, marks[tile].first),
                (core.last, marks[tile].last),
            ):
                if index == mark:
                    times[tile, turn] = time + rates.barrier

        return Warp(turns[tile], rates, gate, issued)

    warps = [softmax(0), softmax(1)]
    if correction:
        warps.append(Warp(correction, rates, gate=lambda index, turn: core.last.get((1, turn), math.inf)))
    run(warps, lambda: (1, count) in core.last)
    measured = count // 3
    return (core.last[1, count] - core.last[1, count - measured]) / measured


class _TensorCore:
    """Products in the order of issue, each as soon as its operands are there.

    Keys are a tile and a turn. Where softmax warps say that scores are loaded, the scale factors of a tile's Q K go to
    the columns of the other tile's scores, and wait for that.
    """

    def __init__(self, products: Products, marks: Sequence[Marks], rates: Rates):
        self.products, self.marks, self.rates = products, marks, rates
        self.loaded: dict[tuple[int, int], float] = {}
        self.first: dict[tuple[int, int], float] = {}
        self.last: dict[tuple[int, int], float] = {}
        self._scores: dict[tuple[int, int], float] = {(0, 0): products.scores, (1, 0): 2 * products.scores}
        self._free = 2 * products.scores
        self._next = (0, 0)

    def scores_ready(self, tile: int, turn: int) -> float:
        """When a warp sees the scores of a turn; infinite while their product cannot be issued."""
        while (tile, turn) not in self._scores and self._operands_known():
            self._issue()
        return self._scores.get((tile, turn), math.inf) + self.rates.barrier

    def _overwritten(self) -> tuple[int, int] | None:
        """Whose scores the next Q K overwrites: the second tile's of this turn, the first tile's of the next."""
        tile, turn = self._next
        other = (1 - tile, turn + tile)
        return other if self.marks[1 - tile].loaded is not None else None

    def _operands_known(self) -> bool:
        overwritten = self._overwritten()
        return self._next in self.last and (overwritten is None or overwritten in self.loaded)

    def _issue(self) -> None:
        tile, turn = self._next
        part = self.marks[tile].share * self.products.output
        free = max(self._free, self.first[self._next]) + part
        free = max(free, self.last[self._next]) + self.products.output - part
        if overwritten := self._overwritten():
            free = max(free, self.loaded[overwritten])
        self._free = free + self.products.scores
        self._scores[tile, turn + 1] = self._free
        self._next = (1, turn) if tile == 0 else (0, turn + 1)
