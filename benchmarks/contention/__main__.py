"""Measures what instructions of a softmax cost while the tensor cores of a Hopper GPU work.

Usage: python -m benchmarks.contention [--runs 9] [--out DIRECTORY]
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import jax

from benchmarks.contention.measure import measure
from benchmarks.contention.report import markdown, write_plot

RESULTS = Path(__file__).parent / "results"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark.

    Args:
      arguments: Command line; None for the process's own.

    Returns:
      Exit status: 1 without a GPU of compute capability 9.0.
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.contention", description="Measures instructions beside the tensor cores."
    )
    parser.add_argument("--runs", type=int, default=9, help="runs of each program (default: 9)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory of the results (default: %(default)s)")
    options = parser.parse_args(arguments)
    device = jax.devices()[0]  # the driver's first one, too
    if getattr(device, "compute_capability", "") != "9.0":
        print("nothing to measure: no GPU of compute capability 9.0", file=sys.stderr)
        return 1
    options.out.mkdir(parents=True, exist_ok=True)
    measurements = measure(options.runs)
    text = markdown(measurements, device.device_kind, options.runs)
    print(text)
    (options.out / "contention.md").write_text(text)
    write_plot(options.out / "contention.png", measurements)
    return 0


if __name__ == "__main__":
    sys.exit(main())
