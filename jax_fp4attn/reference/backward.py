"""The backward pass: P is rebuilt from the saved query and key operands and the lse.

Scale factors that a quantity carries are written as in docs/numerics.md: m is ``backward_multiplier``, 2**l the lift of
P, g the power of two applied to dO.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from jax_fp4attn.config import LOG2_E, OperatorConfig, Visibility
from jax_fp4attn.formats import E4M3, round_to, round_to_bfloat16
from jax_fp4attn.recipe import Recipe
from jax_fp4attn.reference.backward_operands import BackwardOperands, published_values, row_operand_values
from jax_fp4attn.reference.operands import score_operand_values
from jax_fp4attn.reference.row_operands import (
    RowOperands,
    contributing_rows,
    lift_bits,
    multiplier,
    output_gradient_values,
)
from jax_fp4attn.reference.scores import ScoreTile
from jax_fp4attn.reference.tiles import group_heads, key_positions, split_keys, ungroup_heads, zeros_for_carry


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Gradients:
    """Gradients with respect to the inputs, float32.

    Attributes:
      query: [B, N, T, H] with bfloat16 values (H padded).
      key: [B, K, S, H] with bfloat16 values (H and S padded).
      value: [B, K, S, H] with bfloat16 values (H and S padded).
      bias: Of the bias's shape, or None.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    bias: jax.Array | None


def backward(
    config: OperatorConfig,
    operands: BackwardOperands,
    rows: RowOperands,
    lse: jax.Array,
    gradient_scale: jax.Array,
    bias: jax.Array | None,
    visibility: Visibility,
    *,
    num_keys: int,
) -> Gradients:
    """Gradients of the operator, straight through every quantiser.

    Args:
      config: Static arguments.
      operands: From :meth:`jax_fp4attn.reference.TrainingOperands.for_backward`.
      rows: From :func:`jax_fp4attn.reference.row_operands`.
      lse: The forward's lse, float32 [B, N, T].
      gradient_scale: From :func:`jax_fp4attn.reference.gradient_scale`, [B, K].
      bias: float32, broadcastable to [B, N, T, S], or None.
      visibility: Run-time restrictions.
      num_keys: S, without padding.

    Returns:
      True gradients (no factor left in). Rows that see nothing, and keys that nobody sees, have gradient 0.
    """
    gradients = partial_gradients(config, operands, rows, lse, gradient_scale, bias, visibility, num_keys=num_keys)
    return finish_gradients(config, gradient_scale, gradients)


def partial_gradients(
    config: OperatorConfig,
    operands: BackwardOperands,
    rows: RowOperands,
    lse: jax.Array,
    gradient_scale: jax.Array,
    bias: jax.Array | None,
    visibility: Visibility,
    *,
    num_keys: int,
) -> Gradients:
    """Contribution of a part of the keys to dQ, and of a part of the queries to dK and dV.

    Args:
      config: Static arguments.
      operands: From :meth:`jax_fp4attn.reference.TrainingOperands.for_backward`.
      rows: From :func:`jax_fp4attn.reference.row_operands`.
      lse: The forward's lse of all keys, float32 [B, N, T].
      gradient_scale: From :func:`jax_fp4attn.reference.gradient_scale`, [B, K].
      bias: float32, broadcastable to [B, N, T, S], or None.
      visibility: Run-time restrictions.
      num_keys: S, without padding.

    Returns:
      Gradients, to be added up and given to :func:`finish_gradients`. All but that of the bias carry 2**l m g.
    """
    recipe = config.recipe
    score_key = score_operand_values(operands.score_key)
    num_kv_heads = score_key.shape[1]
    score_query = group_heads(score_operand_values(operands.score_query), num_kv_heads)
    score_tile = ScoreTile(config, score_query, bias, visibility, num_keys)
    row_values = _row_values(recipe, operands, rows, lse, num_kv_heads)
    lift = 2.0 ** lift_bits(recipe)

    def step(
        query_gradient: jax.Array, tile: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array | None]]:
        score_keys, key, value, positions = tile
        raw, visible = score_tile(score_keys, positions)
        p, score_gradient = _tile_gradients(config, row_values, raw, visible, value)
        d_value = _einsum("bkgts,bkgth->bksh", p, row_values.output_gradient)
        rounded = _round_score_gradient(recipe, score_gradient * config.scale)
        d_key = _einsum("bkgts,bkgth->bksh", rounded, row_values.query)
        query_gradient = query_gradient + _einsum("bkgts,bksh->bkgth", rounded, key)
        if recipe.dq_accumulation == "bfloat16_per_tile":
            query_gradient = round_to_bfloat16(query_gradient)
        d_bias = None
        if bias is not None:
            d_bias = _sum_to(ungroup_heads(score_gradient / (lift * gradient_scale[:, :, None, None, None])), bias)
        return query_gradient, (d_key, d_value, d_bias)

    tiles = (
        split_keys(score_key, axis=2),
        split_keys(row_operand_values(recipe, operands.key, operands.score_key), axis=2),
        split_keys(published_values(recipe, operands.value), axis=2),
        key_positions(num_keys),
    )
    start = zeros_for_carry(row_values.query.shape, operands, rows, lse, gradient_scale, bias, visibility)
    query_gradient, (d_key, d_value, d_bias) = lax.scan(step, start, tiles)
    return Gradients(
        query=ungroup_heads(query_gradient),
        key=_join_keys(d_key),
        value=_join_keys(d_value),
        bias=None if bias is None or d_bias is None else _join_bias(d_bias, bias, num_keys),
    )


