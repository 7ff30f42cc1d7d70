"""Attention to a part of the keys, and how two parts make one."""

import dataclasses

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PartialOutput:
    """Normalised output over some keys and the logarithm of their denominator.

    Attributes:
      output: float32 [B, N, T, H].
      lse: float32 [B, N, T], natural log; -inf where a row has seen nothing, +inf where its denominator overflowed.
    """

    output: jax.Array
    lse: jax.Array

    def merge(self, other: "PartialOutput") -> "PartialOutput":
        """Attention to both sets of keys.

        ``logaddexp`` and exponentials of differences give NaN where both are infinite. There the weights are 0: a row
        that has seen nothing keeps output 0 and lse -inf, one that overflowed output 0 and lse +inf.
        """
        largest = jnp.maximum(self.lse, other.lse)
        infinite = jnp.isinf(largest)
        shift = jnp.where(infinite, 0.0, largest)
        weight, other_weight = (jnp.where(infinite, 0.0, jnp.exp(x - shift)) for x in (self.lse, other.lse))
        total = jnp.where(infinite, 1.0, weight + other_weight)
        output = self.output * (weight / total)[..., None] + other.output * (other_weight / total)[..., None]
        return PartialOutput(output, jnp.where(infinite, largest, shift + jnp.log(total)))

    def where(self, condition: jax.Array) -> "PartialOutput":
        """This one if the condition, a scalar, holds, and attention to nothing elsewhere."""
        return PartialOutput(jnp.where(condition, self.output, 0.0), jnp.where(condition, self.lse, -jnp.inf))
