"""What a comparison of arms leaves behind: results of each arm, tables and samples of text."""

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from examples._tables import markdown_table
from examples.language_model.sizes import BASELINE
from examples.language_model.training import History
from jax_fp4attn import recipes


@dataclasses.dataclass(frozen=True)
class ArmResult:
    """Outcome of one arm.

    Attributes:
      name: Of the recipe.
      attention: What computed attention.
      settings: What the results of all arms have in common: the model, its training and the text.
      device: Kind of the device.
      history: Of the training.
      held_out_loss: Nats a byte, on all of the held-out text.
      tokens_per_second: In training.
      sample: Text that the model wrote.
    """

    name: str
    attention: str
    settings: dict[str, Any]
    device: str
    history: History
    held_out_loss: float
    tokens_per_second: float
    sample: str

    @property
    def training_loss(self) -> float:
        """Mean over the last tenth of the steps."""
        losses = self.history.training_loss
        return float(np.mean(losses[-max(1, len(losses) // 10) :]))

    def write(self, directory: Path) -> None:
        """Writes the result to a directory, where :func:`read_results` finds it."""
        directory.mkdir(parents=True, exist_ok=True)
        unfinished = directory / f"{self.name}.unfinished"
        unfinished.write_text(json.dumps(dataclasses.asdict(self)))
        unfinished.replace(directory / f"{self.name}.json")  # Another process may be reading.


def read_results(directory: Path) -> list[ArmResult]:
    """Reads the results of all arms, whichever processes wrote them; the baseline comes first.

    Args:
      directory: Where :meth:`ArmResult.write` wrote.

    Returns:
      The results.

    Raises:
      ValueError: If there are none, or their settings differ.
    """
    read = [json.loads(path.read_text()) for path in sorted(directory.glob("*.json"))]
    results = [ArmResult(**x | {"history": History(**x["history"])}) for x in read]
    if not results:
        raise ValueError(f"{directory} holds no results")
    for result in results:
        if differing := [name for name, x in result.settings.items() if results[0].settings.get(name) != x]:
            raise ValueError(
                f"{directory}: {results[0].name} and {result.name} differ in {', '.join(differing)}; train both alike"
            )
    order = [BASELINE, *recipes.named()]
    return sorted(results, key=lambda result: order.index(result.name))


def table(results: Sequence[ArmResult]) -> str:
    """Makes the table of losses.

    Args:
      results: Of all arms.

    Returns:
      Markdown.
    """
    baseline = next((result for result in results if result.name == BASELINE), None)
    header = [
        *("recipe", "attention", "steps", "training loss", "held-out loss", "held-out bits/byte"),
        *(f"held-out vs {BASELINE}", "tokens/s", f"speed vs {BASELINE}"),
    ]
    rows = [
        [
            result.name,
            result.attention,
            f"{result.history.step}",
            f"{result.training_loss:.4f}",
            f"{result.held_out_loss:.4f}",
            f"{result.held_out_loss / math.log(2):.4f}",
            "" if baseline is None else f"{result.held_out_loss / baseline.held_out_loss - 1:+.2%}",
            f"{result.tokens_per_second:.0f}",
            "" if baseline is None else f"{result.tokens_per_second / baseline.tokens_per_second:.2f}",
        ]
        for result in results
    ]
    return markdown_table(header, rows)


def losses_at_equal_steps(results: Sequence[ArmResult]) -> str:
    """Makes the table of held-out losses after equally many steps, on the windows of the evaluations.

    An arm that ended early has no entry afterwards.

    Args:
      results: Of all arms.

    Returns:
      Markdown.
    """
    by_arm = {result.name: dict(result.history.held_out_loss) for result in results}
    steps = sorted(set().union(*by_arm.values()))
    rows = [
        [str(step), *(f"{losses[step]:.4f}" if step in losses else "" for losses in by_arm.values())] for step in steps
    ]
    return markdown_table(["step", *by_arm], rows)


def write_report(path: Path, results: Sequence[ArmResult], prompt: str) -> None:
    """Writes table and samples.

    Args:
      path: Markdown file.
      results: Of all arms.
      prompt: What the samples continue.
    """
    settings = ", ".join(f"{name} {value}" for name, value in results[0].settings.items())
    devices = ", ".join(sorted({result.device for result in results}))
    samples = [f"## {result.name}\n\n```text\n{result.sample}\n```" for result in results]
    parts = [
        "# Language models trained with different attention recipes",
        f"Losses in nats a byte. Measured on {devices}: {settings}.",
        table(results),
        "# Held-out loss after equally many steps",
        "On the windows of the evaluations, which are a part of the held-out text.",
        losses_at_equal_steps(results),
        "![Curves](curves.png)",
        f"# Samples\n\nAll continue\n\n```text\n{prompt}\n```",
        *samples,
    ]
    path.write_text("\n\n".join(parts) + "\n")
