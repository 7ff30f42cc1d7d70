"""Pytrees of arrays with a layout for each leaf, cut and joined along the sequence or the batch."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

PyTree = Any

BATCH_DIMENSION = 0


@dataclasses.dataclass(frozen=True)
class LaidOut:
    """A pytree of arrays and their layouts.

    Attributes:
      values: The arrays. The batch is their first dimension.
      layouts: A layout for each (see :class:`jax_fp4attn.transforms.Operation`), in a pytree of the same structure; an
        array without ``s`` belongs to every part of the sequence.
    """

    values: PyTree
    layouts: PyTree

    def along_sequence(self, function: Callable[[jax.Array, int], jax.Array]) -> "LaidOut":
        """Applies a function of an array and its sequence dimension to every array that has one."""
        values = jax.tree.map(
            lambda layout, x: function(x, layout.index("s")) if "s" in layout else x, self.layouts, self.values
        )
        return LaidOut(values, self.layouts)

    def halves(self) -> tuple["LaidOut", "LaidOut"]:
        """Both halves of the sequence."""
        first = self.along_sequence(lambda x, dimension: jnp.split(x, 2, dimension)[0])
        return first, self.along_sequence(lambda x, dimension: jnp.split(x, 2, dimension)[1])

    def join(self, other: "LaidOut") -> "LaidOut":
        """The two one after the other, along the sequence."""
        values = jax.tree.map(
            lambda layout, x, y: jnp.concatenate([x, y], layout.index("s")) if "s" in layout else x,
            self.layouts,
            self.values,
            other.values,
        )
        return LaidOut(values, self.layouts)

    def stack(self, other: "LaidOut") -> "LaidOut":
        """The two one after the other, along the batch."""
        return self._with(lambda x, y: jnp.concatenate([x, y], BATCH_DIMENSION), other)

    def unstack(self) -> tuple["LaidOut", "LaidOut"]:
        """Undoes :meth:`stack`."""
        pairs = jax.tree.map(lambda x: tuple(jnp.split(x, 2, BATCH_DIMENSION)), self.values)
        first, second = (jax.tree.map(lambda _, pair, i=i: pair[i], self.values, pairs) for i in range(2))
        return LaidOut(first, self.layouts), LaidOut(second, self.layouts)

    def where(self, condition: jax.Array, other: "LaidOut") -> "LaidOut":
        """This one if the condition, a scalar, holds, and the other one elsewhere."""
        return self._with(lambda x, y: jnp.where(condition, x, y), other)

    def _with(self, function: Callable[[jax.Array, jax.Array], jax.Array], other: "LaidOut") -> "LaidOut":
        return LaidOut(jax.tree.map(function, self.values, other.values), self.layouts)
