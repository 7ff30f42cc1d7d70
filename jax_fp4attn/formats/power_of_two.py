"""E8M0 bytes and the rules that choose a block's power-of-two scale from its largest magnitude."""

import math
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

ExponentRule = Literal["floor", "ceil", "rte"] | float
"""How the exponent of a block maximum ``m * 2**k`` (1 <= m < 2) is rounded to an integer.

``"floor"`` keeps k, ``"ceil"`` takes k + 1 unless m = 1, ``"rte"`` rounds the mantissa to nearest
with ties to the even E8M0 byte (the odd exponent), and a float t in (1, 2) takes k + 1 when m >= t
(1.5 is the nearest power of two).
"""

_BIAS = 127
_E8M0_NAN = 255


def check_exponent_rule(rule: ExponentRule, name: str) -> None:
    """Raises ValueError unless ``rule`` is an :data:`ExponentRule`."""
    if isinstance(rule, str):
        valid = rule in ("floor", "ceil", "rte")
    else:
        valid = isinstance(rule, float) and math.isfinite(rule) and 1.0 < rule < 2.0
    if not valid:
        raise ValueError(f"{name}: expected 'floor', 'ceil', 'rte' or a float threshold in (1, 2), got {rule!r}")


def exp2_int(exponent: ArrayLike) -> jax.Array:
    """Exact ``2.0**exponent`` as float32 for an integer exponent, clamped to [-127, 127].

    Args:
      exponent: Integer array.

    Returns:
      float32 array of the same shape; -127 gives the subnormal 2**-127, which E8M0 byte 0 stands
      for.

    Example:
      >>> exp2_int(jnp.array([-1, 0, 3])).tolist()
      [0.5, 1.0, 8.0]
    """
    byte = jnp.clip(jnp.asarray(exponent, jnp.int32) + _BIAS, 0, 2 * _BIAS)
    return decode_e8m0(byte)


def decode_e8m0(byte: ArrayLike) -> jax.Array:
    """Decodes E8M0 bytes: ``2.0**(byte - 127)``, and NaN for 255.

    Args:
      byte: Integer array with values in [0, 255].

    Returns:
      float32 array of the same shape.

    Example:
      >>> decode_e8m0(jnp.array([127, 130], jnp.uint8)).tolist()
      [1.0, 8.0]
    """
    byte = jnp.asarray(byte).astype(jnp.int32)
    bits = jnp.where(byte == 0, 1 << 22, byte << 23)
    bits = jnp.where(byte == _E8M0_NAN, 0x7FC00000, bits)
    return lax.bitcast_convert_type(bits, jnp.float32)


def encode_e8m0(exponent: ArrayLike) -> jax.Array:
    """E8M0 byte of ``2**exponent``, clamped to the finite bytes [0, 254].

    Args:
      exponent: Integer array.

    Returns:
      uint8 array of the same shape.

    Example:
      >>> encode_e8m0(jnp.array([0, -500, 500])).tolist()
      [127, 0, 254]
    """
    return jnp.clip(jnp.asarray(exponent, jnp.int32) + _BIAS, 0, 2 * _BIAS).astype(jnp.uint8)


def block_exponent(amax: ArrayLike, rule: ExponentRule) -> jax.Array:
    """Integer exponent of the power of two that stands for a block maximum.

    Args:
      amax: Non-negative float array, the largest magnitude of each block.
      rule: See :data:`ExponentRule`.

    Returns:
      int32 array of the same shape, in [-127, 127]. Zero and subnormal maxima give -127; infinity
      and NaN give 127 (the caller marks NaN, see :func:`jax_fp4attn.formats.quantize_mxfp4`).

    Raises:
      ValueError: If ``rule`` is none of the known rules.

    Example:
      >>> block_exponent(jnp.array([1.0, 1.4, 1.5, 1.9]), 1.5).tolist()
      [0, 0, 1, 1]
    """
    check_exponent_rule(rule, "rule")
    bits = lax.bitcast_convert_type(jnp.asarray(amax, jnp.float32), jnp.int32) & 0x7FFFFFFF
    field, mantissa = bits >> 23, bits & 0x7FFFFF
    if rule == "floor":
        up = jnp.zeros_like(field, dtype=bool)
    elif rule == "ceil":
        up = mantissa > 0
    elif rule == "rte":
        half = 1 << 22
        up = (mantissa > half) | ((mantissa == half) & (field % 2 == 1))
    else:
        up = mantissa >= math.ceil((float(rule) - 1.0) * (1 << 23))
    exponent = field - _BIAS + up.astype(jnp.int32)
    return jnp.where(field == 0, -_BIAS, jnp.minimum(exponent, _BIAS))
