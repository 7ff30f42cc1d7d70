"""Loss curves of a run and, beside it, of one that should give the same."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


def write_losses(path: Path, losses: Mapping[str, Sequence[float]]) -> None:
    """Writes the loss of each step.

    Args:
      path: CSV file.
      losses: By name of the run.
    """
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", *losses])
        for step, row in enumerate(zip(*losses.values(), strict=True), start=1):
            writer.writerow([step, *(f"{x:.9g}" for x in row)])  # Nine digits tell any two float32 numbers apart.


def write_plot(path: Path, losses: Mapping[str, Sequence[float]]) -> None:
    """Draws the losses and, if there are two runs, by how much they differ.

    Args:
      path: PNG file.
      losses: By name of the run.
    """
    figure = Figure(figsize=(5.5 * len(losses), 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(losses), squeeze=False)[0]
    for (name, values), style in zip(losses.items(), ("-", "--"), strict=False):
        axes[0].plot(np.arange(len(values)) + 1, values, style, label=name)
    axes[0].set(title="Training", ylabel="loss, nats a byte")
    axes[0].legend()
    if len(losses) == 2:
        first, second = (np.asarray(values) for values in losses.values())
        axes[1].plot(np.arange(len(first)) + 1, first - second, color="C2")
        axes[1].set(title=" − ".join(losses), ylabel="difference of the losses, nats a byte")
    for panel in axes:
        panel.set(xlabel="step")
        panel.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
