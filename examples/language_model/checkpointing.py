"""Checkpoints of a training: parameters, optimiser state and history, through Orbax."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from flax import nnx

from examples.language_model.training import History


class Checkpoints:
    """The checkpoints of one training; a context manager that waits for those being written.

    Args:
      directory: Where they are.
      settings: What the training depends on, as JSON values; a checkpoint of other settings is refused.
    """

    def __init__(self, directory: Path, settings: dict[str, Any]) -> None:
        self._directory = directory.absolute()
        self._settings = settings
        self._manager = ocp.CheckpointManager(self._directory, options=ocp.CheckpointManagerOptions(max_to_keep=2))

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self._manager.close()

    def clear(self) -> None:
        """Deletes all checkpoints."""
        for step in self._manager.all_steps():
            self._manager.delete(step)

    def save(self, model: nnx.Module, optimizer: nnx.Optimizer, history: History) -> None:
        """Writes a checkpoint, in the background.

        Args:
          model: The model.
          optimizer: Its optimiser.
          history: Of the training so far.
        """
        arguments = ocp.args.Composite(
            state=ocp.args.StandardSave(_state(model, optimizer)),
            history=ocp.args.JsonSave(dataclasses.asdict(history)),
            settings=ocp.args.JsonSave(self._settings),
        )
        self._manager.save(history.step, args=arguments)

    def restore_latest(self, model: nnx.Module, optimizer: nnx.Optimizer) -> History:
        """Puts the latest checkpoint's values into model and optimiser.

        Args:
          model: The model, updated in place.
          optimizer: Its optimiser, updated in place.

        Returns:
          History of the training so far; an empty one if there is no checkpoint.

        Raises:
          ValueError: If the checkpoint is of a training with other settings.
        """
        step = self._manager.latest_step()
        if step is None:
            return History()
        self._check_settings(step)
        abstract_state = jax.tree.map(ocp.utils.to_shape_dtype_struct, _state(model, optimizer))
        arguments = ocp.args.Composite(state=ocp.args.StandardRestore(abstract_state), history=ocp.args.JsonRestore())
        restored = self._manager.restore(step, args=arguments)
        nnx.update((model, optimizer), restored.state)
        return History(**restored.history)

    def _check_settings(self, step: int) -> None:
        arguments = ocp.args.Composite(settings=ocp.args.JsonRestore())
        saved = self._manager.restore(step, args=arguments).settings
        if differing := [name for name, value in self._settings.items() if saved.get(name) != value]:
            was = ", ".join(f"{name}={saved.get(name)}" for name in differing)
            raise ValueError(f"{self._directory} holds a training with {was}; resume with that, or start anew")


def _state(model: nnx.Module, optimizer: nnx.Optimizer) -> nnx.State:
    return nnx.state((model, optimizer))
