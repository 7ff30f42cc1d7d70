"""Runs NVIDIA's attention kernels and matrix products on the emulator under many schedules.

Usage: python -m benchmarks.emulator --cutlass CHECKOUT [--seeds 50] [--out DIRECTORY]

It needs nvidia-cutlass-dsl, nvidia-cutlass-operators and a C compiler, and no GPU.
"""

import argparse
import hashlib
import importlib.metadata
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.emulator import products, record_attention
from benchmarks.emulator.apart import run_apart
from benchmarks.emulator.measure import Measurement, measure
from benchmarks.emulator.record_attention import SOURCES
from benchmarks.emulator.report import markdown, markdown_table, write_csv, write_plot
from benchmarks.emulator.subjects import Subject
from cuda.emulator import emulate
from cuda.emulator.timeline import Timeline

RESULTS = Path(__file__).parent / "results"
FIGURE = Path(__file__).parents[2] / "docs/figures/emulator_timeline.png"

PACKAGES = ("nvidia-cutlass-dsl", "nvidia-cutlass-operators", "numpy")
"""That have to be installed, and whose versions the report gives."""

# Of the seeds, for kernels that are not run under all of them.
_PART = 10
# With fast engines, so that little of the picture is empty.
_DRAWN_SEED = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark.

    Args:
      arguments: Command line; None for the process's own.

    Returns:
      Exit status: 1 if a kernel is not as expected, 2 if they cannot be recorded.
    """
    options = _parse_arguments(arguments)
    reason = why_unavailable(options.cutlass)
    if reason:
        print(f"nothing to measure: {reason}", file=sys.stderr)
        return 2
    # The processes that are started inherit it.
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    measurements: list[Measurement] = []
    for subject in _subjects(options.cutlass):
        if not measurements:
            _draw(subject, options.timeline)
        seeds = options.seeds if subject.many_seeds else max(2, options.seeds // _PART)
        measurements.append(run_apart(measure, subject, seeds))
    print(markdown_table(measurements))
    _write(options.out, measurements, options.cutlass)
    return int(any(x.unexpected for x in measurements))


def _parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.emulator", description="Runs NVIDIA's kernels on the emulator under many schedules."
    )
    parser.add_argument("--cutlass", type=Path, required=True, help="a checkout of github.com/NVIDIA/cutlass")
    parser.add_argument(
        "--seeds", type=int, default=50, help="schedules of the bfloat16 FMHA; a tenth for the others (default: 50)"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory of the results (default: %(default)s)")
    parser.add_argument("--timeline", type=Path, default=FIGURE, help="picture of one launch (default: %(default)s)")
    return parser.parse_args(arguments)


def why_unavailable(checkout: Path) -> str:
    """Why the kernels cannot be recorded, or nothing."""
    for package in PACKAGES:
        try:
            importlib.metadata.distribution(package)
        except importlib.metadata.PackageNotFoundError:
            return f"{package} is not installed"
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        return "there is no C compiler"
    missing = [path for path in SOURCES.values() if not (checkout / path).exists()]
    return f"{checkout} has no {missing[0]}" if missing else ""


def _subjects(checkout: Path) -> Iterator[Subject]:
    for target in SOURCES:
        print(f"compiling FMHA for {target}", file=sys.stderr)
        yield from record_attention.subjects(checkout, target)
    for target in SOURCES:
        print(f"compiling GEMMs for {target}", file=sys.stderr)
        yield from products.subjects(target)


def _draw(subject: Subject, path: Path) -> None:
    """Draws the launch of a kernel, one of its CTAs."""
    timeline = Timeline()
    options = subject.launch.options() | {"seeds": [_DRAWN_SEED], "races": False, "trace": timeline}
    emulate(subject.launch.ptx, subject.arguments(), **options)
    path.parent.mkdir(parents=True, exist_ok=True)
    timeline.draw(path, f"{subject.label}: one CTA under seed {_DRAWN_SEED}", only="CTA (0, 0, 0)")


def _write(directory: Path, measurements: Sequence[Measurement], checkout: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    sources = {path.as_posix(): _blob(checkout / path) for path in SOURCES.values()}
    versions = {package: importlib.metadata.version(package) for package in PACKAGES}
    (directory / "results.md").write_text(markdown(measurements, sources, versions))
    write_csv(directory / "results.csv", measurements)
    write_plot(directory / "results.png", measurements)
    print(f"Results are in {directory}.")


def _blob(path: Path) -> str:
    """The name that git gives to the content of a file, shortened."""
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()[:12]


if __name__ == "__main__":
    sys.exit(main())
