"""Online softmax with a lazily updated row maximum, and the formats of its probabilities."""

import dataclasses

import jax
import jax.numpy as jnp

from jax_fp4attn.config import OperatorConfig
from jax_fp4attn.formats import E2M1, E4M3, round_to, round_to_bfloat16
from jax_fp4attn.recipe import Recipe

_NVFP4_BLOCK = 16


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TileProbabilities:
    """One key tile's probabilities relative to the updated row maximum.

    Attributes:
      values: Represented probabilities [..., T, 128].
      row_sum: The denominator's increment [..., T].
      row_max: Updated maximum in raw-score units [..., T]; -inf while a row has seen nothing.
      correction: Factor for what has been accumulated so far [..., T].
    """

    values: jax.Array
    row_sum: jax.Array
    row_max: jax.Array
    correction: jax.Array


def probability_tile(config: OperatorConfig, raw: jax.Array, row_max: jax.Array) -> TileProbabilities:
    """Probabilities of one key tile.

    The maximum is kept while it would grow by at most ``rescale_threshold_bits``, so a probability may reach two to
    that power (FlashAttention-4's lazy rescaling).

    Args:
      config: Static arguments.
      raw: Raw scores [..., T, 128], -inf where masked.
      row_max: Maximum so far, raw-score units [..., T].

    Returns:
      The tile's probabilities and the updated maximum.
    """
    recipe = config.recipe
    candidate = jnp.maximum(row_max, jnp.max(raw, axis=-1))
    keep = (row_max - candidate) * config.log2_scale >= -recipe.rescale_threshold_bits
    new_max = jnp.where(keep, row_max, candidate)
    shift = jnp.where(new_max == -jnp.inf, 0.0, new_max)
    correction = jnp.exp2((row_max - shift) * config.log2_scale)
    exponentials = jnp.exp2(raw * config.log2_scale - (shift * config.log2_scale)[..., None])
    values = _round_probabilities(recipe, exponentials)
    summed = values if recipe.denominator == "represented" else exponentials
    return TileProbabilities(values, jnp.sum(summed, axis=-1), new_max, correction)


def _round_probabilities(recipe: Recipe, p: jax.Array) -> jax.Array:
    match recipe.p_format:
        case "e4m3":
            return round_to(p, E4M3)
        case "bf16":
            return round_to_bfloat16(p)
        case "nvfp4":
            return _round_nvfp4(p, recipe.p_tensor_scale)
    raise AssertionError(f"no online softmax for p_format={recipe.p_format!r}")


def _round_nvfp4(p: jax.Array, tensor_scale: float) -> jax.Array:
    """Values of NVFP4 in blocks of 16 keys; the rule of :func:`jax_fp4attn.formats.quantize_nvfp4`."""
    blocks = p.reshape(*p.shape[:-1], -1, _NVFP4_BLOCK) * (1.0 / tensor_scale)
    scale = round_to(jnp.max(blocks, axis=-1, keepdims=True), E4M3, divisor=E2M1.max_value)
    return (round_to(blocks, E2M1, divisor=scale) * (scale * tensor_scale)).reshape(p.shape)
