"""The loops of a forward kernel's warps, by what they do: softmax, correction, issue of products."""

import collections
import dataclasses
from collections.abc import Callable, Iterator, Sequence

from benchmarks.model.control_flow import ControlFlow, Loop, analyze
from benchmarks.model.pipes import takes_maximum, tmem_columns
from benchmarks.model.sass import Function, Instruction

TILE = 128
"""Keys of a tile, and rows."""

FRAGMENT = 32
"""Scores of a fragment: of one row, held by one thread."""

_MOST_SCORES_A_MAXIMUM = 8

_PRODUCTS = ("UTCHMMA", "UTCQMMA", "UTCOMMA", "UTCIMMA")

Turn = tuple[Instruction, ...]


@dataclasses.dataclass(frozen=True)
class Warps:
    """One steady turn of each kind of warp.

    Attributes:
      softmax: From scores to probabilities, of each query tile.
      correction: Of the warps that keep the accumulators' scale, or a part of the denominator; may be empty.
      issue: Of the warp that issues the products, of both query tiles.
    """

    softmax: tuple[Turn, Turn]
    correction: Turn
    issue: Turn

    @property
    def fragments(self) -> float:
        """Fragments of the softmax turns together. What is loaded twice is less than a tile."""
        columns = map(loaded_columns, self.softmax)
        return sum(x - x % TILE if x > TILE else x for x in columns) / FRAGMENT

    @property
    def tiles(self) -> float:
        """Key tiles of a softmax turn."""
        return self.fragments * FRAGMENT / TILE / len(self.softmax)


def find_warps(function: Function) -> Warps | None:
    """The loops of a kernel.

    Args:
      function: Its code.

    Returns:
      Their turns, or None if it has no loop from scores to probabilities in tensor memory.
    """
    flow = analyze(function)
    softmax = _softmax(flow)
    if not softmax:
        return None
    return Warps((softmax[0], softmax[-1]), _correction(flow), _issue(flow))


def loaded_columns(turn: Turn) -> int:
    """Columns of tensor memory that a turn loads."""
    return sum(tmem_columns(x) for x in turn if x.operation == "LDTM")


def stored_columns(turn: Turn) -> int:
    """Columns of tensor memory that a turn stores."""
    return sum(tmem_columns(x) for x in turn if x.operation == "STTM")


def products(turn: Turn) -> tuple[int, int]:
    """How many products a turn issues with the first operand in shared memory, and in tensor memory.

    Args:
      turn: Of the issuing warp.

    Returns:
      Instructions of Q K, and of P V.
    """
    issued = [x for x in turn if x.operation in _PRODUCTS]
    of_probabilities = sum(x.operands.startswith("tmem") for x in issued)
    return len(issued) - of_probabilities, of_probabilities


def _softmax(flow: ControlFlow) -> list[Turn]:
    """Turns of the first query tile, and of the second if it has code of its own, a loop over items around it."""
    turns: dict[int, list[Turn]] = collections.defaultdict(list)
    for loop in _innermost(flow, _is_softmax):
        around = next(x for x in flow.loops if loop.header in x.blocks)
        turns[around.header if around != loop else 0].append(flow.steady_turn(loop, tmem_columns))
    # Turns of masked tiles do more for as many scores.
    return [min(turns[x], key=lambda turn: len(turn) / loaded_columns(turn)) for x in sorted(turns)]


def _correction(flow: ControlFlow) -> Turn:
    """The shortest turn: rescaling is left out where it may be."""
    found = list(_innermost(flow, _is_correction))
    turns = [flow.steady_turn(loop, lambda x: 0) for loop in found]
    return max(turns, key=lambda turn: (loaded_columns(turn), len(turn)), default=())


def _issue(flow: ControlFlow) -> Turn:
    def count(x: Instruction) -> int:
        return int(x.operation in _PRODUCTS)

    turns = [flow.steady_turn(loop, count) for loop in _innermost(flow, lambda turn: min(products(turn)) > 0)]
    return max(turns, key=lambda turn: sum(map(count, turn)), default=())


def _is_softmax(turn: Turn) -> bool:
    """Whether it takes maxima of what it loads, and stores what it converts. An epilogue takes none."""
    columns, converts = loaded_columns(turn), any(x.operation == "F2FP" for x in turn)
    return converts and stored_columns(turn) > 0 and 0 < columns <= _MOST_SCORES_A_MAXIMUM * _maxima(turn)


def _maxima(turn: Turn) -> int:
    """Maxima of floating-point numbers; a load that takes the maximum counts once for each two columns, as FMNMX3."""
    by_loads = sum(tmem_columns(x) // 2 for x in turn if takes_maximum(x))
    return by_loads + sum(x.operation.startswith("FMNMX") for x in turn)


def _is_correction(turn: Turn) -> bool:
    return not any(x.operation == "F2FP" for x in turn) and loaded_columns(turn) > 0


def _innermost(flow: ControlFlow, wanted: Callable[[Turn], bool]) -> Iterator[Loop]:
    """Loops that are of a kind, and none inside them is."""

    def inside(loops: Sequence[Loop]) -> Iterator[Loop]:
        for loop in loops:
            inner = list(inside(loop.inner))
            if inner:
                yield from inner
            elif wanted(flow.steady_turn(loop, lambda x: tmem_columns(x) + (x.operation in _PRODUCTS))):
                yield loop

    return inside(flow.loops)
