"""Loss curves of the arms of a comparison: as numbers, and drawn beside and against the baseline."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator, ScalarFormatter

from examples.language_model.report import ArmResult
from examples.language_model.sizes import BASELINE

FOLLOWS = 1.1
"""An arm follows the baseline if its last held-out loss is at most so many times the baseline's after as many steps."""

Styles = Mapping[str, tuple[str, str]]  # Colour and line of each arm.


def write_losses(path: Path, results: Sequence[ArmResult]) -> None:
    """Writes training and held-out loss of every arm.

    Args:
      path: CSV file.
      results: Of all arms.
    """
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["recipe", "step", "training_loss", "held_out_loss"])
        for result in results:
            held_out = dict(result.history.held_out_loss)
            for step, loss in enumerate(result.history.training_loss, start=1):
                writer.writerow([result.name, step, f"{loss:.6g}", f"{held_out[step]:.6g}" if step in held_out else ""])


def write_curves(path: Path, results: Sequence[ArmResult]) -> None:
    """Draws training and held-out loss of every arm and by how much those that follow the baseline differ from it.

    Args:
      path: PNG file.
      results: Of all arms.
    """
    baseline = next((result for result in results if result.name == BASELINE), None)
    following = [] if baseline is None else [x for x in results if x is not baseline and _follows(x, baseline)]
    panels = 3 if following else 2
    figure = Figure(figsize=(5.2 * panels, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, panels)
    styles = {result.name: (f"C{index}", "--" if index % 2 else "-") for index, result in enumerate(results)}
    width = max(1, max(result.history.step for result in results) // 20)
    _draw_losses(axes[0], axes[1], results, styles, width)
    if baseline is not None and following:
        _draw_differences(axes[2], following, baseline, styles, width)
    for panel in axes:
        panel.set_xlabel("step")
        panel.grid(alpha=0.3)
        panel.legend()
    figure.savefig(path, dpi=120)


def differences(result: ArmResult, baseline: ArmResult) -> dict[int, float]:
    """By how much an arm's held-out loss differs from the baseline's after equally many steps.

    Args:
      result: Of the arm.
      baseline: Result of the baseline.

    Returns:
      The loss divided by the baseline's, minus 1, by number of steps.
    """
    expected = dict(baseline.history.held_out_loss)
    return {step: loss / expected[step] - 1 for step, loss in result.history.held_out_loss if step in expected}


def _follows(result: ArmResult, baseline: ArmResult) -> bool:
    of_steps = differences(result, baseline)
    return bool(of_steps) and of_steps[max(of_steps)] <= FOLLOWS - 1


def _draw_losses(training: Axes, held_out: Axes, results: Sequence[ArmResult], styles: Styles, width: int) -> None:
    for result in results:
        color, style = styles[result.name]
        losses = np.asarray(result.history.training_loss)
        training.plot(np.arange(len(losses)) + 1, losses, color=color, alpha=0.2, linewidth=0.8)
        training.plot(*_smoothed(losses, width), style, color=color, label=result.name)
        steps, values = zip(*result.history.held_out_loss, strict=True)
        held_out.plot(steps, values, style, color=color, marker="o", markersize=3, label=result.name)
    for axes, title in ((training, f"Training (mean of {width} steps)"), (held_out, "Held out")):
        # Logarithmic, so that an arm that diverges leaves room for those that do not.
        axes.set(title=title, ylabel="loss, nats a byte", yscale="log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 4, 6, 8)))
        axes.yaxis.set_major_formatter(ScalarFormatter())
        axes.yaxis.set_minor_locator(NullLocator())


def _draw_differences(
    axes: Axes, following: Sequence[ArmResult], baseline: ArmResult, styles: Styles, width: int
) -> None:
    for result in following:
        color, _ = styles[result.name]
        pairs = zip(result.history.training_loss, baseline.history.training_loss, strict=False)
        (steps, actual), (_, expected) = (_smoothed(np.asarray(losses), width) for losses in zip(*pairs, strict=True))
        held_out = differences(result, baseline)
        axes.plot(steps, 100 * (actual / expected - 1), color=color, linewidth=0.8, label=f"{result.name}, training")
        axes.plot(
            list(held_out),
            [100 * x for x in held_out.values()],
            "o--",
            color=color,
            markersize=3,
            label=f"{result.name}, held out",
        )
    axes.axhline(0, color=styles[BASELINE][0], linewidth=0.8)
    axes.set(title=f"Against {BASELINE}", ylabel=f"loss against {BASELINE}, %")


def _smoothed(losses: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Moving average and the steps that it is centred on."""
    width = min(width, len(losses))
    averages = np.convolve(losses, np.full(width, 1 / width), mode="valid")
    return np.arange(len(averages)) + (width + 1) / 2, averages
