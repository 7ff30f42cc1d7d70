"""What is known of a kernel once its code was counted; kept as CSV, so that it can be used without the code."""

import collections
import csv
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from benchmarks.model.cycles import Step, model_step
from benchmarks.model.machine import Machine, mufu_clocks
from benchmarks.model.pipes import PIPES, pipe_of
from benchmarks.model.sass import Module
from benchmarks.model.warps import find_warps

UNITS = ("issue", "fma", "alu", "mufu", "tmem load", "tmem store", "shared", "tensor core")
ARITHMETIC = ("fma", "alu", "conversion", "mufu")
"""Pipes that compute."""

_CLOCKS = ("first_output", "path", "period")
COLUMNS = ("kernel", "code", "target", "exponentials", *PIPES, *(f"{unit} clocks" for unit in UNITS), *_CLOCKS)

# Exponentials a clock of the multiprocessors that code for a target runs on. nvdisasm has no name for the family.
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


def count(module: Module, kernels: Mapping[str, str], code: str) -> Iterator[Record]:
    """Records of the forward kernels in a cubin.

    Args:
      module: Its code.
      kernels: Name for tables of each function that is wanted.
      code: Name of the cubin.

    Yields:
      One for each kernel and kind of multiprocessor.
    """
    for function in module.functions:
        warps = find_warps(function) if function.name in kernels else None
        if warps is None:
            continue
        counts = collections.Counter(map(pipe_of, warps.softmax))
        fragment = {pipe: counts[pipe] / warps.fragments for pipe in PIPES}
        for exponentials in _EXPONENTIALS[module.target]:
            step = model_step(warps, mufu_clocks(exponentials))
            yield Record(kernels[function.name], code, module.target, exponentials, fragment, step)


def write_csv(path: Path, records: Iterable[Record]) -> None:
    """Writes records."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for x in records:
            numbers = [x.fragment[pipe] for pipe in PIPES] + [x.step.units[unit] for unit in UNITS]
            numbers += [getattr(x.step, name) for name in _CLOCKS]
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
        Step(units, *(float(row[name]) for name in _CLOCKS)),
    )
