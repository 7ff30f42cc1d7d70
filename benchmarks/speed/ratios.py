"""Speed of contenders against the baselines, in each case and on average."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from benchmarks.speed.cases import MASKS, PASSES, Case
from benchmarks.speed.measure import Result

BASELINES = ("flash3", "cudnn")

LONG = 4096
"""The least length that counts for the means."""


def ratio(results: Sequence[Result], result: Result, baseline: str) -> float | None:
    """How many times as fast as a baseline a contender is in its case.

    Args:
      results: Of all contenders.
      result: Of the contender.
      baseline: Label of the baseline.

    Returns:
      The quotient of medians; None if one of them was not measured.
    """
    of_baseline = find(results, result.case, baseline)
    if of_baseline is None or of_baseline.timing is None or result.timing is None:
        return None
    return of_baseline.timing.median / result.timing.median


def find(results: Sequence[Result], case: Case, label: str) -> Result | None:
    """The result of a contender in a case, or None.

    Args:
      results: Of all contenders.
      case: The case.
      label: Of the contender.

    Returns:
      The first one.
    """
    return next((x for x in results if x.label == label and x.case == case), None)


def labels(results: Sequence[Result]) -> list[str]:
    """Contenders in the order of their first appearance.

    Args:
      results: Of all contenders.

    Returns:
      Each label once.
    """
    return list(dict.fromkeys(x.label for x in results))


@dataclasses.dataclass(frozen=True)
class Mean:
    """Geometric mean of a contender's ratios over long shapes of one head size.

    Attributes:
      passes: Of the cases.
      mask: Of the cases.
      head_size: Of the cases.
      label: Of the contender.
      ratios: For each baseline the mean and the number of shapes in it, or None if there is no shape.
    """

    passes: str
    mask: str
    head_size: int
    label: str
    ratios: dict[str, tuple[float, int] | None]


def means(results: Sequence[Result]) -> list[Mean]:
    """Geometric means over shapes of at least 4096 positions; head sizes apart.

    Args:
      results: Of all contenders.

    Returns:
      One for each contender that has a ratio.
    """
    found = []
    sizes = sorted({x.case.shape.head_size for x in results}, reverse=True)
    groups = [(passes, mask, size) for passes in PASSES for mask in MASKS for size in sizes]
    for passes, mask, size in groups:
        group = [
            x
            for x in results
            if (x.case.passes, x.case.mask, x.case.shape.head_size) == (passes, mask, size)
            and x.case.shape.length >= LONG
        ]
        for label in labels(group):
            of_contender = [x for x in group if x.label == label]
            ratios = {
                baseline: geometric_mean([ratio(results, x, baseline) for x in of_contender]) for baseline in BASELINES
            }
            if any(ratios.values()):
                found.append(Mean(passes, mask, size, label, ratios))
    return found


def geometric_mean(values: Sequence[float | None]) -> tuple[float, int] | None:
    """Geometric mean of what there is.

    Args:
      values: Positive, or None.

    Returns:
      The mean and the number of values in it; None if there is none.
    """
    present = [x for x in values if x is not None]
    return (float(np.exp(np.mean(np.log(present)))), len(present)) if present else None