def finish_gradients(config: OperatorConfig, gradient_scale: jax.Array, gradients: Gradients) -> Gradients:
    """Takes the factors out of summed gradients and rounds them.

    Args:
      config: Static arguments.
      gradient_scale: From :func:`jax_fp4attn.reference.gradient_scale`, [B, K].
      gradients: The sum of what :func:`partial_gradients` returned.

    Returns:
      True gradients.
    """
    recipe = config.recipe
    unit = 1.0 / (2.0 ** lift_bits(recipe) * multiplier(recipe) * gradient_scale[:, :, None, None, None])
    d_query = group_heads(gradients.query, unit.shape[1])
    return Gradients(
        query=ungroup_heads(round_to_bfloat16(d_query * unit)),
        key=round_to_bfloat16(gradients.key * unit[:, :, 0]),
        value=round_to_bfloat16(gradients.value * unit[:, :, 0]),
        bias=gradients.bias,
    )


@dataclasses.dataclass(frozen=True)
class _RowValues:
    """Float32 values of query rows, grouped by key/value head: [B, K, G, T, H] and [B, K, G, T]."""

    query: jax.Array  # carries m
    output_gradient: jax.Array  # carries m g
    row_statistic: jax.Array  # carries m^2 g
    lse_statistic: jax.Array  # l - corrected lse log2(e)
    contributes: jax.Array  # bool


def _row_values(
    recipe: Recipe, operands: BackwardOperands, rows: RowOperands, lse: jax.Array, num_kv_heads: int
) -> _RowValues:
    contributes = contributing_rows(lse)
    query = row_operand_values(recipe, operands.query, operands.score_query)
    corrected = jnp.where(contributes, lse, 0.0) + recipe.backward_lse_correction
    values = (
        jnp.where(contributes[..., None], query, 0.0),
        output_gradient_values(recipe, rows.output_gradient[:, :, : lse.shape[2]]),
        rows.row_statistic,
        lift_bits(recipe) - corrected * LOG2_E,
        contributes,
    )
    return _RowValues(*(group_heads(x, num_kv_heads) for x in values))


def _tile_gradients(
    config: OperatorConfig,
    rows: _RowValues,
    raw: jax.Array,
    visible: jax.Array,
    value: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """P (carrying 2**l) and the gradient of the natural-log scores (carrying 2**l g), [B, K, G, T, 128]."""
    recipe = config.recipe
    lift = lift_bits(recipe)
    log_p = raw * config.log2_scale + rows.lse_statistic[..., None]
    p = jnp.exp2(jnp.minimum(log_p, lift))
    p = round_to(p, E4M3) if recipe.backward == "fp8" else round_to_bfloat16(p)
    contributes = visible & rows.contributes[..., None]
    p = jnp.where(contributes, p, 0.0)
    d_p = _einsum("bkgth,bksh->bkgts", rows.output_gradient, value)
    centred = (d_p + rows.row_statistic[..., None]) * p
    score_gradient = centred * (1.0 / multiplier(recipe) ** 2)
    return p, jnp.where(contributes, score_gradient, 0.0)


def _round_score_gradient(recipe: Recipe, score_gradient: jax.Array) -> jax.Array:
    if recipe.backward == "fp8":
        return round_to(score_gradient, E4M3)
    return round_to_bfloat16(score_gradient)


def _einsum(spec: str, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.einsum(spec, x, y, precision=lax.Precision.HIGHEST)


def _join_keys(tiles: jax.Array) -> jax.Array:
    """[tiles, B, K, 128, H] to [B, K, S, H]."""
    joined = jnp.moveaxis(tiles, 0, 2)
    return joined.reshape(*joined.shape[:2], -1, joined.shape[-1])


def _sum_to(x: jax.Array, bias: jax.Array) -> jax.Array:
    """Sums [B, N, T, 128] over the axes that the bias broadcasts."""
    axes = tuple(axis for axis in range(4) if bias.shape[axis] == 1)
    return jnp.sum(x, axis=axes, keepdims=True)


def _join_bias(tiles: jax.Array, bias: jax.Array, num_keys: int) -> jax.Array:
    """[tiles, ..., 128 or 1] to the bias's shape."""
    if bias.shape[-1] == 1:
        return jnp.sum(tiles, axis=0)
    joined = jnp.moveaxis(tiles, 0, -2)
    return joined.reshape(*joined.shape[:-2], -1)[..., :num_keys]
