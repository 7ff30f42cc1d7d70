"""What code for one kind of multiprocessor saves there, beside code for the whole family."""

import dataclasses
from collections.abc import Iterable, Sequence

from benchmarks.model.machine import Machine
from benchmarks.model.records import Record, exponentials_of


@dataclasses.dataclass(frozen=True)
class Saving:
    """A kernel in two images, on the multiprocessors that the second one is for.

    Attributes:
      family: From the image for the family.
      own: From the other one.
      slow_loads: Clocks of a step of the latter if loads with maxima took two clocks a column.
    """

    family: Record
    own: Record
    slow_loads: float

    @property
    def time(self) -> float:
        """Of a step, in times of that of the family's code."""
        return self.own.step.period / self.family.step.period


def taken(records: Iterable[Record], machine: Machine) -> list[Record]:
    """The records of what runs on a GPU: of kernels in several images that from the image for the fewest GPUs.

    Args:
      records: Of kernels.
      machine: The GPU.

    Returns:
      One a kernel, in the order of the records.
    """
    found: dict[str, Record] = {}
    for x in records:
        if x.runs_on(machine) and (x.kernel not in found or _breadth(x) < _breadth(found[x.kernel])):
            found[x.kernel] = x
    return list(found.values())


def savings(records: Sequence[Record], machine: Machine, slow_loads: dict[str, float]) -> list[Saving]:
    """Of every kernel that a GPU takes from an image of its own and could take from that of the family.

    Args:
      records: Of kernels.
      machine: The GPU.
      slow_loads: See :class:`Saving`, by kernel.

    Returns:
      Savings.
    """
    found = []
    for own in taken(records, machine):
        others = (x for x in records if x.kernel == own.kernel and x.runs_on(machine) and x.target != own.target)
        family = next(others, None)
        if family is not None:
            found.append(Saving(family, own, slow_loads[own.kernel]))
    return found


def _breadth(x: Record) -> int:
    return len(exponentials_of(x.target))
