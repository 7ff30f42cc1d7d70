"""Meshes with the axes `data`, `model` and, for ring attention, `seq`: what their sizes must fit, and batches."""

import dataclasses
import math
from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from examples.language_model.model import ModelConfig

DATA, MODEL, SEQUENCE = "data", "model", "seq"


@dataclasses.dataclass(frozen=True)
class MeshSizes:
    """Sizes of the axes.

    Attributes:
      data: Splits the batch, and what is stored of parameters and optimiser state.
      model: Splits heads, hidden features and vocabulary.
      sequence: Splits each window of text; a mesh has this axis only where it is larger than 1.
    """

    data: int
    model: int
    sequence: int = 1

    def __str__(self) -> str:
        return ",".join(f"{axis}={size}" for axis, size in self._axes().items())

    def _axes(self) -> dict[str, int]:
        axes = {DATA: self.data, MODEL: self.model}
        return axes | {SEQUENCE: self.sequence} if self.sequence > 1 else axes

    @classmethod
    def parse(cls, text: str) -> "MeshSizes":
        """Reads sizes such as ``data=2,model=4``; an axis that is not named has size 1.

        Args:
          text: Of a command line.

        Returns:
          The sizes.

        Raises:
          ValueError: For anything else.
        """
        sizes: dict[str, int] = {}
        for part in text.split(","):
            axis, _, size = part.partition("=")
            if axis not in (DATA, MODEL, SEQUENCE) or axis in sizes or not size.isdecimal() or int(size) == 0:
                raise ValueError(f"mesh: expected sizes such as {DATA}=2,{MODEL}=4, got {text!r}")
            sizes[axis] = int(size)
        return cls(sizes.get(DATA, 1), sizes.get(MODEL, 1), sizes.get(SEQUENCE, 1))

    @classmethod
    def default(cls, devices: int, kv_heads: int) -> "MeshSizes":
        """As large a model axis as leaves key and value heads whole, and the rest for data."""
        model = math.gcd(devices, kv_heads)
        return cls(devices // model, model)

    def check(self, devices: int, model_config: ModelConfig, batch: int) -> None:
        """Checks that everything the axes split is a multiple of their sizes.

        Args:
          devices: Of all processes.
          model_config: Size of the model.
          batch: Windows of text in a step.

        Raises:
          ValueError: If not; the message names the axis and what to change.
        """
        if (used := math.prod(self._axes().values())) != devices:
            raise ValueError(
                f"mesh: {self} takes {used} devices, but there are {devices}; choose sizes whose product is {devices}"
            )
        if batch % self.data:
            raise ValueError(
                f"batch: expected a multiple of the mesh axis {DATA}={self.data}, got {batch}; "
                f"take another batch, or a {DATA} axis that divides it"
            )
        config = model_config
        if config.width % self.data:
            raise ValueError(f"mesh: {DATA}={self.data} does not divide the {config.width} features of the parameters")
        for size, what in (
            (config.heads, "query heads"),
            (config.hidden, "hidden features"),
            (config.vocabulary, "tokens of the vocabulary"),
        ):
            if size % self.model:
                raise ValueError(
                    f"mesh: {MODEL}={self.model} does not divide the {size} {what}; take a smaller {MODEL} axis "
                    f"and a larger {DATA} axis"
                )
        if config.kv_heads % self.model and self.model % config.kv_heads:
            raise ValueError(
                f"mesh: {MODEL}={self.model} is neither a divisor nor a multiple of the {config.kv_heads} key and "
                f"value heads; take a {MODEL} axis that is"
            )

    def make(self, kind: AxisType) -> Mesh:
        """Makes the mesh of all devices.

        Args:
          kind: Of all axes.

        Returns:
          The mesh.
        """
        axes = self._axes()
        return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(kind,) * len(axes))


def place_batch(mesh: Mesh, read: Callable[[slice], np.ndarray], shape: tuple[int, int]) -> jax.Array:
    """Splits a batch over the data axis. Each process reads the rows of its own devices and no others.

    Args:
      mesh: The mesh.
      read: Reads some rows of the batch.
      shape: Of the whole batch.

    Returns:
      The batch.
    """

    def read_shard(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        return read(index[0])

    return jax.make_array_from_callback(shape, NamedSharding(mesh, PartitionSpec(DATA)), read_shard)
