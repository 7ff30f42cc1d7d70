"""Which mutants of a kernel the emulator notices, and by what."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import DeadlockError, EmulationError, Finding
from ..front import Result
from ..program.program import Program
from ..ptx.parser import parse
from ..ptx.syntax import Kernel
from .mutants import Mutant, mutants

# Runs a program under some seeds, with a limit on the instructions of each run.
Run = Callable[[Program, Sequence[int], int], Result]

UNNOTICED = "unnoticed"
_LINE = re.compile(r"\bline (\d+)\b")


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant.

    Attributes:
      mutant: the mutant.
      noticed: by what: the name of a fault's class, "no end", the kind of a finding, "wrong result" or "unnoticed".
      text: the message.
      seed: under which it was noticed.
    """

    mutant: Mutant
    noticed: str
    text: str = ""
    seed: int | None = None


def key_of(finding: Finding) -> tuple:
    """What makes a finding a new one: its kind and the lines of the instructions in it."""
    return finding.kind, *_LINE.findall(finding.text)


def survey(
    kernel: str | Kernel | Program,
    run: Run,
    seeds: Iterable[int],
    baseline: Result | None = None,
    chosen: Iterable[Mutant] | None = None,
    limit: float = 4.0,
    progress: Callable[[int, Outcome], None] | None = None,
) -> list[Outcome]:
    """Run each mutant under one seed after the other until something is noticed.

    Args:
      kernel: without faults; PTX text with one entry, a parsed kernel, or a program.
      run: see `Run`.
      seeds: for the mutants, and for the baseline if it is not given.
      baseline: runs of the kernel; what is found in it does not count.
      chosen: the mutants; all by default.
      limit: instructions of a run, as a multiple of the baseline's.
      progress: called with the number of mutants done and the latest outcome.

    Returns:
      One outcome a mutant.
    """
    seeds = list(seeds)
    if isinstance(kernel, str):
        kernel = parse(kernel)
    program = kernel if isinstance(kernel, Program) else Program(kernel)
    baseline = run(program, seeds, 1 << 40) if baseline is None else baseline
    if baseline.varying:
        raise ValueError(f"arrays {baseline.varying} of the kernel itself differ between seeds")
    judge = _Judge(program, run, seeds, baseline, int(limit * baseline.instructions / len(baseline.arrays)))
    outcomes = []
    for mutant in mutants(program.kernel) if chosen is None else chosen:
        outcomes.append(judge.outcome(mutant))
        if progress is not None:
            progress(len(outcomes), outcomes[-1])
    return outcomes


def survey_launches(
    program: Program,
    runs: Iterable[Run],
    seeds: Iterable[int],
    progress: Callable[[int, Outcome], None] | None = None,
) -> list[Outcome]:
    """Survey a kernel in several launches: what is not noticed in one is tried in the next.

    Args:
      program: without faults.
      runs: one a launch, see `Run`; the next one is asked for when the launch before is done.
      seeds: see `survey`.
      progress: called with the number of mutants done in a launch and the latest outcome.

    Returns:
      One outcome a mutant, the last one that it has.
    """
    seeds = list(seeds)
    outcomes: dict[tuple[str, str, int], Outcome] = {}
    chosen: list[Mutant] | None = None
    for run in runs:
        for outcome in survey(program, run, seeds, chosen=chosen, progress=progress):
            mutant = outcome.mutant
            outcomes[mutant.family, mutant.change, mutant.instruction.index] = outcome
        chosen = [outcome.mutant for outcome in outcomes.values() if outcome.noticed == UNNOTICED]
    return list(outcomes.values())


class _Judge:
    """Compares mutants with the kernel."""

    def __init__(self, program: Program, run: Run, seeds: Sequence[int], baseline: Result, limit: int) -> None:
        self.program, self.run, self.seeds, self.limit = program, run, seeds, limit
        self.arrays = baseline.arrays[0]
        self.known = {key_of(finding) for finding in baseline.findings}

    def outcome(self, mutant: Mutant) -> Outcome:
        """Run until something is noticed."""
        program = self.program.altered(mutant.kernel)
        for seed in self.seeds:
            try:
                result = self.run(program, (seed,), self.limit)
            except DeadlockError as e:
                return Outcome(mutant, "deadlock", str(e), seed)
            except EmulationError as e:
                noticed = "no end" if "without an end" in str(e) else _name(e)
                return Outcome(mutant, noticed, str(e), seed)
            new = [finding for finding in result.findings if key_of(finding) not in self.known]
            if new:
                return Outcome(mutant, new[0].kind, new[0].text, seed)
            if not all(map(_same_bytes, result.arrays[0], self.arrays)):
                return Outcome(mutant, "wrong result", "", seed)
        return Outcome(mutant, UNNOTICED)


def _name(error: EmulationError) -> str:
    return type(error).__name__.removesuffix("Error")


def _same_bytes(a: np.ndarray, b: np.ndarray) -> bool:
    return a.tobytes() == b.tobytes()
