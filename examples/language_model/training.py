"""Training of one model: settings, step, held-out loss and the loop, wherever the model is."""

import collections
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from examples.language_model.data import Corpus, spread_windows, training_batch

IN_FLIGHT = 2
"""Steps that are begun while an earlier one runs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Settings of the training.

    Attributes:
      steps: Number of optimiser steps.
      batch: Windows of text in a step.
      sequence_length: Bytes to predict in a window.
      seed: Of parameters, data and samples.
      learning_rate: The largest; reached after the warm-up, then a cosine down to a tenth.
      warmup_fraction: Part of the steps in which the learning rate rises.
      weight_decay: Of AdamW.
      max_gradient_norm: Gradients are scaled down to this norm.
      evaluations: How often in the training the held-out loss is measured and a checkpoint written.
      evaluation_windows: On how many windows.
    """

    steps: int = 300
    batch: int = 4
    sequence_length: int = 256
    seed: int = 0
    learning_rate: float = 4e-3
    warmup_fraction: float = 0.06
    weight_decay: float = 0.1
    max_gradient_norm: float = 1.0
    evaluations: int = 10
    evaluation_windows: int = 16

    def is_evaluated(self, step: int) -> bool:
        """Whether the held-out loss is measured after so many steps."""
        return step % max(1, self.steps // self.evaluations) == 0 or step == self.steps


@dataclasses.dataclass
class History:
    """What a training has measured so far.

    Attributes:
      training_loss: Nats a byte, of each step.
      held_out_loss: Number of steps and nats a byte, of each evaluation.
      timed_steps: Number of steps timed; those that compile are not.
      seconds: Time they took.
    """

    training_loss: list[float] = dataclasses.field(default_factory=list)
    held_out_loss: list[tuple[int, float]] = dataclasses.field(default_factory=list)
    timed_steps: int = 0
    seconds: float = 0.0

    @property
    def step(self) -> int:
        """Number of steps taken."""
        return len(self.training_loss)

    @property
    def seconds_per_step(self) -> float:
        """Mean time of a step, NaN before one has been timed."""
        return self.seconds / self.timed_steps if self.timed_steps else math.nan


class Learner(Protocol):
    """Parameters and optimiser state, wherever they are, and what a step does to them."""

    def place(self, read: Callable[[slice], np.ndarray], shape: tuple[int, int]) -> jax.Array:
        """Puts a batch where the parameters are.

        Args:
          read: Reads some rows of the batch.
          shape: Of the whole batch.

        Returns:
          The batch.
        """
        ...

    def update(self, windows: jax.Array) -> jax.Array:
        """Takes a step on int [B, T + 1] and returns the loss before it."""
        ...

    def loss(self, windows: jax.Array) -> jax.Array:
        """The loss on int [B, T + 1]."""
        ...


# Cached because a step is compiled for the functions of its optimiser: equal settings give the same ones.
@functools.cache
def make_transformation(config: TrainingConfig) -> optax.GradientTransformation:
    """Makes AdamW with warm-up, cosine decay and clipping.

    Args:
      config: Settings.

    Returns:
      The transformation of gradients.
    """
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=config.learning_rate,
        warmup_steps=round(config.warmup_fraction * config.steps),
        decay_steps=config.steps,
        end_value=0.1 * config.learning_rate,
    )
    return optax.chain(
        optax.clip_by_global_norm(config.max_gradient_norm),
        optax.adamw(schedule, b2=0.95, weight_decay=config.weight_decay),
    )


def make_optimizer(model: nnx.Module, config: TrainingConfig) -> nnx.Optimizer:
    """Makes the optimiser of a model.

    Args:
      model: What to train.
      config: Settings.

    Returns:
      The optimiser.
    """
    return nnx.Optimizer(model, make_transformation(config), wrt=nnx.Param)


def mean_loss(model: nnx.Module, tokens: jax.Array, targets: jax.Array) -> jax.Array:
    """Cross-entropy in nats a byte of int [B, T]: each target is predicted from the tokens up to its place."""
    return optax.softmax_cross_entropy_with_integer_labels(model(tokens), targets).mean()


