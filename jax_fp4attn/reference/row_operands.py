"""What the backward needs of the query rows, from output, lse and their cotangents.

Factors are named as in :mod:`jax_fp4attn.reference.backward`.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from jax_fp4attn.config import OperatorConfig
from jax_fp4attn.formats import E5M2, block_exponent, decode, encode, exp2_int, round_to_bfloat16
from jax_fp4attn.formats.reductions import max_magnitude, sum_of_neighbours
from jax_fp4attn.recipe import Recipe
from jax_fp4attn.reference.operands import head_major
from jax_fp4attn.reference.tiles import group_heads, pad_axis, padded_queries, ungroup_heads

_MAX_SCALE_BITS = 100  # keeps the product of all factors inside float32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowOperands:
    """What belongs to query rows and is not saved by the forward. H and T are padded with zeros to whole tiles.

    A row without a finite denominator contributes nothing: its entries are zero. Where g is NaN all entries are.

    Attributes:
      output_gradient: [B, N, T', H'], E5M2 bytes (uint8) of m g dO, or bfloat16; dP contracts over its channels.
      output_gradient_columns: [B, N, H', T'], the same transposed; dV contracts over its rows.
      row_statistic: float32 [B, N, T], dlse - sum(O dO), carries m^2 g.
    """

    output_gradient: jax.Array
    output_gradient_columns: jax.Array
    row_statistic: jax.Array


def multiplier(recipe: Recipe) -> float:
    """Factor m of the E4M3 and E5M2 operands."""
    return recipe.backward_multiplier if recipe.backward == "fp8" else 1.0


def lift_bits(recipe: Recipe) -> int:
    """Lift l of the rebuilt probabilities."""
    return recipe.backward_p_lift_bits if recipe.backward == "fp8" else 0


def contributing_rows(lse: jax.Array) -> jax.Array:
    """Rows with a finite denominator, bool; the others have a constant output."""
    return ~jnp.isinf(lse)


def gradient_scale(
    config: OperatorConfig,
    lse: jax.Array,
    output_gradient: jax.Array,
    lse_gradient: jax.Array,
    num_kv_heads: int,
    *,
    sequence_axis: str | None = None,
) -> jax.Array:
    """g: the power of two that brings the largest cotangent of each batch entry and kv head into [1, 2).

    Of a largest cotangent that is NaN, or infinite, or beyond the range of g, it is NaN, and so are the gradients: the
    conversion to E5M2 saturates, and would hide that a loss overflowed.

    Args:
      config: Static arguments.
      lse: The forward's lse [B, N, T].
      output_gradient: [B, T, N, H], bfloat16, or float32 that counts as rounded to bfloat16.
      lse_gradient: float32 [B, N, T].
      num_kv_heads: K.
      sequence_axis: The mesh axis over which the sequence is split; g is that of the whole sequence.

    Returns:
      float32 [B, K]; ones for a recipe that takes cotangents as they come, whatever they are.

    Example:
      >>> from jax_fp4attn import recipes
      >>> config = OperatorConfig(recipes.train, scale=0.125, is_causal=True, window=None)
      >>> zeros = jnp.zeros((1, 2, 8))
      >>> gradient_scale(config, zeros, jnp.full((1, 8, 2, 64), 0.3), zeros, 1).tolist()
      [[4.0]]
    """
    recipe = config.recipe
    if recipe.backward != "fp8" or recipe.output_gradient_scale == "unit":
        return jnp.ones((lse.shape[0], num_kv_heads), jnp.float32)
    # Rounding keeps the order of numbers, so it can wait for the maximum.
    row_amax = round_to_bfloat16(jnp.max(jnp.abs(output_gradient), axis=3))
    row_amax = jnp.maximum(jnp.swapaxes(row_amax, 1, 2), jnp.abs(lse_gradient))
    row_amax = jnp.where(contributing_rows(lse), row_amax, 0.0)
    amax = max_magnitude(group_heads(row_amax, num_kv_heads), axis=(2, 3))
    if sequence_axis is not None:
        # Of floats a maximum over devices may lose NaN; an infinity stands for both.
        amax = lax.pmax(jnp.where(amax < jnp.inf, amax, jnp.inf), sequence_axis)
    exponent = jnp.clip(block_exponent(amax, "floor"), -_MAX_SCALE_BITS, _MAX_SCALE_BITS)
    scale = jnp.where(amax == 0, 1.0, exp2_int(-exponent))
    return jnp.where(amax < 2.0 ** (_MAX_SCALE_BITS + 1), scale, jnp.nan)


def row_operands(
    config: OperatorConfig,
    output: jax.Array,
    lse: jax.Array,
    output_gradient: jax.Array,
    lse_gradient: jax.Array,
    scale: jax.Array,
) -> RowOperands:
    """Prepares the rows of the backward.

    Args:
      config: Static arguments.
      output: The forward's output, bfloat16 [B, T, N, H].
      lse: The forward's lse, float32 [B, N, T], of all keys.
      output_gradient: bfloat16 [B, T, N, H].
      lse_gradient: float32 [B, N, T].
      scale: From :func:`gradient_scale`.

    Returns:
      The rows' operands.

    Example:
      >>> from jax_fp4attn import recipes
      >>> config = OperatorConfig(recipes.train, scale=0.125, is_causal=True, window=None)
      >>> x, zeros = jnp.ones((1, 8, 2, 64), jnp.bfloat16), jnp.zeros((1, 2, 8))
      >>> rows = row_operands(config, x, zeros, x, zeros, jnp.ones((1, 1)))
      >>> rows.output_gradient.shape, rows.output_gradient_columns.shape, rows.row_statistic.shape
      ((1, 2, 128, 64), (1, 2, 64, 128), (1, 2, 8))
    """
    recipe = config.recipe
    m = multiplier(recipe)
    factor = _by_query_head(scale, lse.shape[1])
    num_queries = lse.shape[2]
    contributes = contributing_rows(lse)
    # The selects keep away what the rows without a finite denominator hold.
    rows, d_output = (jnp.where(contributes[..., None], head_major(x, None), 0.0) for x in (output, output_gradient))
    d_lse = jnp.where(contributes, lse_gradient, 0.0)
    published = _publish(recipe, pad_axis(d_output, 2, padded_queries(num_queries)) * (m * factor[..., None]))
    # From the rounded dO, so that the statistic cancels exactly what the product dO V^T contains.
    products = rows * output_gradient_values(recipe, published[:, :, :num_queries])
    return RowOperands(
        output_gradient=published,
        output_gradient_columns=jnp.swapaxes(published, 2, 3),
        row_statistic=(m * m) * factor * d_lse - m * sum_of_neighbours(products),
    )


def output_gradient_values(recipe: Recipe, published: jax.Array) -> jax.Array:
    """Float32 values of a published dO, carrying m g."""
    return decode(published, E5M2) if recipe.backward == "fp8" else published.astype(jnp.float32)


def _publish(recipe: Recipe, d_output: jax.Array) -> jax.Array:
    return encode(d_output, E5M2) if recipe.backward == "fp8" else d_output.astype(jnp.bfloat16)


def _by_query_head(scale: jax.Array, num_heads: int) -> jax.Array:
    """[B, K] to [B, N, 1]."""
    shape = (*scale.shape, num_heads // scale.shape[1], 1)
    return ungroup_heads(jnp.broadcast_to(scale[:, :, None, None], shape))
