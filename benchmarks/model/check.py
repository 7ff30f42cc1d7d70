"""The model beside what is published, and beside what was asked of our kernels."""

import dataclasses
from collections.abc import Iterable, Sequence

from benchmarks.model.cases import SAME_KERNEL
from benchmarks.model.cycles import seconds
from benchmarks.model.images import taken
from benchmarks.model.machine import Machine
from benchmarks.model.published import DESIGN_FRAGMENT, Row
from benchmarks.model.records import Record

MOST_SQUARE_TIME = 1.13
"""Of `square`, in times of `fast`."""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A published time and the modelled one.

    Attributes:
      row: As published.
      seconds: As modelled.
    """

    row: Row
    seconds: float

    @property
    def error(self) -> float:
        """Relative, positive if the model is too slow."""
        return self.seconds / self.row.seconds - 1


def compare(records: Sequence[Record], rows: Iterable[Row]) -> list[Comparison]:
    """The modelled time of every published row whose kernel is known.

    Args:
      records: Of kernels.
      rows: As published.

    Returns:
      Comparisons in the order of the rows.
    """
    found = []
    for row in rows:
        record = find(records, SAME_KERNEL.get(row.kernel, row.kernel), row.machine)
        if record is not None:
            found.append(Comparison(row, seconds(record.step, row.machine, row.shape)))
    return found


def find(records: Sequence[Record], kernel: str, machine: Machine) -> Record | None:
    """The record of a kernel on a GPU."""
    return next((x for x in taken(records, machine) if x.kernel == kernel), None)


@dataclasses.dataclass(frozen=True)
class Target:
    """Something asked of our kernels.

    Attributes:
      what: In words.
      limit: The most that is allowed.
      value: Counted or modelled.
    """

    what: str
    limit: float
    value: float

    @property
    def met(self) -> bool:
        """Whether the value is within the limit."""
        return self.value <= self.limit


def targets(records: Sequence[Record], machines: Sequence[Machine]) -> list[Target]:
    """What was asked, as far as the kernels are known.

    Args:
      records: Of kernels.
      machines: GPUs to compare times on, one of each kind of multiprocessor.

    Returns:
      Targets.
    """
    found = []
    for kernel, fragment in DESIGN_FRAGMENT.items():
        record = next((x for x in records if x.kernel == kernel), None)
        if record is not None:
            what = f"arithmetic instructions of a fragment, `{kernel}`, at most those of the published design"
            found.append(Target(what, sum(fragment.values()), record.arithmetic))
    for machine in machines:
        fast, square = (find(records, kernel, machine) for kernel in ("fast", "square"))
        if fast is not None and square is not None:
            what = f"time of `square` in times of `fast`, {machine.name}"
            found.append(Target(what, MOST_SQUARE_TIME, square.step.period / fast.step.period))
    return found
