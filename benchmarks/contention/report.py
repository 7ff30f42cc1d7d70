"""Table and plot of the measurements."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks.contention.measure import Measurement
from benchmarks.contention.programs import STREAM, TENSOR_CORES


def markdown(measurements: list[Measurement], device: str, runs: int) -> str:
    """The page of the results."""
    by_place = {(m.instruction.name, m.tensor_cores): m for m in measurements}
    lines = [
        f"# What instructions cost beside the tensor cores, on one {device}",
        "",
        "`python -m benchmarks.contention`: clocks of a scheduler for an instruction of a warp, one warp of each",
        f"scheduler repeating it with 16 values in turn; medians and ranges of {runs} runs. Beside it two",
        "warpgroups keep the tensor cores at products of 64 x 128 accumulators.",
        "",
        "| instruction | SASS | " + " | ".join(f"tensor cores: {name}" for name in TENSOR_CORES) + " |",
        "|---|---|" + "---|" * len(TENSOR_CORES),
    ]
    for instruction in STREAM:
        cells = [_cell(by_place[instruction.name, name]) for name in TENSOR_CORES]
        lines.append(f"| {instruction.name} | {instruction.sass} | " + " | ".join(cells) + " |")
    products = [m.product_clocks for m in measurements if m.product_clocks is not None]
    span = f"{min(products):.1f} to {max(products):.1f} clocks"
    lines += ["", f"A product took {span} (64 at the peak rate), those after the last instruction included."]
    return "\n".join(lines) + "\n"


def _cell(measurement: Measurement) -> str:
    return f"{measurement.median:.2f} ({min(measurement.clocks):.2f} to {max(measurement.clocks):.2f})"


def write_plot(path: Path, measurements: list[Measurement]) -> None:
    """Bars of the medians."""
    figure, axes = plt.subplots(figsize=(8, 6), layout="constrained")
    height = 0.8 / len(TENSOR_CORES)
    for place, name in enumerate(TENSOR_CORES):
        medians = [m.median for m in measurements if m.tensor_cores == name]
        axes.barh([i + place * height for i in range(len(STREAM))], medians, height, label=f"tensor cores: {name}")
    axes.set_yticks([i + height for i in range(len(STREAM))], [i.name for i in STREAM])
    axes.invert_yaxis()
    axes.set_xlabel("clocks of a scheduler for an instruction of a warp")
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
