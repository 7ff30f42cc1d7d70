"""What the forward pass saves for the backward, besides output and lse."""

import dataclasses

import jax
import jax.numpy as jnp

from jax_fp4attn.config import OperatorConfig, Visibility
from jax_fp4attn.formats import E4M3, BlockScaled, decode, encode
from jax_fp4attn.recipe import Recipe
from jax_fp4attn.reference.masking import valid_keys, valid_queries
from jax_fp4attn.reference.operands import Operands, head_major, score_operand_values
from jax_fp4attn.reference.tiles import pad_axis, padded_keys


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BackwardOperands:
    """Operands of the backward. H and S are padded with zeros to whole tiles.

    Attributes:
      score_query: [B, N, T, H], the forward's query operand, from which scores are rebuilt.
      score_key: [B, K, S, H], the forward's key operand.
      query: [B, N, T, H] E4M3 bytes of ``backward_multiplier`` times the query, or bfloat16; None if it is rebuilt
        from ``score_query``.
      key: [B, K, S, H], likewise.
      value: [B, K, S, H] E4M3 bytes, or bfloat16.
    """

    score_query: BlockScaled | jax.Array
    score_key: BlockScaled | jax.Array
    query: jax.Array | None
    key: jax.Array | None
    value: jax.Array


def quantize_for_backward(
    config: OperatorConfig,
    operands: Operands,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    visibility: Visibility,
) -> BackwardOperands:
    """Builds the operands that the forward saves.

    Args:
      config: Static arguments.
      operands: The forward's operands; their codes are shared, not copied.
      query: [B, T, N, H].
      key: [B, S, K, H].
      value: [B, S, K, H].
      visibility: Run-time restrictions.

    Returns:
      The operands of :func:`jax_fp4attn.reference.backward`.
    """
    recipe = config.recipe
    query_rows = valid_queries(visibility, query.shape[1])
    key_rows = valid_keys(visibility, key.shape[1])
    slots = padded_keys(key.shape[1])

    def publish(x: jax.Array) -> jax.Array:
        if recipe.backward == "bf16":
            return x.astype(jnp.bfloat16)
        return encode(x * recipe.backward_multiplier, E4M3)

    rebuilt = recipe.backward_qk == "represented"
    return BackwardOperands(
        score_query=operands.query,
        score_key=operands.key,
        query=None if rebuilt else publish(head_major(query, query_rows)),
        key=None if rebuilt else publish(pad_axis(head_major(key, key_rows), 2, slots)),
        value=publish(pad_axis(head_major(value, key_rows), 2, slots)),
    )


def gradient_operand_values(
    recipe: Recipe, published: jax.Array | None, score_operand: BlockScaled | jax.Array
) -> jax.Array:
    """Float32 values of a gradient product's operand, carrying ``backward_multiplier`` when it is E4M3."""
    if published is None:
        values = score_operand_values(score_operand)
        if recipe.backward == "bf16":
            return values
        published = encode(values * recipe.backward_multiplier, E4M3)
    if recipe.backward == "bf16":
        return published.astype(jnp.float32)
    return decode(published, E4M3)
