"""Runs the forward for Blackwell under many schedules, and breaks its synchronisation, one change at a time.

Usage: python -m tests.emulator.kernels.blackwell_survey [--schedules 50] [--mutant-schedules 6] [--out DIRECTORY]

It needs the built kernels and takes about forty minutes. The schedules are of every case of
tests/emulator/kernels/blackwell_cases.py; the mutants are of a kernel with Direct-P and of one with a running maximum.
"""

import argparse
import itertools
import pathlib
import sys
import time
from collections.abc import Sequence

from cuda.emulator import Program, Result, emulate, parse
from cuda.emulator.mutations import Mutant, Outcome, save, survey
from cuda.emulator.mutations.survey import UNNOTICED
from jax_fp4attn import recipes
from tests.emulator.kernels import blackwell_forward as blackwell
from tests.emulator.kernels.blackwell_cases import CASES, WINDOWS
from tests.emulator.kernels.forward import Problem, Shape, inputs, problem_of, same_bits

_RESULTS = pathlib.Path(__file__).parents[3] / "benchmarks" / "emulator" / "results"

# What is not noticed in the first launch is tried in the next: several tiles an item, then one, then few rows. One
# thread block has all items.
_SHAPES = (Shape(1, 768, 768, 1, 1, 64), Shape(1, 512, 100, 2, 1, 64), Shape(1, 700, 300, 1, 1, 64))
_SUBJECTS = {"direct_p": (recipes.square, False), "running_maximum": (recipes.train, True)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs both and returns the exit status: 1 if a schedule changes a result or has a finding."""
    parser = argparse.ArgumentParser(prog="python -m tests.emulator.kernels.blackwell_survey")
    parser.add_argument("--schedules", type=int, default=50, help="of each case (default: 50)")
    parser.add_argument("--mutant-schedules", type=int, default=6, help="most of a mutant (default: 6)")
    parser.add_argument("--out", type=pathlib.Path, default=_RESULTS, help="directory of tables (default: %(default)s)")
    options = parser.parse_args(arguments)
    same = run_schedules(range(options.schedules))
    for name, (recipe, is_causal) in _SUBJECTS.items():
        problems = [problem_of(recipe, *inputs(shape), is_causal=is_causal) for shape in _SHAPES]
        outcomes = break_kernel(problems, range(options.mutant_schedules))
        noticed = sum(outcome.noticed != UNNOTICED for outcome in outcomes)
        print(f"{name}: {noticed} of {len(outcomes)} mutants noticed", flush=True)
        save(outcomes, options.out / f"mutations_blackwell_forward_{name}")
    return 0 if same else 1


def run_schedules(seeds: Sequence[int]) -> bool:
    """Whether every case gives the same bits under every schedule and from every image; findings are raised."""
    start, launches, same = time.perf_counter(), 0, True
    for name, (recipe, shape, options) in {**CASES, **WINDOWS}.items():
        problem = problem_of(recipe, *inputs(shape), **options)
        runs = (blackwell.attend(problem, seeds, library=library) for library in blackwell.IMAGES)
        first, *others = itertools.chain.from_iterable(runs)
        launches += 1 + len(others)
        if not all(same_bits(first, other) for other in others):
            print(f"{name}: results depend on the schedule", flush=True)
            same = False
    seconds = time.perf_counter() - start
    print(f"{launches} launches without a finding, in {seconds:.0f} s: {'the same bits' if same else 'differences'}")
    return same


def break_kernel(problems: Sequence[Problem], seeds: Sequence[int]) -> list[Outcome]:
    """Outcomes of all mutants of the kernel that these problems share."""
    entry = blackwell.LIBRARY.kernels[blackwell.name_of(problems[0])]
    program = Program(parse(blackwell.LIBRARY.ptx, entry.entry))
    outcomes: dict[tuple[str, str, int], Outcome] = {}
    chosen: list[Mutant] | None = None
    for problem in problems:
        values = blackwell.values_of(problem, *blackwell.ordered_key(problem))

        def run(program: Program, seeds: Sequence[int], limit: int, values: dict = values) -> Result:
            return emulate(
                program,
                entry.arguments(**values),
                1,
                block=entry.threads,
                shared_bytes=entry.shared_bytes,
                seeds=seeds,
                max_instructions=limit,
            )

        for outcome in survey(program, run, seeds, chosen=chosen):
            mutant = outcome.mutant
            outcomes[mutant.family, mutant.change, mutant.instruction.index] = outcome
        chosen = [outcome.mutant for outcome in outcomes.values() if outcome.noticed == UNNOTICED]
    return list(outcomes.values())


if __name__ == "__main__":
    sys.exit(main())
