"""Breaks the synchronisation of NVIDIA's kernels, one change at a time, and counts what the emulator notices.

Usage: python -m benchmarks.emulator.mutations --cutlass CHECKOUT [--seeds 8] [--out DIRECTORY]

It needs what benchmarks.emulator needs, and takes about half an hour.
"""

import argparse
import dataclasses
import functools
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from benchmarks.emulator import products, record_attention
from benchmarks.emulator.__main__ import RESULTS, why_unavailable
from benchmarks.emulator.attention import PERSISTENT_CASES
from benchmarks.emulator.subjects import Subject
from cuda.emulator import Program, Result, emulate, parse
from cuda.emulator.mutations import UNNOTICED, Outcome, bars, save, survey_launches

FIGURE = Path(__file__).parents[2] / "docs/figures/emulator_mutations.png"
_PRODUCTS = {
    "sm_100a": ("GEMM nvfp4-tails-persistent sm_100a", "GEMM nvfp4-pair-persistent sm_100a"),
    "sm_90a": ("GEMM bf16-tails-persistent sm_90a",),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the surveys and returns the exit status: 2 if the kernels cannot be recorded."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.emulator.mutations")
    parser.add_argument("--cutlass", type=Path, required=True, help="a checkout of github.com/NVIDIA/cutlass")
    parser.add_argument("--seeds", type=int, default=8, help="most schedules of a mutant (default: 8)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory of the tables (default: %(default)s)")
    parser.add_argument("--figure", type=Path, default=FIGURE, help="picture (default: %(default)s)")
    options = parser.parse_args(arguments)
    reason = why_unavailable(options.cutlass)
    if reason:
        print(f"nothing to break: {reason}", file=sys.stderr)
        return 2
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    options.out.mkdir(parents=True, exist_ok=True)
    surveys = {}
    for kernel, subjects in _subjects(options.cutlass):
        outcomes = _survey(kernel, subjects, range(options.seeds))
        save(outcomes, options.out / f"mutations_{kernel.lower().replace(' ', '_')}")
        noticed = sum(outcome.noticed != UNNOTICED for outcome in outcomes)
        print(f"{kernel}: {noticed} of {len(outcomes)} noticed", flush=True)
        surveys[f"{kernel}: {noticed} of {len(outcomes)}"] = outcomes
    bars(surveys, options.figure)
    return 0


def _subjects(checkout: Path) -> Iterator[tuple[str, list[Subject]]]:
    """Each kernel with the launches in which its mutants run."""
    for persistent in (True, False):
        cases = [dataclasses.replace(case, persistent=persistent) for case in PERSISTENT_CASES]
        launches = list(record_attention.subjects(checkout, "sm_100a", cases))
        yield launches[0].kernel, launches
    for target, kernels in _PRODUCTS.items():
        for subject in products.subjects(target):
            if subject.kernel in kernels:
                yield subject.kernel, [subject]


def _survey(kernel: str, subjects: Sequence[Subject], seeds: Iterable[int]) -> list[Outcome]:
    """Outcomes of all mutants; what is not noticed in one launch is tried in the next."""
    launch = subjects[0].launch

    def run(subject: Subject, program: Program, seeds: Iterable[int], limit: int) -> Result:
        options = subject.launch.options() | {"seeds": seeds, "max_instructions": limit, "entry": None}
        return emulate(program, subject.arguments(), **options)

    def progress(done: int, _: Outcome) -> None:
        if done % 25 == 0:
            print(f"  {kernel}: {done} mutants", file=sys.stderr, flush=True)

    runs = [functools.partial(run, subject) for subject in subjects]
    return survey_launches(Program(parse(launch.ptx, launch.entry)), runs, seeds, progress)


if __name__ == "__main__":
    sys.exit(main())
