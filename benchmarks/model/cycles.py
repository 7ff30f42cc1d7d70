"""Clocks of a step, two query tiles against one key tile, and seconds of a call."""

import collections
import dataclasses
from collections.abc import Mapping

from benchmarks.model.machine import Machine, Rates
from benchmarks.model.pipes import issue_clocks
from benchmarks.model.schedule import DependencyPath, Products, dependency_path, period
from benchmarks.model.shapes import Shape
from benchmarks.model.warps import Warps, products

QUERY_TILES = 2
"""Of a thread block; each has a softmax warp in every sub-partition."""


@dataclasses.dataclass(frozen=True)
class Step:
    """Modelled clocks of a step.

    Attributes:
      units: Busy clocks of each unit of a sub-partition, ``issue`` and ``tensor core`` among them.
      path: Of one query tile, with the sub-partition to itself; the longer one's.
      period: From step to step, with both query tiles in the schedule.
    """

    units: Mapping[str, float]
    path: DependencyPath
    period: float

    @property
    def busiest(self) -> str:
        """The unit with the most busy clocks."""
        return max(self.units, key=lambda unit: self.units[unit])

    @property
    def bound(self) -> str:
        """What the period comes from: a unit that is nearly always busy, else the dependency path."""
        return self.busiest if self.units[self.busiest] > _NEARLY_ALWAYS * self.period else "dependency path"


def model_step(warps: Warps, rates: Rates) -> Step:
    """Clocks of a step of a kernel.

    Args:
      warps: Its loops.
      rates: Of the multiprocessor.

    Returns:
      The step.
    """
    if warps.tiles != 1:
        raise ValueError(f"a softmax turn of {warps.tiles} key tiles, expected one")
    scores, output = (count * rates.product for count in products(warps.issue))
    of_a_tile = Products(scores / QUERY_TILES, output / QUERY_TILES)
    paths = [dependency_path(turn, of_a_tile, rates) for turn in warps.softmax]
    return Step(
        _busy(warps, rates) | {"tensor core": scores + output},
        max(paths, key=lambda path: path.total),
        period(warps.softmax, warps.correction, of_a_tile, rates),
    )


def _busy(warps: Warps, rates: Rates) -> dict[str, float]:
    """Clocks of the sub-partition that has the issuing warp too."""
    busy: collections.Counter[str] = collections.Counter(dict.fromkeys(_UNITS, 0))
    for turn in (*warps.softmax, warps.correction, warps.issue):
        for x in turn:
            unit, clocks = issue_clocks(x, rates)
            if unit in _UNITS:
                busy[unit] += clocks
            busy["issue"] += 1
    return dict(busy)


_NEARLY_ALWAYS = 0.95
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
    return (step.period * (steps - items) + 2 * step.path.total * items) / machine.clock
