"""Trains the language model with parameters and optimiser state split over a mesh, on one process or many.

The mesh is automatic: arrays are placed, and the compiler finds the communication. It has two axes. Along `data` the
batch is split, and parameters are stored split and gathered for a step (FSDP); along `model` heads, hidden features and
vocabulary are split (tensor parallel). A third one, `seq`, splits the sequence: every device holds its part of each
window in zigzag order, and keys and values travel around a ring (`--mesh data=2,seq=4`).

Eight virtual devices, compared with one:

    python -m examples.train_sharded_language_model --devices 8 --mesh data=4,model=2 --compare

Two processes of four devices each; on GPUs leave out --devices, under Slurm or Open MPI pass just --cluster:

    python -m examples.train_sharded_language_model --devices 4 \
        --coordinator 127.0.0.1:1234 --num-processes 2 --process-id 0 &
    python -m examples.train_sharded_language_model --devices 4 \
        --coordinator 127.0.0.1:1234 --num-processes 2 --process-id 1
"""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from examples.language_model import mesh_training
from examples.language_model.meshes import DATA, SEQUENCE, place_batch
from examples.language_model.model import ModelConfig, cast_kernels
from examples.language_model.sharding import computing_shardings, create_sharded, stored_shardings
from examples.language_model.training import TrainingConfig, mean_loss, train_step
from jax_fp4attn import Recipe, zigzag_order


class ShardedLearner:
    """The language model and its optimiser, split over a mesh.

    Args:
      model_config: Size of the model.
      config: Settings of the training.
      recipe: Of attention.
      mesh: With automatic axes `data`, `model` and, to split the sequence, `seq`.

    Attributes:
      state: Parameters and optimiser state.
    """

    def __init__(self, model_config: ModelConfig, config: TrainingConfig, recipe: Recipe, mesh: Mesh) -> None:
        def create() -> tuple[nnx.Module, nnx.Optimizer]:
            learner = mesh_training.one_device_learner(model_config, config, recipe)
            return learner.model, learner.optimizer

        if SEQUENCE in mesh.axis_names:
            model_config = dataclasses.replace(model_config, context_axis=SEQUENCE)
        self._mesh = mesh
        self.state = create_sharded(lambda: nnx.state(create()), mesh)
        structure, shapes = nnx.split(nnx.eval_shape(create))
        stored = stored_shardings(shapes, mesh)
        replicated = NamedSharding(mesh, PartitionSpec())

        def loss(model: nnx.Module, windows: jax.Array) -> jax.Array:
            structure, parameters = nnx.split(cast_kernels(model))
            # Without the first constraint the compiler may as well gather float32 parameters, without the second one
            # the batch, and leave the parameters split.
            split = jax.lax.with_sharding_constraint(parameters, stored[0])
            gathered = jax.lax.with_sharding_constraint(split, computing_shardings(stored[0]))
            return mean_loss(nnx.merge(structure, gathered), *_split_windows(windows, mesh))

        def update(state: nnx.State, windows: jax.Array) -> tuple[nnx.State, jax.Array]:
            model, optimizer = nnx.merge(structure, state)
            value = train_step(model, optimizer, windows, loss)
            return nnx.state((model, optimizer)), value

        def evaluate(state: nnx.State, windows: jax.Array) -> jax.Array:
            return loss(nnx.merge(structure, state)[0], windows)

        self._update = jax.jit(update, out_shardings=(stored, replicated), donate_argnums=0)
        self._evaluate = jax.jit(evaluate, out_shardings=replicated)

    def lower(self, windows: jax.Array) -> jax.stages.Lowered:
        """The program of a step, for what it communicates."""
        with jax.set_mesh(self._mesh):
            return self._update.lower(self.state, windows)

    def place(self, read: Callable[[slice], np.ndarray], shape: tuple[int, int]) -> jax.Array:
        return place_batch(self._mesh, read, shape)

    def update(self, windows: jax.Array) -> jax.Array:
        with jax.set_mesh(self._mesh):
            self.state, loss = self._update(self.state, windows)
        return loss

    def loss(self, windows: jax.Array) -> jax.Array:
        with jax.set_mesh(self._mesh):
            return self._evaluate(self.state, windows)


def _split_windows(windows: jax.Array, mesh: Mesh) -> tuple[jax.Array, jax.Array]:
    """Tokens and targets of int [B, T + 1], each split over the sequence if the mesh splits it.

    In zigzag order, so that all devices have the same work and nothing is exchanged in the attention layers.
    """
    tokens, targets = windows[:, :-1], windows[:, 1:]
    if SEQUENCE not in mesh.axis_names:
        return tokens, targets
    order = zigzag_order(tokens.shape[1], mesh.shape[SEQUENCE])
    split = NamedSharding(mesh, PartitionSpec(DATA, SEQUENCE))
    return jax.lax.with_sharding_constraint((tokens[:, order], targets[:, order]), split)


def main(arguments: Sequence[str] | None = None, *, model_config: ModelConfig | None = None) -> None:
    """Runs the example.

    Args:
      arguments: Command line; None for the process's own.
      model_config: Size of the model; None for that of ``make demo``.
    """
    mesh_training.main(
        arguments,
        name="automatic mesh",
        description="Trains the language model with parameters and optimiser state split over a mesh.",
        kind=AxisType.Auto,
        make_learner=ShardedLearner,
        out=Path("out/sharded_language_model"),
        model_config=model_config or ModelConfig(),
    )


if __name__ == "__main__":
    main()
