"""What is known of a kernel once its code was counted; kept as CSV, so that it can be used without the code."""

import collections
import csv
import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path

from benchmarks.model.cycles import Step, model_step
from benchmarks.model.machine import Machine, rates_of
from benchmarks.model.pipes import ARITHMETIC, PIPES, pipe_of
from benchmarks.model.sass import Module
from benchmarks.model.schedule import DependencyPath
from benchmarks.model.warps import Warps, find_warps

UNITS = ("issue", "fma", "alu", "mufu", "tmem load", "tmem store", "shared", "tensor core")
_PATH = tuple(field.name for field in dataclasses.fields(DependencyPath))
COLUMNS = (
    *("kernel", "code", "target", "exponentials", *PIPES),
    *(f"{unit} clocks" for unit in UNITS),
    *(f"path {name}" for name in _PATH),
    "period",
)

# nvdisasm has no name for the family of sm_100f.
_EXPONENTIALS = {"sm_100a": (16,), "sm_100": (16, 32), "sm_100f": (16, 32), "sm_103a": (32,)}


@dataclasses.dataclass(frozen=True)
class Record:
    """A kernel on multiprocessors of one kind.

    Attributes:
      kernel: Name for tables.
      code: What was disassembled.
      target: That the code is for.
      exponentials: A clock of the multiprocessor.
      fragment: Instructions of a softmax warp for 32 scores of a thread, by pipe.
      step: Modelled clocks.
    """

    kernel: str
    code: str
    target: str
    exponentials: int
    fragment: Mapping[str, float]
    step: Step

    @property
    def instructions(self) -> float:
        """Of a fragment."""
        return sum(self.fragment.values())

    @property
    def arithmetic(self) -> float:
        """Instructions of a fragment that compute: no loads, stores, barriers, uniform instructions, or jumps."""
        return sum(self.fragment[pipe] for pipe in ARITHMETIC)

    def runs_on(self, machine: Machine) -> bool:
        """Whether it is modelled for a GPU."""
        return self.exponentials == machine.exponentials


def find_kernels(module: Module, kernels: Mapping[str, str]) -> dict[str, Warps]:
    """Loops of the forward kernels in a cubin.

    Args:
      module: Its code.
      kernels: Name for tables of each function that is wanted.

    Returns:
      Loops by name for tables.
    """
    wanted = {kernels[x.name]: find_warps(x) for x in module.functions if x.name in kernels}
    return {kernel: warps for kernel, warps in wanted.items() if warps is not None}


def exponentials_of(target: str) -> tuple[int, ...]:
    """Exponentials a clock of the multiprocessors that code for a target runs on."""
    return _EXPONENTIALS[target]


def count(kernel: str, code: str, target: str, exponentials: int, warps: Warps) -> Record:
    """The record of a kernel.

    Args:
      kernel: Name for tables.
      code: Name of the cubin.
      target: That the code is for.
      exponentials: A clock of the multiprocessor.
      warps: Its loops.

    Returns:
      The record.
    """
    counts = collections.Counter(pipe_of(x) for turn in warps.softmax for x in turn)
    fragment = {pipe: counts[pipe] / warps.fragments for pipe in PIPES}
    return Record(kernel, code, target, exponentials, fragment, model_step(warps, rates_of(exponentials)))


def write_csv(path: Path, records: Iterable[Record]) -> None:
    """Writes records."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for x in records:
            numbers = [x.fragment[pipe] for pipe in PIPES] + [x.step.units[unit] for unit in UNITS]
            numbers += [getattr(x.step.path, name) for name in _PATH] + [x.step.period]
            writer.writerow([x.kernel, x.code, x.target, x.exponentials, *(f"{number:g}" for number in numbers)])


def read_csv(path: Path) -> list[Record]:
    """Reads what :func:`write_csv` wrote; nothing if there is no file."""
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return [_record(row) for row in csv.DictReader(file)]


def _record(row: Mapping[str, str]) -> Record:
    units = {unit: float(row[f"{unit} clocks"]) for unit in UNITS}
    return Record(
        row["kernel"],
        row["code"],
        row["target"],
        int(row["exponentials"]),
        {pipe: float(row[pipe]) for pipe in PIPES},
        Step(units, DependencyPath(*(float(row[f"path {name}"]) for name in _PATH)), float(row["period"])),
    )
