"""The results as a table for people, a table for programs, and a plot."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Canvas

from benchmarks.quantizers.measure import Measurement

TARGET = 0.8


def markdown(
    copies: Mapping[str, float], kernels: Sequence[Measurement], steps: Mapping[str, tuple[float, float]], runs: int
) -> str:
    """The report."""
    copy = max(copies.values())
    lines = [
        f"# Quantisers on one {jax.devices()[0].device_kind}",
        "",
        f"`python -m benchmarks.quantizers`, jax {jax.__version__}; batch 4, 4096 positions, 32 heads of 128 channels;",
        f"times on the GPU by the profiler, median of {runs} runs. Bytes: each input once, each output once.",
        "",
        "Copies in the same run: " + ", ".join(f"{name} {rate / 1e12:.2f} TB/s" for name, rate in copies.items()) + ".",
        "Ratios are to the fastest of them.",
        "",
        "| kernel | MB | µs | fastest to slowest | TB/s | of a copy |",
        "|---|---|---|---|---|---|",
    ]
    for x in kernels:
        times = f"{x.median * 1e6:.1f} | {min(x.times) * 1e6:.1f} to {max(x.times) * 1e6:.1f}"
        rates = f"{x.bandwidth / 1e12:.2f} | {x.bandwidth / copy:.2f}"
        lines.append(f"| {x.kernel.label} | {x.bytes_moved / 1e6:.1f} | {times} | {rates} |")
    lines += ["", "| step | kernels, µs | jitted reference, µs | ratio |", "|---|---|---|---|"]
    for name, (fast, slow) in steps.items():
        lines.append(f"| {name} | {fast * 1e6:.0f} | {slow * 1e6:.0f} | {slow / fast:.1f} |")
    return "\n".join(lines) + "\n"


def write_csv(path: Path, copies: Mapping[str, float], kernels: Sequence[Measurement]) -> None:
    """Writes every execution."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["kernel", "bytes", "seconds", "of_copy"])
        for x in kernels:
            for seconds in x.times:
                ratio = x.bytes_moved / seconds / max(copies.values())
                writer.writerow([x.kernel.label, f"{x.bytes_moved:.0f}", f"{seconds:.3e}", f"{ratio:.4f}"])


def write_plot(path: Path, copies: Mapping[str, float], kernels: Sequence[Measurement]) -> None:
    """Draws the bandwidths as parts of a copy's."""
    canvas = Canvas(figsize=(8, 4), layout="constrained")
    FigureCanvasAgg(canvas)
    axes = canvas.add_subplot()
    ratios = [x.bandwidth / max(copies.values()) for x in kernels]
    colors = ["#1b9e77" if ratio >= TARGET else "#d95f02" for ratio in ratios]
    axes.barh([x.kernel.label for x in kernels], ratios, color=colors)
    axes.axvline(TARGET, color="black", linestyle="--", label=f"{TARGET} of a copy")
    axes.set_xlabel("bandwidth, as a part of the fastest copy in the same run")
    axes.invert_yaxis()
    axes.legend(loc="lower right")
    canvas.savefig(path, dpi=120)
