"""Runs the forward for Blackwell under many schedules, and breaks its synchronisation, one change at a time.

Usage: python -m tests.emulator.kernels.blackwell_survey [--schedules 50] [--mutant-schedules 6] [--out DIRECTORY]

It needs the built kernels and takes about forty minutes. The schedules are of every case of
tests/emulator/kernels/blackwell_cases.py; the mutants are of a kernel with Direct-P and of one with a running maximum.
"""

import itertools
import sys
from collections.abc import Iterator, Sequence

from jax_fp4attn import recipes
from tests.emulator.kernels import blackwell_forward as blackwell
from tests.emulator.kernels import survey
from tests.emulator.kernels.blackwell_cases import CASES, WINDOWS
from tests.emulator.kernels.forward import Shape, inputs, problem_of

# What is not noticed in the first launch is tried in the next: several tiles an item, then one, then few rows. One
# thread block has all items.
_SHAPES = (Shape(1, 768, 768, 1, 1, 64), Shape(1, 512, 100, 2, 1, 64), Shape(1, 700, 300, 1, 1, 64))
_SUBJECTS = {"direct_p": (recipes.square, False), "running_maximum": (recipes.train, True)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs both and returns the exit status: 1 if a schedule changes a result; findings are raised."""
    options = survey.options_of("blackwell_survey", arguments)
    same = survey.are_same(_results_of_cases(range(options.schedules)))
    for name, (recipe, is_causal) in _SUBJECTS.items():
        problems = [problem_of(recipe, *inputs(shape), is_causal=is_causal) for shape in _SHAPES]
        launches = [blackwell.attention_launch(problem, blocks=1) for problem in problems]
        outcomes = survey.break_kernel(launches, range(options.mutant_schedules))
        survey.report(name, outcomes, options.out / f"mutations_blackwell_forward_{name}")
    return 0 if same else 1


def _results_of_cases(seeds: Sequence[int]) -> Iterator[survey.Results]:
    """From every image."""
    for name, (recipe, shape, options) in {**CASES, **WINDOWS}.items():
        problem = problem_of(recipe, *inputs(shape), **options)
        runs = (blackwell.attend(problem, seeds, library=library) for library in blackwell.IMAGES)
        yield name, itertools.chain.from_iterable(runs)


if __name__ == "__main__":
    sys.exit(main())
