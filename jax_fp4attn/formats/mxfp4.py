"""MXFP4: E2M1 codes in blocks of 32 with power-of-two scales, by the alpha/6 or OCP convention."""

from typing import Literal

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_fp4attn.formats.block_scaled import BlockScaled
from jax_fp4attn.formats.minifloat import E2M1, Ties, encode, round_to
from jax_fp4attn.formats.packing import pack_codes
from jax_fp4attn.formats.power_of_two import (
    ExponentRule,
    block_exponent,
    check_exponent_rule,
    encode_e8m0,
    exp2_int,
)
from jax_fp4attn.formats.reductions import max_magnitude, rounded_product, sum_of_squares

Convention = Literal["endpoint", "ocp"]

BLOCK = 32
_NAN_BYTE = 255
_SMALLEST_NORMAL = 2.0**-126
_OCP_ENDPOINT_EXPONENT = 2  # 4 = 2**2 is E2M1's largest power of two (OCP MX 1.0, section 6.3)


def quantize_mxfp4(
    x: ArrayLike,
    *,
    rule: ExponentRule | Literal["best_l2"] = "rte",
    rows_per_scale: int = 1,
    convention: Convention = "endpoint",
    ties: Ties = "even",
) -> BlockScaled:
    """Quantises the last axis to MXFP4.

    In the ``"endpoint"`` convention a block's power of two, alpha, stands for its maximum:
    ``code = E2M1(6 x / alpha)`` and the value is ``alpha * code / 6``, so that a product of two
    such operands carries one factor 1/36. In the ``"ocp"`` convention (OCP Microscaling Formats
    1.0) the scale is the unit: ``code = E2M1(x / scale)`` with ``scale = 2**(exponent(amax) - 2)``.
    The two cannot be converted into one another without the factor 6.

    Args:
      x: Float array [..., rows, n] (or [n]), n a multiple of 32.
      rule: How the exponent of a block's maximum is rounded; ``"best_l2"`` takes, of the floor
        exponent and its two neighbours, the one with the least squared error (the larger on a tie).
      rows_per_scale: Rows that share a scale; 32 gives the 32 x 32 tiles used in training.
      convention: Meaning of the scale byte.
      ties: Rounding of the codes at midpoints.

    Returns:
      A :class:`BlockScaled` with one scale for each row and block of 32 (equal within
      ``rows_per_scale`` rows). A block of zeros or subnormal numbers has byte 0 and codes 0; a
      block with a NaN has byte 255, which decodes to NaN, and codes 7; infinities saturate.

    Raises:
      ValueError: If a dimension is not a multiple of its block, or an option is unknown.

    Example:
      >>> q = quantize_mxfp4(jnp.full((32,), 1.0))
      >>> q.scales.tolist(), q.dequantize().tolist()[0]
      ([127], 1.0)
    """
    if rule != "best_l2":
        check_exponent_rule(rule, "rule")
    if convention not in ("endpoint", "ocp"):
        raise ValueError(f"convention: expected 'endpoint' or 'ocp', got {convention!r}")
    x = jnp.asarray(x, jnp.float32)
    if x.ndim == 0 or x.shape[-1] % BLOCK:
        raise ValueError(f"x: expected a last dimension that {BLOCK} divides, got shape {x.shape}")
    if rows_per_scale < 1:
        raise ValueError(f"rows_per_scale: expected a positive number, got {rows_per_scale}")
    if rows_per_scale != 1 and (x.ndim < 2 or x.shape[-2] % rows_per_scale):
        raise ValueError(f"x: expected rows that {rows_per_scale} divides, got shape {x.shape}")
    tiles = _tiles(x, rows_per_scale)
    amax = max_magnitude(tiles, (-3, -1), keepdims=True)
    if rule == "best_l2":
        exponent = _best_exponent(tiles, amax, convention, ties)
    else:
        exponent = _scale_exponent(block_exponent(amax, rule), convention)
    is_zero = amax < _SMALLEST_NORMAL
    codes = encode(_to_code_units(tiles, exponent, convention), E2M1, ties=ties)
    is_nan = jnp.isnan(amax)
    codes = jnp.where(is_nan, E2M1.nan_code, jnp.where(is_zero, 0, codes))
    byte = jnp.where(is_zero, 0, encode_e8m0(exponent))
    byte = jnp.where(is_nan, _NAN_BYTE, byte).astype(jnp.uint8)
    scales = jnp.broadcast_to(byte, (*tiles.shape[:-1], 1))
    return BlockScaled(
        pack_codes(codes.reshape(x.shape)),
        scales.reshape(*x.shape[:-1], x.shape[-1] // BLOCK),
        block_size=BLOCK,
        scale_format="e8m0",
        endpoint_scale=convention == "endpoint",
    )


def _tiles(x: jax.Array, rows_per_scale: int) -> jax.Array:
    """Views [..., rows, n] as [..., row group, row, block, element]; a vector gets one row."""
    rows, blocks = x.shape[-2] if x.ndim > 1 else 1, x.shape[-1] // BLOCK
    return x.reshape(*x.shape[:-2], rows // rows_per_scale, rows_per_scale, blocks, BLOCK)


def _scale_exponent(exponent: jax.Array, convention: Convention) -> jax.Array:
    """Exponent of the scale byte, clipped to leave byte 0 to blocks of zeros and to keep values finite."""
    shift = _OCP_ENDPOINT_EXPONENT if convention == "ocp" else 0
    return jnp.clip(exponent - shift, -126, 127 - shift)


def _to_code_units(tiles: jax.Array, exponent: jax.Array, convention: Convention) -> jax.Array:
    """``6 x / alpha`` or ``x / scale``; the exact division comes first: 6 x might overflow."""
    # In two steps: the reciprocal of 2**127 is subnormal, and may be flushed to zero.
    half = exponent // 2
    quotient = tiles * exp2_int(-half) * exp2_int(half - exponent)
    return rounded_product(quotient, 6.0) if convention == "endpoint" else quotient


def _best_exponent(tiles: jax.Array, amax: jax.Array, convention: Convention, ties: Ties) -> jax.Array:
    floor = block_exponent(amax, "floor")
    centre = _scale_exponent(floor, convention)
    best = centre
    best_error = jnp.full(amax.shape, jnp.inf, jnp.float32)
    for offset in (1, 0, -1):
        exponent = _scale_exponent(floor + offset, convention)
        units = _to_code_units(tiles, exponent, convention)
        difference = round_to(units, E2M1, ties=ties) - units
        # [..., row, block, element] to one axis of all the elements that share the scale.
        shared = jnp.moveaxis(difference, -3, -2)
        shared = shared.reshape(*shared.shape[:-2], shared.shape[-2] * BLOCK)
        # Errors in units of different candidates compare after scaling by the candidate's square.
        scale = exp2_int(2 * (exponent - centre))
        error = scale * sum_of_squares(shared)[..., None, :, None]
        better = error < best_error
        best = jnp.where(better, exponent, best)
        best_error = jnp.where(better, error, best_error)
    return best
