"""NVFP4: E2M1 codes in blocks of 16 with E4M3 scales and an optional tensor scale."""

from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from jax_fp4attn.formats.block_scaled import BlockScaled
from jax_fp4attn.formats.minifloat import E2M1, E4M3, Ties, decode, encode, round_to
from jax_fp4attn.formats.packing import pack_codes
from jax_fp4attn.formats.reductions import max_magnitude, sum_of_squares

ScaleFold = Literal["none", "k64_mse", "k64_max"]

BLOCK = 16
_SMALLEST_NORMAL = 2.0**-126
_LARGEST = (2.0 - 2.0**-23) * 2.0**127
_FOLD_WIDTH = 128
_FOLD_MULTIPLIERS = (0.25, 0.3125, 0.375, 0.4375, 0.5, 0.625, 0.75, 0.875, 1.0, 1.125, 1.25)


def nvfp4_tensor_scale(x: ArrayLike, axis: int | tuple[int, ...] | None = None) -> jax.Array:
    """Tensor scale that lets the largest block scale reach the top of E4M3: ``amax / (6 * 448)``.

    Args:
      x: Array to be quantised.
      axis: Axes that share a scale; None for the whole array.

    Returns:
      float32 scale with the reduced axes kept (size 1), at least 2**-126; 1 where the maximum is
      zero.

    Example:
      >>> float(nvfp4_tensor_scale(jnp.array([2688.0, 1.0]))[0])
      1.0
    """
    amax = max_magnitude(jnp.asarray(x, jnp.float32), axis, keepdims=True)
    # An infinity saturates like any large value, so its scale is the largest finite one.
    scale = jnp.where(amax == jnp.inf, _LARGEST, amax) / (E2M1.max_value * E4M3.max_value)
    # A subnormal scale may be flushed to zero.
    return jnp.where(amax == 0, 1.0, jnp.maximum(scale, _SMALLEST_NORMAL))


def quantize_nvfp4(
    x: ArrayLike,
    *,
    tensor_scale: ArrayLike | None = None,
    fold: ScaleFold = "none",
    ties: Ties = "even",
) -> BlockScaled:
    """Quantises the last axis to NVFP4.

    A block of 16 takes ``scale = E4M3(amax / 6)`` and ``code = E2M1(x / scale)``. With ``fold`` the
    blocks i and i + 4 of every 128 elements share one scale, so that the two K64 steps of a
    128-wide product read one scale page: ``"k64_mse"`` takes the best of eleven multiples of the
    joint ``amax / 6`` by squared error (the first on a tie), ``"k64_max"`` the joint ``amax / 6``
    itself.

    Args:
      x: Float array [..., n], n a multiple of 16 (of 128 when folded).
      tensor_scale: Positive decode factor, broadcastable against ``x`` with a last dimension of 1;
        ``x`` is multiplied by its reciprocal. None for 1.
      fold: Sharing of scales between the halves of 128 elements.
      ties: Rounding of the codes at midpoints.

    Returns:
      A :class:`BlockScaled` with one scale a block (a folded scale is stored for both of its
      blocks). A zero block has scale 0 and codes 0; a block with a NaN has a NaN scale; infinities
      saturate.

    Raises:
      ValueError: If n is not a multiple of the block, or ``fold`` is unknown.

    Example:
      >>> q = quantize_nvfp4(jnp.arange(16.0))
      >>> q.dequantize().tolist()[-4:]
      [10.0, 15.0, 15.0, 15.0]
    """
    x = jnp.asarray(x, jnp.float32)
    width = BLOCK if fold == "none" else _FOLD_WIDTH
    if fold not in ("none", "k64_mse", "k64_max"):
        raise ValueError(f"fold: expected 'none', 'k64_mse' or 'k64_max', got {fold!r}")
    if x.ndim == 0 or x.shape[-1] % width:
        raise ValueError(f"x: expected a last dimension that {width} divides, got shape {x.shape}")
    scaled = x
    if tensor_scale is not None:
        tensor_scale = jnp.asarray(tensor_scale, jnp.float32)
        scaled = x * (1.0 / tensor_scale)
    blocks = scaled.reshape(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK)
    if fold == "none":
        scales = encode(max_magnitude(blocks, -1), E4M3, divisor=E2M1.max_value)
    else:
        # [..., group of 128, half, block of the half, element]
        halves = scaled.reshape(*x.shape[:-1], x.shape[-1] // _FOLD_WIDTH, 2, 4, BLOCK)
        shared = _shared_scale(halves, search=fold == "k64_mse", ties=ties)
        scales = jnp.broadcast_to(shared, halves.shape[:-1]).reshape(blocks.shape[:-1])
    codes = encode(blocks, E2M1, ties=ties, divisor=decode(scales, E4M3)[..., None])
    return BlockScaled(pack_codes(codes.reshape(x.shape)), scales, tensor_scale, block_size=BLOCK)


def _shared_scale(halves: jax.Array, *, search: bool, ties: Ties) -> jax.Array:
    """E4M3 bytes [..., 1, 4] shared by both halves of [..., 2, 4, 16]."""
    amax = max_magnitude(halves, (-3, -1), keepdims=True)
    best_scale = encode(amax, E4M3, divisor=E2M1.max_value)
    if not search:
        return best_scale[..., 0]

    def try_multiplier(
        best: tuple[jax.Array, jax.Array], multiplier: jax.Array
    ) -> tuple[tuple[jax.Array, jax.Array], None]:
        best_scale, best_error = best
        scale = encode(amax * multiplier, E4M3, divisor=E2M1.max_value)
        step = decode(scale, E4M3)
        values = round_to(halves, E2M1, ties=ties, divisor=step) * step
        # [..., half, block, element] to one axis of the 32 elements that share the scale.
        difference = jnp.moveaxis(values - halves, -3, -2).reshape(*halves.shape[:-3], 4, 2 * BLOCK)
        error = sum_of_squares(difference)[..., None, :, None]
        better = error < best_error
        return (jnp.where(better, scale, best_scale), jnp.where(better, error, best_error)), None

    # A loop, since eleven copies of the body take a compiler ten seconds.
    start = (best_scale, jnp.full_like(amax, jnp.inf))
    (best_scale, _), _ = lax.scan(try_multiplier, start, jnp.asarray(_FOLD_MULTIPLIERS, jnp.float32))
    return best_scale[..., 0]
