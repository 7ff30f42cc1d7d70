"""Direct-P: probabilities as E2M1 codes with power-of-two scales, straight from the scores.

Symbols: ``ref`` is the row reference in raw-score units, L the recipe's scale shift. A block is a quarter of a key tile
(32 keys of one row). There is no running maximum and the output is never rescaled.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from jax_fp4attn.config import LN_2, OperatorConfig
from jax_fp4attn.formats import E2M1, decode_e8m0, round_to
from jax_fp4attn.recipe import Recipe
from jax_fp4attn.reference.code_maps import apply_schedule
from jax_fp4attn.reference.tiles import QUARTER

_LOG2_SIX = 2.584962500721156
_BIAS = 127
_NAN_BYTE = 255
_SIXTH = 1.0 / 6.0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EncodedTile:
    """P of a key tile as the second product reads it.

    Attributes:
      codes: Values of the E2M1 codes [..., T, 4, 32].
      scales: E8M0 bytes [..., T, 4], lowered by 2**L, of six times the probability.
    """

    codes: jax.Array
    scales: jax.Array


def encode_tile(config: OperatorConfig, raw: jax.Array, ref: jax.Array) -> EncodedTile:
    """Codes and scales of one key tile.

    Args:
      config: Static arguments; the recipe's ``p_format`` is ``"mxfp4"``.
      raw: Raw scores [..., T, 128], -inf where masked.
      ref: Row reference [..., T], finite.

    Returns:
      The tile.
    """
    recipe = config.recipe
    quarters = raw.reshape(*raw.shape[:-1], -1, QUARTER)
    # XLA:CPU may lose a NaN in a maximum, even with zero, but not in a comparison and a select.
    block_max = jnp.where(jnp.any(jnp.isnan(quarters), axis=-1), jnp.nan, jnp.max(quarters, axis=-1))
    byte = _scale_byte(config, block_max, ref[..., None])
    shift = recipe.p_scale_shift
    working = jnp.maximum(byte, shift + 1)
    stored = jnp.where(byte == _NAN_BYTE, byte, jnp.where(byte > shift, byte - shift, 1))
    bias = (_LOG2_SIX - (working - _BIAS).astype(jnp.float32)) - ref[..., None] * config.log2_scale
    assert recipe.code_map is not None
    payload = apply_schedule(recipe.code_map, quarters, config.log2_scale, bias[..., None])
    return EncodedTile(round_to(jnp.where(payload < 0, 0.0, payload), E2M1), stored)


def probability_tile(config: OperatorConfig, raw: jax.Array, ref: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Codes times scales of one key tile, and its part of the denominator.

    Args:
      config: Static arguments; the recipe's ``p_format`` is ``"mxfp4"``.
      raw: Raw scores [..., T, 128], -inf where masked.
      ref: Row reference [..., T], finite.

    Returns:
      ``alpha * code`` [..., T, 128], six times the represented probability (lowered by 2**L), and the denominator's
      increment [..., T] (lowered by 2**L).
    """
    tile = encode_tile(config, raw, ref)
    alpha = decode_e8m0(tile.scales)
    scaled = (alpha[..., None] * tile.codes).reshape(raw.shape)
    return scaled, _denominator(config, raw, ref, tile.codes, alpha)


def _scale_byte(config: OperatorConfig, block_max: jax.Array, ref: jax.Array) -> jax.Array:
    """E8M0 byte of a block from its largest score, before the shift; 0 for a masked block, 255 for NaN."""
    rule = config.recipe.p_exponent_rule
    log_max = (block_max - ref) * config.log2_scale
    if rule == "ceil":
        exponent = jnp.ceil(log_max)
    else:
        exponent = jnp.floor(log_max + (1.0 - math.log2(rule)))
    # Clamp before the conversion: a float that does not fit an integer has no defined result.
    byte = jnp.clip(exponent, -_BIAS, _BIAS).astype(jnp.int32) + _BIAS
    return jnp.where(jnp.isnan(log_max), _NAN_BYTE, byte)


def _denominator(
    config: OperatorConfig, raw: jax.Array, ref: jax.Array, codes: jax.Array, alpha: jax.Array
) -> jax.Array:
    recipe = config.recipe
    if recipe.denominator == "represented":
        return jnp.sum(alpha * (jnp.sum(codes, axis=-1) * _SIXTH), axis=-1)
    bias = ref * config.log2_scale + recipe.p_scale_shift
    exponentials = jnp.exp2(raw * config.log2_scale - bias[..., None])
    if recipe.denominator == "unquantized":
        return jnp.sum(exponentials, axis=-1)
    return _sampled_sum(exponentials)


def _sampled_sum(exponentials: jax.Array) -> jax.Array:
    """Eight times the sum over pairs q and q + 8 of quarter q: four of every 32 keys."""
    pairs = exponentials.reshape(*exponentials.shape[:-1], 4, QUARTER // 2, 2)
    total = jnp.zeros(exponentials.shape[:-1], jnp.float32)
    for quarter in range(4):
        sampled = pairs[..., quarter, quarter, :] + pairs[..., quarter, quarter + 8, :]
        total = total + jnp.sum(sampled, axis=-1)
    return 8.0 * total


def anchor_reference(config: OperatorConfig, leading_raw: jax.Array) -> jax.Array:
    """Row reference from the masked raw scores [..., T, anchor_keys] of the leading keys.

    A row that sees none of them falls back to reference 0, the shiftless form.
    """
    anchor = jnp.max(leading_raw, axis=-1)
    return jnp.where(anchor == -jnp.inf, 0.0, anchor + _margin(config))


def _margin(config: OperatorConfig) -> float:
    recipe: Recipe = config.recipe
    if recipe.margin_unit == "bits":
        return recipe.margin / config.log2_scale
    return recipe.margin * LN_2
