"""Quantised operands of the forward pass, as kernels read them.

Block scales are in pages, which block-scaled tensor-core instructions read: a row of NVFP4 scales may have 4 bytes, too
few for the strides of a bulk copy that would gather pages from rows. Values have their keys along the last axis, since
the PV product contracts over keys and Hopper's FP8 instructions read operands only along the contraction.
"""

import dataclasses
from typing import NamedTuple

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
    """What the two matrix products consume. H and S are padded with zeros to whole tiles, H' and S'.

    Scales of block-scaled operands are uint8 and in pages, padded with zeros to 128 rows; where a sequence is split
    over a mesh axis they are in rows, since half of a shard's part may be no multiple of 128.

    Attributes:
      query: [B, N, T, H']: NVFP4 (codes [B, N, T, H'/2], scales [B, N, ceil(T/128), H'/64, 512]), or bfloat16.
      key: [B, K, S', H']: NVFP4 (codes [B, K, S', H'/2], scales [B, K, S'/128, H'/64, 512]), or bfloat16; in the order
        of the sequence.
      value: [B, K, H', S'], keys in slot order (:func:`jax_fp4attn.reference.tiles.key_order`): MXFP4 or NVFP4 with
        blocks along the keys (codes [B, K, H', S'/2], scales [B, K, ceil(H'/128), S'/128, 512] or, of NVFP4,
        [B, K, ceil(H'/128), S'/64, 512]), E4M3 bytes in uint8, or bfloat16.

    Example:
      >>> from jax_fp4attn import recipes
      >>> config = OperatorConfig(recipes.train, scale=0.125, is_causal=True, window=None)
      >>> x = jnp.ones((1, 200, 2, 64), jnp.bfloat16)
      >>> operands = quantize_operands(config, x, x, x, Visibility())
      >>> operands.query.codes.shape, operands.query.scales.shape, operands.value.shape
      ((1, 2, 200, 32), (1, 2, 2, 1, 512), (1, 2, 64, 256))
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
    return quantize_head_major(config.recipe, head_major_inputs(query, key, value, visibility), sequence_axis)


class HeadMajorInputs(NamedTuple):
    """Query, key and value as the quantisers take them, from :func:`head_major`, with S not padded."""

    query: jax.Array
    key: jax.Array
    value: jax.Array


def head_major_inputs(query: jax.Array, key: jax.Array, value: jax.Array, visibility: Visibility) -> HeadMajorInputs:
    """Head-major inputs; rows and keys that see or are seen by nobody are zero."""
    query_rows = valid_queries(visibility, query.shape[1])
    key_rows = valid_keys(visibility, key.shape[1])
    return HeadMajorInputs(head_major(query, query_rows), head_major(key, key_rows), head_major(value, key_rows))


def quantize_head_major(recipe: Recipe, inputs: HeadMajorInputs, sequence_axis: str | None) -> Operands:
    """:func:`quantize_operands` of head-major inputs."""
    key = pad_axis(inputs.key, 2, padded_keys(inputs.key.shape[2]))
    return Operands(
        query=_quantize_rows(recipe, inputs.query, sequence_axis),
        key=_quantize_rows(recipe, key, sequence_axis),
        value=_quantize_value(recipe, inputs.value),
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
    return quantize_nvfp4(x, tensor_scale=tensor_scale, fold=fold, ties=recipe.qk_ties).in_pages()


def _quantize_value(recipe: Recipe, x: jax.Array) -> BlockScaled | jax.Array:
    """[B, K, S, H] float32 to the format of the PV product's operand, [B, K, H, S'] with keys in slot order."""
    order = key_order(recipe, x.shape[2])
    if order is not None:
        x = x[:, :, order]
    along_keys = jnp.swapaxes(pad_axis(x, 2, padded_keys(x.shape[2])), 2, 3)
    if recipe.v_format == "bf16":
        return along_keys.astype(jnp.bfloat16)
    if recipe.v_format == "e4m3":
        return encode(along_keys * recipe.v_multiplier, E4M3)
    if recipe.v_format == "nvfp4":
        return quantize_nvfp4(along_keys).in_pages()
    rows_per_scale = recipe.v_channels_per_scale
    return quantize_mxfp4(along_keys, rule=recipe.v_exponent_rule, rows_per_scale=rows_per_scale).in_pages()


def score_operand_values(x: BlockScaled | jax.Array) -> jax.Array:
    """Float32 values of ``Operands.query`` or ``Operands.key``."""
    return x.dequantize() if isinstance(x, BlockScaled) else x.astype(jnp.float32)


def value_operand_values(recipe: Recipe, x: BlockScaled | jax.Array) -> jax.Array:
    """What the PV product multiplies, float32 [B, K, S, H]: MXFP4 without its 1/6, E4M3 with its multiplier."""
    if isinstance(x, BlockScaled):
        values = x.scaled_code_values()
    else:
        values = decode(x, E4M3) if recipe.v_format == "e4m3" else x.astype(jnp.float32)
    return jnp.swapaxes(values, 2, 3)
