"""What a comparison of arms leaves behind: a table, curves and samples of text."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from examples._tables import markdown_table
from examples.language_model.training import History

BASELINE = "bf16"


@dataclasses.dataclass(frozen=True)
class ArmResult:
    """Outcome of one arm.

    Attributes:
      name: Of the recipe.
      history: Of the training.
      held_out_loss: Nats a byte, on all of the held-out text.
      tokens_per_second: In training.
      sample: Text that the model wrote.
    """

    name: str
    history: History
    held_out_loss: float
    tokens_per_second: float
    sample: str

    @property
    def training_loss(self) -> float:
        """Mean over the last tenth of the steps."""
        losses = self.history.training_loss
        return float(np.mean(losses[-max(1, len(losses) // 10) :]))


def table(results: Sequence[ArmResult]) -> str:
    """Makes the table of losses.

    Args:
      results: Of all arms.

    Returns:
      Markdown.
    """
    baseline = next((result.held_out_loss for result in results if result.name == BASELINE), math.nan)
    header = ["recipe", "training loss", "held-out loss", "held-out bits/byte", f"held-out vs {BASELINE}", "tokens/s"]
    rows = [
        [
            result.name,
            f"{result.training_loss:.4f}",
            f"{result.held_out_loss:.4f}",
            f"{result.held_out_loss / math.log(2):.4f}",
            f"{result.held_out_loss / baseline - 1:+.2%}",
            f"{result.tokens_per_second:.0f}",
        ]
        for result in results
    ]
    return markdown_table(header, rows)


def write_report(path: Path, results: Sequence[ArmResult], prompt: str) -> None:
    """Writes table and samples.

    Args:
      path: Markdown file.
      results: Of all arms.
      prompt: What the samples continue.
    """
    samples = [f"## {result.name}\n\n```text\n{result.sample}\n```" for result in results]
    parts = [
        "# Language models trained with different attention recipes",
        "Losses in nats a byte.",
        table(results),
        "![Curves](curves.png)",
        f"# Samples\n\nAll continue\n\n```text\n{prompt}\n```",
        *samples,
    ]
    path.write_text("\n\n".join(parts) + "\n")


def write_curves(path: Path, results: Sequence[ArmResult]) -> None:
    """Draws training and held-out loss of every arm.

    Args:
      path: PNG file.
      results: Of all arms.
    """
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    training, held_out = figure.subplots(1, 2)
    for index, result in enumerate(results):
        color = f"C{index}"
        losses = np.asarray(result.history.training_loss)
        training.plot(np.arange(len(losses)) + 1, losses, color=color, alpha=0.2, linewidth=0.8)
        training.plot(*_smoothed(losses), color=color, label=result.name)
        steps, values = zip(*result.history.held_out_loss, strict=True)
        held_out.plot(steps, values, color=color, marker="o", markersize=3, label=result.name)
    for axes, title in ((training, "Training (moving average)"), (held_out, "Held out")):
        axes.set(title=title, xlabel="step", ylabel="loss, nats a byte")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=120)


def _smoothed(losses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Moving average and the steps that it is centred on."""
    width = max(1, len(losses) // 20)
    averages = np.convolve(losses, np.full(width, 1 / width), mode="valid")
    return np.arange(len(averages)) + (width + 1) / 2, averages
