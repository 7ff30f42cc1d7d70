"""What the backward reads of query, key and value, besides output and lse.

Of its five products, dK = dS^T Q and dQ = dS K contract over rows and read the E4M3 query and key, which therefore lie
along their rows; dP = dO V^T contracts over channels, along which the E4M3 value lies. The scores are rebuilt from the
forward's own operands.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jax_fp4attn.formats import E4M3, BlockScaled, decode, encode
from jax_fp4attn.recipe import Recipe
from jax_fp4attn.reference.operands import score_operand_values


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BackwardOperands:
    """Operands of the backward. H, S and T are padded with zeros to whole tiles, H', S' and T'.

    Attributes:
      score_query: [B, N, T, H'], the forward's query operand, from which scores are rebuilt.
      score_key: [B, K, S', H'], the forward's key operand.
      query: [B, N, H', T'], E4M3 bytes (uint8) of ``backward_multiplier`` times the query, or bfloat16; None if it is
        rebuilt from ``score_query``.
      key: [B, K, H', S'], likewise.
      value: [B, K, S', H'], E4M3 bytes (uint8) of ``backward_multiplier`` times the value, or bfloat16.
    """

    score_query: BlockScaled | jax.Array
    score_key: BlockScaled | jax.Array
    query: jax.Array | None
    key: jax.Array | None
    value: jax.Array


def publish(recipe: Recipe, x: jax.Array) -> jax.Array:
    """Float32 values in the format of a gradient product's operand."""
    if recipe.backward == "bf16":
        return x.astype(jnp.bfloat16)
    return encode(x * recipe.backward_multiplier, E4M3)


def published_values(recipe: Recipe, x: jax.Array) -> jax.Array:
    """Float32 values of a gradient product's operand, carrying ``backward_multiplier`` when it is E4M3."""
    return x.astype(jnp.float32) if recipe.backward == "bf16" else decode(x, E4M3)


def row_operand_values(
    recipe: Recipe, published: jax.Array | None, score_operand: BlockScaled | jax.Array
) -> jax.Array:
    """The same of the query or the key, with their rows before their channels.

    Args:
      recipe: The recipe.
      published: ``BackwardOperands.query`` or ``key``, or None.
      score_operand: ``BackwardOperands.score_query`` or ``score_key``.

    Returns:
      float32 [B, N, T, H'] or [B, K, S', H'].
    """
    if published is None:
        values = score_operand_values(score_operand)
        return values if recipe.backward == "bf16" else published_values(recipe, publish(recipe, values))
    rows = jnp.swapaxes(published_values(recipe, published), 2, 3)
    return rows[:, :, : score_operand.shape[2]]
