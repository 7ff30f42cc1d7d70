"""Quantised operands of the forward pass."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from jax_fp4attn.config import OperatorConfig, Visibility, padded_head_size
from jax_fp4attn.formats import (
    E4M3,
    BlockScaled,
    decode,
    encode,
    nvfp4_tensor_scale,
    quantize_mxfp4,
    quantize_nvfp4,
    round_to_bfloat16,
)
from jax_fp4attn.recipe import Recipe
from jax_fp4attn.reference.masking import valid_keys, valid_queries
from jax_fp4attn.reference.tiles import key_order, pad_axis, padded_keys

_K64_FOLD_HEAD_SIZE = 128


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Operands:
    """What the two matrix products consume. H and S are padded with zeros to whole tiles.

    Attributes:
      query: [B, N, T, H]: NVFP4, or bfloat16.
      key: [B, K, S, H]: NVFP4, or bfloat16; in the order of the sequence.
      value: [B, K, H, S] for MXFP4 and NVFP4 (blocks run along the keys, in slot order, see
        :func:`jax_fp4attn.reference.tiles.key_order`); [B, K, S, H] E4M3 bytes or bfloat16 otherwise.
    """

    query: BlockScaled | jax.Array
    key: BlockScaled | jax.Array
    value: BlockScaled | jax.Array


def head_major(x: jax.Array, valid: jax.Array | None) -> jax.Array:
    """[B, T, N, H] of any accepted dtype to float32 [B, N, T, H'] with bfloat16 values, zero where not valid.

    Args:
      x: The array.
      valid: bool [B, T] or None; a select, so that what lies in an invalid row cannot matter.

    Returns:
      The array with H padded to the tile's head size.
    """
    x = round_to_bfloat16(x)
    if valid is not None:
        x = jnp.where(valid[:, :, None, None], x, 0.0)
    return pad_axis(jnp.swapaxes(x, 1, 2), 3, padded_head_size(x.shape[3]))


def quantize_operands(
    config: OperatorConfig,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    visibility: Visibility,
    *,
    sequence_axis: str | None = None,
) -> Operands:
    """Quantises query, key and value as the recipe says.

    Args:
      config: Static arguments.
      query: [B, T, N, H], bfloat16 or float32 (rounded to bfloat16 first).
      key: [B, S, K, H].
      value: [B, S, K, H].
      visibility: Run-time restrictions; rows and keys that see or are seen by nobody become zero.
      sequence_axis: The mesh axis over which the sequence is split; tensor scales are those of the whole sequence.

    Returns:
      The operands.
    """
    recipe = config.recipe
    query_rows = valid_queries(visibility, query.shape[1])
    key_rows = valid_keys(visibility, key.shape[1])
    slots = padded_keys(key.shape[1])
    return Operands(
        query=_quantize_rows(recipe, head_major(query, query_rows), sequence_axis),
        key=_quantize_rows(recipe, pad_axis(head_major(key, key_rows), 2, slots), sequence_axis),
        value=_quantize_value(recipe, head_major(value, key_rows)),
    )


def _quantize_rows(recipe: Recipe, x: jax.Array, sequence_axis: str | None) -> BlockScaled | jax.Array:
    """[B, N, T, H] float32 to the format of the scores' operands."""
    if recipe.qk_format == "bf16":
        return x.astype(jnp.bfloat16)
    tensor_scale = None
    if recipe.qk_tensor_scale == "amax":
        tensor_scale = nvfp4_tensor_scale(x, axis=(2, 3))
        if sequence_axis is not None:
            tensor_scale = lax.pmax(tensor_scale, sequence_axis)
    fold = recipe.qk_scale_fold if x.shape[-1] % _K64_FOLD_HEAD_SIZE == 0 else "none"
    return quantize_nvfp4(x, tensor_scale=tensor_scale, fold=fold, ties=recipe.qk_ties)


def _quantize_value(recipe: Recipe, x: jax.Array) -> BlockScaled | jax.Array:
    """[B, K, S, H] float32 to the format of the PV product's operand, keys in slot order."""
    order = key_order(recipe, x.shape[2])
    if order is not None:
        x = x[:, :, order]
    x = pad_axis(x, 2, padded_keys(x.shape[2]))
    if recipe.v_format == "bf16":
        return x.astype(jnp.bfloat16)
    if recipe.v_format == "e4m3":
        return encode(x * recipe.v_multiplier, E4M3)
    along_keys = jnp.swapaxes(x, 2, 3)
    if recipe.v_format == "nvfp4":
        return quantize_nvfp4(along_keys)
    return quantize_mxfp4(along_keys, rule=recipe.v_exponent_rule, rows_per_scale=recipe.v_channels_per_scale)


def score_operand_values(x: BlockScaled | jax.Array) -> jax.Array:
    """Float32 values of ``Operands.query`` or ``Operands.key``."""
    return x.dequantize() if isinstance(x, BlockScaled) else x.astype(jnp.float32)


def value_operand_values(recipe: Recipe, x: BlockScaled | jax.Array) -> jax.Array:
    """What the PV product multiplies, float32 [B, K, S, H]: MXFP4 without its 1/6, E4M3 with its multiplier."""
    if isinstance(x, BlockScaled):
        return jnp.swapaxes(x.scaled_code_values(), 2, 3)
    return decode(x, E4M3) if recipe.v_format == "e4m3" else x.astype(jnp.float32)