def mean_loss_of_windows(model: nnx.Module, windows: jax.Array) -> jax.Array:
    """The same for int [B, T + 1]: each byte is predicted from those before it."""
    return mean_loss(model, windows[:, :-1], windows[:, 1:])


def train_step(
    model: nnx.Module,
    optimizer: nnx.Optimizer,
    windows: jax.Array,
    loss_function: Callable[[nnx.Module, jax.Array], jax.Array] = mean_loss_of_windows,
) -> jax.Array:
    """Updates model and optimiser in place.

    Args:
      model: What to train.
      optimizer: Its optimiser.
      windows: int [B, T + 1].
      loss_function: Of model and windows.

    Returns:
      The loss before the update.
    """
    loss, gradients = nnx.value_and_grad(loss_function)(model, windows)
    optimizer.update(model, gradients)
    return loss


_jitted_train_step = nnx.jit(train_step)
_jitted_mean_loss = nnx.jit(mean_loss_of_windows)


@dataclasses.dataclass(frozen=True)
class OneDeviceLearner:
    """A model and its optimiser on the default device.

    Attributes:
      model: Updated in place.
      optimizer: Updated in place.
    """

    model: nnx.Module
    optimizer: nnx.Optimizer

    def place(self, read: Callable[[slice], np.ndarray], shape: tuple[int, int]) -> jax.Array:
        del shape
        return jnp.asarray(read(slice(None)))

    @functools.cached_property
    def _update(self) -> Callable[[jax.Array], jax.Array]:
        # Without it every step goes through all modules and variables again, which may take longer than a GPU does.
        return nnx.cached_partial(_jitted_train_step, self.model, self.optimizer)

    def update(self, windows: jax.Array) -> jax.Array:
        return self._update(windows)

    def loss(self, windows: jax.Array) -> jax.Array:
        return _jitted_mean_loss(self.model, windows)


def held_out_loss(learner: Learner, windows: np.ndarray, batch: int) -> float:
    """Mean loss over windows.

    Args:
      learner: Parameters.
      windows: int [windows, T + 1].
      batch: How many to evaluate at a time; windows that fill no batch are left out.

    Returns:
      Nats a byte.
    """
    batch = min(batch, len(windows))
    chunks = [windows[start : start + batch] for start in range(0, len(windows) - batch + 1, batch)]
    return float(np.mean([learner.loss(learner.place(chunk.__getitem__, chunk.shape)) for chunk in chunks]))


def train(
    learner: Learner,
    corpus: Corpus,
    config: TrainingConfig,
    history: History,
    save: Callable[[], None] = lambda: None,
    deadline: float = math.inf,
) -> Iterator[float]:
    """Trains from where ``history`` ends to the last step.

    Args:
      learner: What to train; updated in place.
      corpus: Text.
      config: Settings.
      history: Extended in place.
      save: Called after each evaluation, when learner and history belong together.
      deadline: Time of :func:`time.perf_counter` from which no further step is begun.

    Yields:
      The loss of each step.
    """
    length = config.sequence_length
    draw = functools.partial(training_batch, corpus.training, seed=config.seed, batch=config.batch, length=length)
    windows = spread_windows(corpus.held_out, count=config.evaluation_windows, length=length)
    begun, last = history.step, config.steps
    losses: collections.deque[jax.Array] = collections.deque()
    clock: float | None = None  # None while a step may wait for the compiler.
    while history.step < last:
        # Steps are begun before the losses of those before them are read, so that the device never waits for the host.
        while begun < last and len(losses) <= IN_FLIGHT and not (losses and config.is_evaluated(begun)):
            batch = learner.place(functools.partial(_rows, draw, begun), (config.batch, length + 1))
            losses.append(learner.update(batch))
            begun += 1
        loss = float(losses.popleft())
        now = time.perf_counter()
        if clock is not None:
            history.seconds += now - clock
            history.timed_steps += 1
        clock = now
        history.training_loss.append(loss)
        if now > deadline:
            last = begun
        if config.is_evaluated(history.step) or history.step == last:
            history.held_out_loss.append((history.step, held_out_loss(learner, windows, config.batch)))
            save()
            clock = time.perf_counter()
        yield loss


def _rows(draw: Callable[..., np.ndarray], step: int, rows: slice) -> np.ndarray:
    return draw(step=step, rows=rows)
