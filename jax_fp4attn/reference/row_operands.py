"""What the backward needs of the query rows, from output, lse and their cotangents.

Factors are named as in :mod:`jax_fp4attn.reference.backward`.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from jax_fp4attn.config import LOG2_E, OperatorConfig
from jax_fp4attn.formats import E5M2, block_exponent, exp2_int, round_to, round_to_bfloat16
from jax_fp4attn.recipe import Recipe
from jax_fp4attn.reference.backward_operands import BackwardOperands, gradient_operand_values
from jax_fp4attn.reference.tiles import group_heads

_MAX_SCALE_BITS = 100  # keeps the product of all factors inside float32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowOperands:
    """Everything that belongs to query rows, float32, grouped by key/value head.

    Attributes:
      query: [B, K, G, T, H], carries m.
      output_gradient: [B, K, G, T, H], carries m g.
      row_statistic: [B, K, G, T], dlse - sum(O dO), carries m^2 g.
      lse_statistic: [B, K, G, T], l - corrected lse log2(e).
      contributes: bool [B, K, G, T], whether the row has a finite denominator.
      gradient_scale: g, [B, K, 1, 1, 1].
    """

    query: jax.Array
    output_gradient: jax.Array
    row_statistic: jax.Array
    lse_statistic: jax.Array
    contributes: jax.Array
    gradient_scale: jax.Array


def multiplier(recipe: Recipe) -> float:
    """Factor m of the E4M3 and E5M2 operands."""
    return recipe.backward_multiplier if recipe.backward == "fp8" else 1.0


def lift_bits(recipe: Recipe) -> int:
    """Lift l of the rebuilt probabilities."""
    return recipe.backward_p_lift_bits if recipe.backward == "fp8" else 0


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

    Args:
      config: Static arguments.
      lse: The forward's lse [B, N, T].
      output_gradient: float32 [B, N, T, H].
      lse_gradient: float32 [B, N, T].
      num_kv_heads: K.
      sequence_axis: The mesh axis over which the sequence is split; g is that of the whole sequence.

    Returns:
      float32 [B, K, 1, 1, 1]; ones for a recipe that takes cotangents as they come.
    """
    recipe = config.recipe
    shape = (lse.shape[0], num_kv_heads, 1, 1, 1)
    if recipe.backward != "fp8" or recipe.output_gradient_scale == "unit":
        return jnp.ones(shape, jnp.float32)
    d_output, d_lse = _contributing(lse, output_gradient, lse_gradient)
    row_amax = jnp.maximum(jnp.max(jnp.abs(d_output), axis=3), jnp.abs(d_lse))
    amax = jnp.max(group_heads(row_amax, num_kv_heads), axis=(2, 3))
    if sequence_axis is not None:
        amax = lax.pmax(amax, sequence_axis)
    exponent = jnp.clip(block_exponent(amax, "floor"), -_MAX_SCALE_BITS, _MAX_SCALE_BITS)
    return jnp.where(amax == 0, 1.0, exp2_int(-exponent)).reshape(shape)


def row_operands(
    config: OperatorConfig,
    operands: BackwardOperands,
    output: jax.Array,
    lse: jax.Array,
    output_gradient: jax.Array,
    lse_gradient: jax.Array,
    scale: jax.Array,
) -> RowOperands:
    """Prepares the rows of the backward.

    Args:
      config: Static arguments.
      operands: From :func:`jax_fp4attn.reference.quantize_for_backward`.
      output: The forward's output [B, N, T, H].
      lse: The forward's lse [B, N, T], of all keys.
      output_gradient: float32 [B, N, T, H] (H padded).
      lse_gradient: float32 [B, N, T].
      scale: From :func:`gradient_scale`.

    Returns:
      The rows' operands.
    """
    recipe = config.recipe
    num_kv_heads = operands.value.shape[1]
    m = multiplier(recipe)
    d_output, d_lse = (group_heads(x, num_kv_heads) for x in _contributing(lse, output_gradient, lse_gradient))
    lse, output = group_heads(lse, num_kv_heads), group_heads(output, num_kv_heads)
    contributes = ~jnp.isinf(lse)
    query = group_heads(gradient_operand_values(recipe, operands.query, operands.score_query), num_kv_heads)
    d_output = d_output * (m * scale)
    if recipe.backward == "fp8":
        d_output = round_to(d_output, E5M2)
    # From the rounded dO, so that the statistic cancels exactly what the product dO V^T contains.
    statistic = (m * m) * scale[..., 0] * d_lse
    statistic = statistic - m * jnp.sum(output * d_output, axis=-1)
    return RowOperands(
        query=jnp.where(contributes[..., None], query, 0.0),
        output_gradient=d_output,
        row_statistic=statistic,
        lse_statistic=lift_bits(recipe) - (jnp.where(contributes, lse, 0.0) + recipe.backward_lse_correction) * LOG2_E,
        contributes=contributes,
        gradient_scale=scale,
    )


def _contributing(lse: jax.Array, output_gradient: jax.Array, lse_gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cotangents, dO rounded to bfloat16. A row without a finite denominator has a constant output and none.

    The selects keep away what such a row and its cotangent hold.
    """
    contributes = ~jnp.isinf(lse)
    d_output = jnp.where(contributes[..., None], round_to_bfloat16(output_gradient), 0.0)
    return d_output, jnp.where(contributes, lse_gradient, 0.0)
