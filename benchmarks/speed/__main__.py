"""Measures the speed of the operator on a GPU beside FlashAttention-3, cuDNN and plain XLA.

Usage: python -m benchmarks.speed [--out DIRECTORY] [--quick] [--only flash3,cudnn] [--recipes fast,train]
    [--shapes 0,2] [--masks causal] [--passes forward]

FlashAttention-3 is flash-attn3-jax from PyPI, where it is installed.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax

from benchmarks.speed.cases import GRID, MASKS, PASSES, QUICK, Case, Shape
from benchmarks.speed.contenders import KINDS, RECIPES, contenders_of
from benchmarks.speed.environment import environment
from benchmarks.speed.inputs import draw
from benchmarks.speed.measure import Result, device_answers, launch_seconds, measure
from benchmarks.speed.plot import write_plot
from benchmarks.speed.report import markdown, summary, write_csv
from benchmarks.speed.timing import TURN_SECONDS

RESULTS = Path(__file__).parent / "results"

_ALL_RECIPES = [name for names in RECIPES.values() for name in names]


def _list_of(known: Sequence[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = text.split(",")
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"unknown {', '.join(unknown)}; there are {', '.join(known)}")
        return names

    return parse


def _parse_arguments(arguments: Sequence[str] | None, grid: Sequence[Shape]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.speed",
        description="Measures the speed of the operator on a GPU beside its rivals.",
        epilog="shapes: " + "; ".join(f"{i}: {shape}" for i, shape in enumerate(grid)),
    )

    def add_list(name: str, known: Sequence[str], what: str) -> None:
        parser.add_argument(
            name,
            type=_list_of(known),
            default=list(known),
            metavar="A,B",
            help=f"which {what} of {', '.join(known)} (default: all)",
        )

    parser.add_argument("--out", type=Path, default=RESULTS, help="directory of the results (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help=f"only the first {QUICK} shapes")
    add_list("--only", list(KINDS), "contenders")
    add_list("--recipes", _ALL_RECIPES, "recipes")
    add_list("--shapes", [str(i) for i in range(len(grid))], "shapes, by number,")
    add_list("--masks", MASKS, "masks")
    add_list("--passes", PASSES, "passes")
    parser.add_argument(
        "--seconds", type=float, default=1.0, help="about how long to time a case (default: %(default)s)"
    )
    parser.add_argument(
        "--turn", type=float, default=TURN_SECONDS, help="about how long a turn takes, seconds (default: %(default)s)"
    )
    parser.add_argument("--profile", action="store_true", help="add the times of the kernels by the profiler")
    parser.add_argument(
        "--implementation", choices=("cuda", "reference"), default="cuda", help="of ours (default: %(default)s)"
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None, grid: Sequence[Shape] = GRID) -> int:
    """Runs the benchmark. Results are written after every case, so that a run may be cut.

    Args:
      arguments: Command line; None for the process's own.
      grid: Shapes.

    Returns:
      Exit status: 1 if nothing could be measured, or not to the end.
    """
    options = _parse_arguments(arguments, grid)
    if options.implementation == "cuda" and jax.default_backend() != "gpu":
        print(f"nothing to measure: no GPU, only {jax.devices()[0].platform}", file=sys.stderr)
        return 1
    options.out.mkdir(parents=True, exist_ok=True)
    shapes = [grid[int(i)] for i in options.shapes][: QUICK if options.quick else None]
    facts = environment(launch_seconds()) | {"seconds of a turn": f"{options.turn:g}"}
    results: list[Result] = []
    start = time.perf_counter()
    for shape in shapes:
        _measure_shape(shape, options, results, facts, start)
        _write_plots(options.out, results, facts)
        if not device_answers():
            break
    facts["seconds of the whole run"] = f"{time.perf_counter() - start:.0f}"
    _write_tables(options.out, results, facts)
    print(summary(results, facts))
    print(f"\nResults are in {options.out}.")
    return int(not device_answers() or not any(result.timing for result in results))


def _measure_shape(
    shape: Shape, options: argparse.Namespace, results: list[Result], facts: dict[str, str], start: float
) -> None:
    """Adds the results of a shape, and writes them case by case."""
    arrays = jax.block_until_ready(draw(shape))
    for case in (Case(shape, mask, passes) for passes in options.passes for mask in options.masks):
        print(f"[{time.perf_counter() - start:.0f} s] {case}", file=sys.stderr, flush=True)
        contenders = contenders_of(case, options.only, options.recipes, options.implementation)
        results += measure(
            case,
            contenders,
            arrays,
            seconds=options.seconds,
            turn_seconds=options.turn,
            earlier=results,
            profile=options.profile,
        )
        _write_tables(options.out, results, facts)
        if not device_answers():
            print("the device is lost", file=sys.stderr)
            return


def _write_tables(directory: Path, results: Sequence[Result], facts: dict[str, str]) -> None:
    write_csv(directory / "speed.csv", results)
    (directory / "speed.md").write_text(markdown(results, facts))


def _write_plots(directory: Path, results: Sequence[Result], facts: dict[str, str]) -> None:
    for passes in PASSES:
        name = f"speed_{passes.replace('+', '_')}.png"
        write_plot(directory / name, results, passes, f"Speed on one {facts['device']}")


if __name__ == "__main__":
    sys.exit(main())
