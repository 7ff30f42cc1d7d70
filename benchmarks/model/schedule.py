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
    load = next(i for i, x in enumerate(turn) if x.operation == "LDTM")
    stores = [i for i, x in enumerate(turn) if x.operation == "STTM"]
    waits = [i for i, x in enumerate(turn[:load]) if _is_wait(x)]
    arrivals = [i for i, x in enumerate(turn) if i > load and _is_arrival(x)]
    loaded = arrivals[0] if arrivals[0] < stores[0] else None
    first = next(i for i in arrivals if i > stores[0])
    # Behind the last store there are arrivals for other warps too.
    last = next(i for i in arrivals if i > stores[-1])
    before = sum(tmem_columns(turn[i]) for i in stores if i < first)
    return Marks(waits[-1], loaded, first, last, before / sum(tmem_columns(turn[i]) for i in stores))


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

    def earliest(self, units: dict[str, float], rates: Rates) -> float:
        """Time at which the next instruction may be issued."""
        x = self.turn[self.index]
        waits = [release for i, release in enumerate(self.barriers) if x.wait_mask >> i & 1]
        unit, _ = issue_clocks(x, rates)
        return max(self.ready, units.get(unit, 0), self.gate(self.index, self.turns), *waits)

    def issue(self, time: float, units: dict[str, float], rates: Rates) -> None:
        """Issues the next instruction."""
        x = self.turn[self.index]
        unit, clocks = issue_clocks(x, rates)
        units[unit] = time + clocks
        done = time + clocks + (rates.tmem if tmem_columns(x) else _LATENCY)
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


def run(warps: Sequence[Warp], rates: Rates, until: Callable[[], bool]) -> None:
    """Issues instructions of warps in turn, one a clock.

    Args:
      warps: Of the sub-partition.
      rates: Of the multiprocessor.
      until: Whether to stop.
    """
    units: dict[str, float] = {}
    free, previous = 0.0, 0
    while not until():
        times = [warp.earliest(units, rates) for warp in warps]
        time = max(free, min(times))
        if math.isinf(time):
            raise RuntimeError("every warp waits for a product that nobody issues")
        # The warp after the one that was served last comes first.
        order = sorted(range(len(warps)), key=lambda i: (i - previous - 1) % len(warps))
        previous = next(i for i in order if times[i] <= time)
        warps[previous].issue(time, units, rates)
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
class Path:
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


def dependency_path(turn: Turn, products: Products, rates: Rates) -> Path:
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

    run([Warp(turn, gate, issued)], rates, lambda: marks.last in times)
    used, stored = times[_first_use(turn)], times[max(i for i, x in enumerate(turn) if x.operation == "STTM")]
    first, last = times[marks.first] + rates.barrier, times[marks.last] + rates.barrier
    end = max(last + products.output * (1 - marks.share), first + products.output)
    return Path(used, stored - used, times[marks.last] - stored, first, end + products.scores)


def _first_use(turn: Turn) -> int:
    """Index of the first instruction that waits for a tensor-memory load before it."""
    loads = [(i, x.write_barrier) for i, x in enumerate(turn) if x.operation == "LDTM"]
    return next(
        i for i, x in enumerate(turn) if any(load < i and x.wait_mask >> barrier & 1 for load, barrier in loads)
    )


def period(turns: tuple[Turn, Turn], correction: Turn, products: Products, rates: Rates, count: int = 12) -> float:
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

        return Warp(turns[tile], gate, issued)

    warps = [softmax(0), softmax(1)]
    if correction:
        warps.append(Warp(correction, gate=lambda index, turn: core.last.get((1, turn), math.inf)))
    run(warps, rates, lambda: (1, count) in core.last)
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
