"""Measures the accuracy of the recipes and writes it beside the published figures.

Usage: python -m benchmarks.accuracy [--sections grid,causal] [--quick] [--out DIRECTORY]
"""

import argparse
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.accuracy import backward, causal, density_sweep, format_matrix, grid, lse_bias, p_range, pareto
from benchmarks.accuracy.figures import Figure, Section
from benchmarks.accuracy.plot import write_plot
from benchmarks.accuracy.report import markdown_table, summary, write_csv, write_markdown

SECTIONS = {
    module.SECTION.name: module.SECTION
    for module in (grid, p_range, format_matrix, density_sweep, causal, backward, lse_bias, pareto)
}
RESULTS = Path(__file__).parent / "results"


def _parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.accuracy",
        description="Measures the accuracy of the recipes and writes it beside the published figures.",
    )
    parser.add_argument(
        "--sections",
        type=lambda text: text.split(","),
        default=list(SECTIONS),
        metavar="A,B",
        help="which of " + ", ".join(SECTIONS) + " to measure (default: all)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="small sizes, to see that everything runs; checks no requirement"
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="directory of the results (default: benchmarks/accuracy/results for a full run, none otherwise)",
    )
    parsed = parser.parse_args(arguments)
    if unknown := set(parsed.sections) - set(SECTIONS):
        parser.error(f"--sections: unknown {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    if parsed.out is None and not parsed.quick and set(parsed.sections) == set(SECTIONS):
        parsed.out = RESULTS
    return parsed


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark.

    Args:
      arguments: Command line; None for the process's own.

    Returns:
      Exit status: 1 if a requirement is not met.
    """
    parsed = _parse_arguments(arguments)
    results: dict[Section, list[Figure]] = {}
    for section in (section for name, section in SECTIONS.items() if name in parsed.sections):
        figures = section.measure(parsed.quick)
        if parsed.quick:
            figures = [dataclasses.replace(figure, requirement=None) for figure in figures]
        results[section] = figures
        print(f"\n{section.title}\n{section.note}\n\n{markdown_table(figures)}\n", flush=True)
    print(summary(results))
    if parsed.out is not None:
        _write(parsed.out, results)
    return int(any(figure.passes is False for figures in results.values() for figure in figures))


def _write(directory: Path, results: Mapping[Section, Sequence[Figure]]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    write_markdown(directory / "accuracy.md", results)
    write_csv(directory / "accuracy.csv", results)
    if pareto.SECTION in results:
        write_plot(directory / "pareto.png", results[pareto.SECTION])
    print(f"Results are in {directory}.")


if __name__ == "__main__":
    sys.exit(main())
