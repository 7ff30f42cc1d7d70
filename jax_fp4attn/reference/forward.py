"""The forward pass, tile by tile over the keys."""

import jax
import jax.numpy as jnp
from jax import lax

from jax_fp4attn.config import LN_2, OperatorConfig, Visibility
from jax_fp4attn.formats import round_to_bfloat16
from jax_fp4attn.reference import direct_p, online_softmax
from jax_fp4attn.reference.operands import Operands, score_operand_values, value_operand_values
from jax_fp4attn.reference.scores import ScoreTile
from jax_fp4attn.reference.tiles import (
    group_heads,
    key_order,
    key_positions,
    split_keys,
    ungroup_heads,
    zeros_for_carry,
)

_MXFP4_UNIT = 1.0 / 36.0  # 1/6 of P times 1/6 of V, which the products leave out


def forward(
    config: OperatorConfig,
    operands: Operands,
    bias: jax.Array | None,
    visibility: Visibility,
    *,
    num_keys: int,
) -> tuple[jax.Array, jax.Array]:
    """Attention output and log-sum-exp from quantised operands.

    Args:
      config: Static arguments.
      operands: From :func:`jax_fp4attn.reference.quantize_operands`.
      bias: float32, broadcastable to [B, N, T, S], or None.
      visibility: Run-time restrictions.
      num_keys: S, without padding.

    Returns:
      What :func:`partial_forward` does, with bfloat16 values in the output.
    """
    output, lse = partial_forward(config, operands, bias, visibility, num_keys=num_keys)
    return round_to_bfloat16(output), lse


def partial_forward(
    config: OperatorConfig,
    operands: Operands,
    bias: jax.Array | None,
    visibility: Visibility,
    *,
    num_keys: int,
) -> tuple[jax.Array, jax.Array]:
    """Attention to a part of the keys, to be merged with attention to others.

    Args:
      config: Static arguments.
      operands: From :func:`jax_fp4attn.reference.quantize_operands`.
      bias: float32, broadcastable to [B, N, T, S], or None.
      visibility: Run-time restrictions.
      num_keys: S, without padding.

    Returns:
      Output, float32 [B, N, T, H] (H padded), and lse, float32 [B, N, T], natural log. A row that
      sees nothing has output 0 and lse -inf. A row whose Direct-P denominator leaves float32's range has output 0 and
      lse -inf (underflow) or +inf (overflow). NaN in a visible operand gives NaN.
    """
    recipe = config.recipe
    key = score_operand_values(operands.key)
    order = key_order(recipe, num_keys)
    if order is not None:
        key = key.at[:, :, :num_keys].set(key[:, :, order])
    query = group_heads(score_operand_values(operands.query), key.shape[1])
    score_tile = ScoreTile(config, query, bias, visibility, num_keys)
    tiles = (
        split_keys(key, axis=2),
        split_keys(value_operand_values(recipe, operands.value), axis=2),
        key_positions(num_keys, order),
    )
    walk = _direct_p if recipe.p_format == "mxfp4" else _online
    accumulator, denominator, log2_offset = walk(score_tile, tiles)
    unit = _MXFP4_UNIT if recipe.p_format == "mxfp4" else 1.0 / recipe.v_multiplier
    output, lse = _normalize(unit, accumulator, denominator, log2_offset)
    return ungroup_heads(output), ungroup_heads(lse)


_Tiles = tuple[jax.Array, jax.Array, jax.Array]


def _direct_p(score_tile: ScoreTile, tiles: _Tiles) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Unnormalised output, denominator and base-2 offset of the denominator, without a running maximum."""
    config, query = score_tile.config, score_tile.query
    rows = query.shape[:-1]
    ref = jnp.zeros(rows, jnp.float32)
    if config.recipe.row_reference == "anchor":
        first_keys, _, first_positions = (tile[0] for tile in tiles)
        leading = slice(None, config.recipe.anchor_keys)
        raw, _ = score_tile(first_keys[:, :, leading], first_positions[leading])
        ref = direct_p.anchor_reference(config, raw)

    def step(carry: tuple[jax.Array, jax.Array], tile: _Tiles) -> tuple[tuple[jax.Array, jax.Array], None]:
        accumulator, denominator = carry
        key, value, positions = tile
        raw, _ = score_tile(key, positions)
        scaled_codes, increment = direct_p.probability_tile(config, raw, ref)
        return (accumulator + _product(scaled_codes, value), denominator + increment), None

    varying = (query, tiles, score_tile.bias, score_tile.visibility)
    start = (zeros_for_carry(query.shape, varying), zeros_for_carry(rows, varying))
    (accumulator, denominator), _ = lax.scan(step, start, tiles)
    return accumulator, denominator, ref * config.log2_scale + config.recipe.p_scale_shift


def _online(score_tile: ScoreTile, tiles: _Tiles) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The same with a running maximum."""
    config, query = score_tile.config, score_tile.query
    rows = query.shape[:-1]
    _Carry = tuple[jax.Array, jax.Array, jax.Array]

    def step(carry: _Carry, tile: _Tiles) -> tuple[_Carry, None]:
        accumulator, denominator, row_max = carry
        key, value, positions = tile
        raw, _ = score_tile(key, positions)
        p = online_softmax.probability_tile(config, raw, row_max)
        accumulator = accumulator * p.correction[..., None] + _product(p.values, value)
        return (accumulator, denominator * p.correction + p.row_sum, p.row_max), None

    varying = (query, tiles, score_tile.bias, score_tile.visibility)
    row_zeros = zeros_for_carry(rows, varying)
    start = (zeros_for_carry(query.shape, varying), row_zeros, row_zeros - jnp.inf)
    (accumulator, denominator, row_max), _ = lax.scan(step, start, tiles)
    return accumulator, denominator, jnp.where(row_max == -jnp.inf, 0.0, row_max) * config.log2_scale


def _product(p: jax.Array, value: jax.Array) -> jax.Array:
    return jnp.einsum("bkgts,bksh->bkgth", p, value, precision=lax.Precision.HIGHEST)


def _normalize(
    unit: float, accumulator: jax.Array, denominator: jax.Array, log2_offset: jax.Array
) -> tuple[jax.Array, jax.Array]:
    out_of_range = (denominator == 0) | (denominator == jnp.inf)
    safe = jnp.where(out_of_range, 1.0, denominator)
    output = accumulator * (unit / safe)[..., None]
    lse = LN_2 * (log2_offset + jnp.log2(safe))
    lse = jnp.where(denominator == 0, -jnp.inf, jnp.where(denominator == jnp.inf, jnp.inf, lse))
    return jnp.where(out_of_range[..., None], 0.0, output), lse
