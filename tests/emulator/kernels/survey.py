"""What surveys of the library's kernels share: many schedules, and kernels with broken synchronisation."""

import argparse
import functools
import pathlib
import sys
import time
from collections.abc import Iterable, Sequence

import numpy as np

from cuda.emulator import Program, Result, parse
from cuda.emulator.mutations import UNNOTICED, Outcome, save, survey_launches
from tests.emulator.kernels.forward import Launch, same_bits

Results = tuple[str, Iterable[Iterable[np.ndarray]]]
"""The name of a case, and its arrays under each schedule."""
_RESULTS = pathlib.Path(__file__).parents[3] / "benchmarks" / "emulator" / "results"


def options_of(module: str, arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options of a survey's command line: schedules, mutant_schedules and out."""
    parser = argparse.ArgumentParser(prog=f"python -m tests.emulator.kernels.{module}")
    parser.add_argument("--schedules", type=int, default=50, help="of each case (default: 50)")
    parser.add_argument("--mutant-schedules", type=int, default=6, help="most of a mutant (default: 6)")
    parser.add_argument("--out", type=pathlib.Path, default=_RESULTS, help="directory of tables (default: %(default)s)")
    return parser.parse_args(arguments)


def are_same(cases: Iterable[Results]) -> bool:
    """Whether every case has the same bits in all of its results; prints those that have not."""
    start, runs, same = time.perf_counter(), 0, True
    for name, results in cases:
        print(f"  {name}", file=sys.stderr, flush=True)
        first, *others = results
        runs += 1 + len(others)
        if not all(same_bits(first, other) for other in others):
            print(f"{name}: results depend on the schedule", flush=True)
            same = False
    seconds = time.perf_counter() - start
    print(
        f"{runs} runs without a finding, in {seconds:.0f} s: {'the same bits' if same else 'differences'}", flush=True
    )
    return same


def break_kernel(launches: Iterable[Launch], seeds: Iterable[int]) -> list[Outcome]:
    """Outcomes of all mutants of the kernel that these launches share."""
    first, *others = launches

    def run(launch: Launch, program: Program, seeds: Iterable[int], limit: int) -> Result:
        entry = launch.library.kernels[launch.kernel]
        return entry.emulate(program, launch.grid, launch.values, seeds=seeds, max_instructions=limit)

    def progress(done: int, _: Outcome) -> None:
        if done % 25 == 0:
            print(f"  {first.kernel}: {done} mutants", file=sys.stderr, flush=True)

    program = Program(parse(first.library.ptx, first.library.kernels[first.kernel].entry))
    return survey_launches(program, [functools.partial(run, launch) for launch in (first, *others)], seeds, progress)


def report(name: str, outcomes: Sequence[Outcome], stem: pathlib.Path) -> None:
    """Prints how many were noticed, and saves which."""
    noticed = sum(outcome.noticed != UNNOTICED for outcome in outcomes)
    print(f"{name}: {noticed} of {len(outcomes)} mutants noticed", flush=True)
    save(outcomes, stem)
