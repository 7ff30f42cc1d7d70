"""Runs a kernel under many schedules and measures what that takes."""

import dataclasses
import hashlib
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from benchmarks.emulator.errors import Errors
from benchmarks.emulator.subjects import Subject
from cuda.emulator import EmulationError, Finding, emulate
from cuda.emulator.program.program import Program
from cuda.emulator.program.runtime import Function
from cuda.emulator.ptx.parser import parse

# A launch that hangs and polls would go on for ever.
_MAX_INSTRUCTIONS = 20_000_000
_TMA_STORE = re.compile(r"cp\.async\.bulk\.tensor\.\dd\.global")


@dataclasses.dataclass(frozen=True)
class Run:
    """One launch under one seed.

    Attributes:
      seed: Of the schedule.
      races: Whether they were checked.
      instructions: Of warps.
      seconds: Of CPU time, without the making of the program.
    """

    seed: int
    races: bool
    instructions: int
    seconds: float

    @property
    def rate(self) -> float:
        """Instructions a second."""
        return self.instructions / self.seconds


@dataclasses.dataclass(frozen=True)
class Measurement:
    """What came of a kernel.

    Attributes:
      kernel: For tables.
      shape: For tables.
      making: Seconds of CPU time in which the program was made.
      runs: Under all seeds.
      first_peak_bytes: Of memory of the process, the interpreter included, after a run of each kind.
      peak_bytes: The same after all runs.
      findings: Different ones, over all runs.
      varies: Whether an output differs between runs.
      errors: The largest of all runs; None if there is no run.
      fault: That ended the measurement, or "".
      expects_hang: Whether the kernel is known to hang.
    """

    kernel: str
    shape: str
    making: float
    runs: Sequence[Run]
    first_peak_bytes: int
    peak_bytes: int
    findings: frozenset[Finding]
    varies: bool
    errors: Errors | None
    fault: str
    expects_hang: bool = False

    def rates(self, races: bool) -> np.ndarray:
        """Instructions a second of every run with, or without, races being checked."""
        return np.array([run.rate for run in self.runs if run.races == races])

    @property
    def findings_by_kind(self) -> Counter[str]:
        """How many different findings of each kind."""
        return Counter(finding.kind for finding in self.findings)

    @property
    def unexpected(self) -> list[str]:
        """What is not as it should be: a fault or a hang that is not known, unknown findings, outputs that vary."""
        if self.expects_hang:
            return [] if self.fault.startswith("DeadlockError") else [self.fault or "does not hang"]
        found = sorted(str(finding) for finding in self.findings if not _is_known(finding))
        return [*filter(None, [self.fault]), *found, *(["outputs vary"] if self.varies else [])]


def _is_known(finding: Finding) -> bool:
    """Whether it is of TMA stores, by all threads of a warp or not waited for before the CTA ends, or of registers that
    are stored to tensor memory though the text never writes them.
    """
    if finding.kind == "register":
        return "tcgen05.st" in finding.text and finding.text.endswith("which nothing writes")
    return finding.kind in ("issue", "lifetime") and _TMA_STORE.search(finding.text) is not None


class TimedProgram(Program):
    """A program that knows the CPU time in which it was made; its functions are made while it runs.

    Attributes:
      making: Seconds.
    """

    def __init__(self, ptx: str, entry: str | None = None):
        start = time.process_time()
        super().__init__(parse(ptx, entry))
        _ = self.static_findings
        self.making = time.process_time() - start

    def function(self, pc: int, masked: bool) -> Function:
        start = time.process_time()
        try:
            return super().function(pc, masked)
        finally:
            self.making += time.process_time() - start


def measure(subject: Subject, seeds: int) -> Measurement:
    """Runs a kernel under some seeds without, then with, checks of races.

    A run of each kind that is not counted comes first, in which most of the program is made.
    """
    program = TimedProgram(subject.launch.ptx, subject.launch.entry)
    runs: list[Run] = []
    findings: set[Finding] = set()
    outputs: dict[str, Errors] = {}
    fault, first_peak = "", 0
    schedules = [(False, 0), (True, 0), *((races, seed) for races in (False, True) for seed in range(seeds))]
    try:
        for races, seed in _shown(subject.label, schedules):
            run, found, written = _run(subject, program, races, seed)
            runs.append(run)
            first_peak = first_peak or (_peak_bytes() if races else 0)
            findings |= found
            digest = hashlib.sha256(b"".join(x.tobytes() for x in written)).hexdigest()
            if digest not in outputs:
                outputs[digest] = subject.errors(written)
    except EmulationError as e:
        fault = f"{type(e).__name__}: {e}"
        print(f"\r{subject.label}: {type(e).__name__}".ljust(72), file=sys.stderr, flush=True)
    return Measurement(
        kernel=subject.kernel,
        shape=subject.shape,
        making=program.making,
        runs=runs[2:],
        first_peak_bytes=first_peak or _peak_bytes(),
        peak_bytes=_peak_bytes(),
        findings=frozenset(findings),
        varies=len(outputs) > 1,
        errors=_worst(outputs.values()),
        fault=fault,
        expects_hang=subject.hangs,
    )


def _shown(label: str, schedules: Sequence[tuple[bool, int]]) -> Iterator[tuple[bool, int]]:
    """The schedules, with a line of what is done, which on a terminal counts them."""
    start = time.perf_counter()
    for i, (races, seed) in enumerate(schedules):
        if sys.stderr.isatty():
            text = f"\r{label}: run {i + 1} of {len(schedules)}, races {'on ' if races else 'off'}"
            print(text, end="", file=sys.stderr, flush=True)
        yield races, seed
    seconds = f"{time.perf_counter() - start:.1f} s"
    print(f"\r{label}: {len(schedules)} runs in {seconds}".ljust(72), file=sys.stderr, flush=True)


def _run(subject: Subject, program: TimedProgram, races: bool, seed: int) -> tuple[Run, set[Finding], list[np.ndarray]]:
    options = subject.launch.options() | {"max_instructions": _MAX_INSTRUCTIONS}
    arguments, made = subject.arguments(), program.making
    start = time.process_time()
    result = emulate(program, arguments, seeds=[seed], races=races, **options)
    seconds = time.process_time() - start - (program.making - made)
    run = Run(seed, races, result.instructions, seconds)
    return run, set(result.findings), subject.written(result.arrays[0])


def _worst(errors: Iterable[Errors]) -> Errors | None:
    found = list(errors)
    if not found:
        return None
    lse = [x.lse for x in found if x.lse is not None]
    return Errors(max(x.relative_l2 for x in found), max(lse) if lse else None)


def _peak_bytes() -> int:
    """The largest resident size of this process. That of getrusage counts the one that started it, too."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) * 1024
