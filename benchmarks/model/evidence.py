"""What supports the model: the assembler's own idea of the rates, and how far the assumed ones matter."""

import collections
import dataclasses
import itertools
from collections.abc import Iterable, Mapping

from benchmarks.model.cycles import model_step
from benchmarks.model.machine import Rates
from benchmarks.model.pipes import ARITHMETIC, pipe_of
from benchmarks.model.warps import Turn, Warps

VARIATIONS: Mapping[str, Mapping[str, int]] = {
    "as assumed": {},
    "tmem latency halved": {"tmem": Rates(1).tmem // 2},
    "barriers at once": {"barrier": 0},
    "products at peak": {"product": 64},
    "packed float32 at half": {"packed": 4},
}
"""Changes of rates. Faster pipes change little: the assembler's stall counts keep instructions apart all the same."""

WITHOUT_ARITHMETIC = "no arithmetic"


def vary(warps: Warps, rates: Rates) -> dict[str, float]:
    """Period of a kernel with each change, and without the arithmetic of its softmax.

    Args:
      warps: Its loops.
      rates: To be changed.

    Returns:
      Clocks by name of the change.
    """
    found = {
        name: model_step(warps, dataclasses.replace(rates, **change)).period for name, change in VARIATIONS.items()
    }
    return found | {WITHOUT_ARITHMETIC: model_step(_without_arithmetic(warps), rates).period}


def _without_arithmetic(warps: Warps) -> Warps:
    """Softmax warps that load, store and hand off; instructions that wait for a barrier stay."""
    first, second = (tuple(x for x in turn if pipe_of(x) not in ARITHMETIC or x.wait_mask) for turn in warps.softmax)
    return dataclasses.replace(warps, softmax=(first, second))


def stalls_between_neighbours(turns: Iterable[Turn]) -> dict[str, collections.Counter[int]]:
    """Stall counts of instructions that the same operation follows at once.

    The assembler knows how many clocks apart a pipe takes them. Dependencies add to it, so the least counts.

    Args:
      turns: Of any warps.

    Returns:
      How often each stall count stands between two instructions, by operation.
    """
    found: dict[str, collections.Counter[int]] = collections.defaultdict(collections.Counter)
    for turn in turns:
        for x, after in itertools.pairwise(turn):
            if x.operation == after.operation and pipe_of(x) in ARITHMETIC:
                found[x.operation][x.stall] += 1
    return dict(found)
