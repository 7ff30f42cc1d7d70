"""Measures the quantising kernels on a GPU against the bandwidth of a copy and against the reference.

Usage: python -m benchmarks.quantizers [--runs 30] [--out DIRECTORY]
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.quantizers.measure import measure_copies, measure_kernels, measure_steps
from benchmarks.quantizers.report import markdown, write_csv, write_plot
from jax_fp4attn import native

RESULTS = Path(__file__).parent / "results"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark.

    Args:
      arguments: Command line; None for the process's own.

    Returns:
      Exit status: 1 if there is no kernel to measure.
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quantizers", description="Measures the quantising kernels on a GPU."
    )
    parser.add_argument("--runs", type=int, default=30, help="executions of each kernel (default: 30)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory of the results (default: %(default)s)")
    options = parser.parse_args(arguments)
    reason = native.why_unavailable()
    if reason is not None:
        print(f"nothing to measure: {reason}", file=sys.stderr)
        return 1
    options.out.mkdir(parents=True, exist_ok=True)
    copies = measure_copies(options.runs)
    kernels = measure_kernels(options.runs)
    text = markdown(copies, kernels, measure_steps(options.runs), options.runs)
    print(text)
    (options.out / "quantizers.md").write_text(text)
    write_csv(options.out / "quantizers.csv", copies, kernels)
    write_plot(options.out / "quantizers.png", copies, kernels)
    return 0


if __name__ == "__main__":
    sys.exit(main())
