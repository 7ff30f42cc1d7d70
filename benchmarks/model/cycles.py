"""Clocks of a step, two query tiles against one key tile, and seconds of a call."""

import collections
import dataclasses
from collections.abc import Mapping

from benchmarks.model.machine import PRODUCT_CLOCKS, Machine
from benchmarks.model.pipes import issue_clocks
from benchmarks.model.schedule import Products, dependency_path, period
from benchmarks.model.shapes import Shape
from benchmarks.model.warps import Turn, Warps, products

QUERY_TILES = 2
"""Of a thread block; each has a softmax warp in every sub-partition."""


@dataclasses.dataclass(frozen=True)
class Step:
    """Modelled clocks of a step.

    Attributes:
      units: Busy clocks of each unit of a sub-partition, ``issue`` and ``tensor core`` among them.
      first_output: From scores to the first legal P V, with the sub-partition to itself.
      path: From scores to the next scores of the same query tile, likewise.
      period: From step to step, with both query tiles in the schedule.
    """

    units: Mapping[str, float]
    first_output: float
    path: float
    period: float

    @property
    def busiest(self) -> str:
        """The unit with the most busy clocks."""
        return max(self.units, key=lambda unit: self.units[unit])

    @property
    def bound(self) -> str:
        """What the period comes from: a unit if it is nearly always busy, else the dependency path."""
        busy = self.units[self.busiest]
        return self.busiest if busy > 0.95 * self.period or busy > self.path else "dependency path"


def model_step(warps: Warps, mufu_clocks: int) -> Step:
    """Clocks of a step of a kernel.

    Args:
      warps: Its loops.
      mufu_clocks: Of a warp's exponentials.

    Returns:
      The step.
    """
    scores, output = (count * PRODUCT_CLOCKS for count in products(warps.issue))
    of_a_tile = Products(scores / QUERY_TILES, output / QUERY_TILES)
    first_output, path = dependency_path(warps.softmax, of_a_tile, mufu_clocks)
    # Softmax turns may take several key tiles.
    turns = 1 / warps.tiles
    return Step(
        _busy(warps, mufu_clocks) | {"tensor core": scores + output},
        first_output,
        path * turns,
        period(warps.softmax, warps.correction, of_a_tile, mufu_clocks) * turns,
    )


def _busy(warps: Warps, mufu_clocks: int) -> dict[str, float]:
    """Clocks of the sub-partition that has the issuing warp too."""
    busy: collections.Counter[str] = collections.Counter()
    turns: tuple[tuple[Turn, float], ...] = (
        (warps.softmax, QUERY_TILES / warps.tiles),
        (warps.correction, 1),
        (warps.issue, 1),
    )
    for turn, count in turns:
        for x in turn:
            unit, clocks = issue_clocks(x, mufu_clocks)
            if unit in _UNITS:
                busy[unit] += clocks * count
            busy["issue"] += count
    return dict(busy)


_UNITS = ("fma", "alu", "mufu", "tmem load", "tmem store", "shared")


def seconds(step: Step, machine: Machine, shape: Shape) -> float:
    """Modelled seconds of a forward call.

    Thread blocks take items of two query tiles until there are none left. An item fills and drains the pipeline, a
    dependency path each.

    Args:
      step: Of the kernel on this machine.
      machine: The GPU.
      shape: Of the call.

    Returns:
      Seconds, without the launch.
    """
    steps, items = shape.most_loaded(machine.multiprocessors)
    return (step.period * (steps - items) + 2 * step.path * items) / machine.clock
