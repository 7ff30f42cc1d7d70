"""A bar that shows how far a training is."""

from collections.abc import Iterable

from tqdm import tqdm

from examples.language_model.training import History, TrainingConfig


def run_with_progress(
    name: str, losses: Iterable[float], history: History, config: TrainingConfig, *, disable: bool = False
) -> None:
    """Runs a training to its end.

    Args:
      name: What the bar is called.
      losses: The training, as it yields the loss of each step.
      history: What the training extends.
      config: Its settings.
      disable: Whether to show nothing.
    """
    with tqdm(
        losses, desc=name, initial=history.step, total=config.steps, unit="step", mininterval=1.0, disable=disable
    ) as bar:
        for loss in bar:
            speed = tokens_per_second(history, config)
            bar.set_postfix(loss=f"{loss:.3f}", tokens_per_s=f"{speed:.0f}", refresh=False)


def tokens_per_second(history: History, config: TrainingConfig) -> float:
    """Bytes learned from in a second, NaN before a step has been timed."""
    return config.batch * config.sequence_length / history.seconds_per_step
