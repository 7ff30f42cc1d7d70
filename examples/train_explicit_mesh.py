"""Trains the language model on a mesh with explicit axes, where the sharding of an array is part of its type.

What `examples.train_sharded_language_model` leaves to the compiler is written out here, in the functions of
`examples/language_model/explicit_model.py`, and checked while they are traced: where parameters are gathered, where a
product sums over shards, and that attention gets its batch split over `data` and its heads over `model`. Parameters,
data, losses and the command line are the same.

    python -m examples.train_explicit_mesh --devices 8 --mesh data=4,model=2 --compare
"""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh

from examples.language_model import mesh_training
from examples.language_model.explicit_model import mean_loss
from examples.language_model.meshes import SEQUENCE, place_batch
from examples.language_model.model import LanguageModel, ModelConfig
from examples.language_model.sharding import create_sharded
from examples.language_model.training import TrainingConfig, make_transformation
from jax_fp4attn import Recipe

State = tuple[Any, Any]


class ExplicitLearner:
    """The parameters of the language model and the optimiser state, split over a mesh.

    Args:
      model_config: Size of the model.
      config: Settings of the training.
      recipe: Of attention.
      mesh: With explicit axes `data` and `model`.

    Attributes:
      state: Parameters and optimiser state.

    Raises:
      NotImplementedError: If the mesh has an axis `seq`.
    """

    def __init__(self, model_config: ModelConfig, config: TrainingConfig, recipe: Recipe, mesh: Mesh) -> None:
        if SEQUENCE in mesh.axis_names:
            raise NotImplementedError(
                f"mesh: axis {SEQUENCE} is not written out here, where the types of all activations would have to name "
                "it; train_sharded_language_model splits the sequence"
            )
        transformation = make_transformation(config)
        loss = functools.partial(mean_loss, recipe=recipe)

        def create() -> State:
            model = LanguageModel(model_config, recipe=recipe, rngs=nnx.Rngs(config.seed))
            parameters = nnx.to_pure_dict(nnx.state(model, nnx.Param))
            return parameters, transformation.init(parameters)

        def update(state: State, windows: jax.Array) -> tuple[State, jax.Array]:
            parameters, optimizer_state = state
            value, gradients = jax.value_and_grad(loss)(parameters, windows)
            updates, optimizer_state = transformation.update(gradients, optimizer_state, parameters)
            return (optax.apply_updates(parameters, updates), optimizer_state), value

        def evaluate(state: State, windows: jax.Array) -> jax.Array:
            return loss(state[0], windows)

        self._mesh = mesh
        self.state = create_sharded(create, mesh)
        # No shardings here: the types of the arguments have them, and those of the results follow.
        self._update = jax.jit(update, donate_argnums=0)
        self._evaluate = jax.jit(evaluate)

    def place(self, read: Callable[[slice], np.ndarray], shape: tuple[int, int]) -> jax.Array:
        return place_batch(self._mesh, read, shape)

    def update(self, windows: jax.Array) -> jax.Array:
        with jax.set_mesh(self._mesh):
            self.state, loss = self._update(self.state, windows)
        return loss

    def loss(self, windows: jax.Array) -> jax.Array:
        with jax.set_mesh(self._mesh):
            return self._evaluate(self.state, windows)


def main(arguments: Sequence[str] | None = None, *, model_config: ModelConfig | None = None) -> None:
    """Runs the example.

    Args:
      arguments: Command line; None for the process's own.
      model_config: Size of the model; None for that of ``make demo``.
    """
    mesh_training.main(
        arguments,
        name="explicit mesh",
        description="Trains the language model on a mesh with explicit axes.",
        kind=AxisType.Explicit,
        make_learner=ExplicitLearner,
        out=Path("out/explicit_mesh"),
        model_config=model_config or ModelConfig(),
    )


if __name__ == "__main__":
    main()
