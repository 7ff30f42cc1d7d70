"""Runs forward and backward for Hopper under many schedules, and breaks their synchronisation, one change at a time.

Usage: python -m tests.emulator.kernels.hopper_survey [--schedules 50] [--mutant-schedules 6] [--out DIRECTORY]

It needs the built kernels and takes about an hour. The schedules are of every case of
tests/emulator/kernels/hopper_cases.py. No sum of dQ has more than two terms there, so its bits do not depend on their
order. The mutants are of the forward with Direct-P and with a running maximum, and of every kernel of the backward that
has something to break.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from jax_fp4attn import recipes
from jax_fp4attn.recipe import Recipe
from tests.emulator.kernels import hopper_backward as backward
from tests.emulator.kernels import hopper_forward as forward
from tests.emulator.kernels import survey
from tests.emulator.kernels.forward import Launch, Shape, inputs, problem_of
from tests.emulator.kernels.hopper_cases import BACKWARD, FORWARD

# What is not noticed in the first launch is tried in the next: many tiles, few, and tiles that not all warpgroups see.
# A thread block of the forward has several items.
_FORWARD: tuple[tuple[Shape, dict[str, Any]], ...] = (
    (Shape(1, 250, 400, 2, 1, 128), {}),
    (Shape(1, 250, 250, 2, 1, 128), {"is_causal": True}),
    (Shape(1, 250, 100, 2, 1, 128), {}),
    (Shape(1, 600, 600, 1, 1, 128), {"window": (40, 30)}),
)
# Queries, keys and query heads. No query sees more than two tiles of keys.
_BACKWARD: tuple[tuple[tuple[int, int, int], dict[str, Any]], ...] = (
    ((400, 250, 2), {"is_causal": True}),
    ((300, 300, 1), {"window": (60, 30)}),
    ((60, 100, 1), {}),
    ((200, 700, 1), {"is_causal": True}),
    ((1000, 100, 2), {}),  # Eight rounds of the longest ring, after which a wrong count shows.
)
# Where dQ is summed in order it may see more: nine rounds of rings.
_QUERY = (*_BACKWARD, ((100, 1700, 1), {}))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs both and returns the exit status: 1 if a schedule changes a result; findings are raised."""
    options = survey.options_of("hopper_survey", arguments)
    same = survey.are_same(_results_of_cases(range(options.schedules)))
    for name, launches in _subjects().items():
        outcomes = survey.break_kernel(launches(), range(options.mutant_schedules))
        survey.report(name, outcomes, options.out / f"mutations_hopper_{name}")
    return 0 if same else 1


def _results_of_cases(seeds: Sequence[int]) -> Iterator[survey.Results]:
    for name, (recipe, shape, options) in FORWARD.items():
        yield f"forward, {name}", forward.attend(problem_of(recipe, *inputs(shape), **options), seeds)
    for name, (recipe, shape, options) in BACKWARD.items():
        problem = backward.problem(recipe, shape, **options)
        for ordered in (False, True):
            form = "backward in order" if ordered else "backward"
            yield f"{form}, {name}", backward.differentiate(problem, ordered=ordered, seeds=seeds)


def _subjects() -> Mapping[str, Callable[[], list[Launch]]]:
    """Launches of each kernel that is broken."""
    return {
        "forward_direct_p": lambda: _forward_launches(recipes.square),
        "forward_running_maximum": lambda: _forward_launches(recipes.train),
        "backward_h64": lambda: [backward.keys_launch(x, ordered=False) for x in _problems(_BACKWARD, 64)],
        "backward_h128": lambda: [backward.keys_launch(x, ordered=False) for x in _problems(_BACKWARD, 128)],
        "backward_ordered": lambda: [backward.keys_launch(x, ordered=True) for x in _problems(_BACKWARD, 128)],
        "backward_query": lambda: [backward.queries_launch(x) for x in _problems(_QUERY, 128)],
    }


def _forward_launches(recipe: Recipe) -> list[Launch]:
    problems = [problem_of(recipe, *inputs(shape), **options) for shape, options in _FORWARD]
    return [forward.attention_launch(problem, blocks=1) for problem in problems]


def _problems(
    sizes: Iterable[tuple[tuple[int, int, int], dict[str, Any]]], head_size: int
) -> Iterator[backward.Problem]:
    for (queries, keys, heads), options in sizes:
        yield backward.problem(recipes.train, Shape(1, queries, keys, heads, 1, head_size), **options)


if __name__ == "__main__":
    sys.exit(main())
