"""Everything that a training step quantises, so that a kernel reads query, key and value once."""

import dataclasses

import jax
import jax.numpy as jnp

from jax_fp4attn.config import OperatorConfig, Visibility
from jax_fp4attn.reference.backward_operands import BackwardOperands, publish
from jax_fp4attn.reference.operands import Operands, head_major_inputs, quantize_head_major
from jax_fp4attn.reference.tiles import pad_axis, padded_keys, padded_queries


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainingOperands:
    """Operands of the forward and of the backward, each array once.

    Attributes:
      forward: Operands of the forward; the backward rebuilds scores from its query and key.
      query: [B, N, H', T'], see :class:`jax_fp4attn.reference.BackwardOperands`; None if it is rebuilt.
      key: [B, K, H', S'], likewise.
      value: [B, K, S', H'].

    Example:
      >>> from jax_fp4attn import recipes
      >>> config = OperatorConfig(recipes.train, scale=0.125, is_causal=True, window=None)
      >>> x = jnp.ones((1, 200, 2, 64), jnp.bfloat16)
      >>> operands = quantize_for_training(config, x, x, x, Visibility())
      >>> operands.query.shape, operands.value.shape
      ((1, 2, 64, 256), (1, 2, 256, 64))
      >>> operands.for_backward().score_query is operands.forward.query
      True
    """

    forward: Operands
    query: jax.Array | None
    key: jax.Array | None
    value: jax.Array

    def for_backward(self) -> BackwardOperands:
        """What the forward saves for the backward."""
        return BackwardOperands(
            score_query=self.forward.query,
            score_key=self.forward.key,
            query=self.query,
            key=self.key,
            value=self.value,
        )


def quantize_for_training(
    config: OperatorConfig,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    visibility: Visibility,
    *,
    sequence_axis: str | None = None,
) -> TrainingOperands:
    """Quantises query, key and value for the forward and for the backward.

    Args:
      config: Static arguments.
      query: [B, T, N, H], bfloat16 or float32 (rounded to bfloat16 first).
      key: [B, S, K, H].
      value: [B, S, K, H].
      visibility: Run-time restrictions; rows and keys that see or are seen by nobody become zero.
      sequence_axis: The mesh axis over which the sequence is split; tensor scales are those of the whole sequence.

    Returns:
      The operands; their ``forward`` is that of :func:`jax_fp4attn.reference.quantize_operands`.
    """
    recipe = config.recipe
    inputs = head_major_inputs(query, key, value, visibility)
    slots = padded_keys(key.shape[1])

    def along_rows(x: jax.Array, length: int) -> jax.Array | None:
        if recipe.backward_qk == "represented":
            return None
        return publish(recipe, jnp.swapaxes(pad_axis(x, 2, length), 2, 3))

    return TrainingOperands(
        forward=quantize_head_major(recipe, inputs, sequence_axis),
        query=along_rows(inputs.query, padded_queries(query.shape[1])),
        key=along_rows(inputs.key, slots),
        value=publish(recipe, pad_axis(inputs.value, 2, slots)),
    )
