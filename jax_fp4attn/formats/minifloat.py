"""E2M1, E4M3 and E5M2: rounding, encoding and decoding by integer logic."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

Ties = Literal["even", "toward_zero"]

_F32_BIAS = 127
_F32_MANTISSA_BITS = 23


@dataclasses.dataclass(frozen=True)
class MiniFloat:
    """A sign-magnitude floating-point format of at most eight bits.

    Attributes:
      name: The usual name, for messages.
      exponent_bits: Width of the exponent field.
      mantissa_bits: Width of the mantissa field.
      bias: Exponent bias.
      max_value: Largest finite value; conversions saturate there.
      nan_code: Code written for a NaN: what the conversions of the hardware write, so that bytes
        with a NaN are equal too. Of E5M2's three NaNs it is the last. E2M1 has none and takes its
        largest value.
      first_special: Smallest magnitude code that is not a finite number.

    Example:
      >>> E4M3.max_value
      448.0
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max_value: float
    nan_code: int
    first_special: int

    @property
    def bits(self) -> int:
        """Width of a code."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal value, which the subnormals share."""
        return 1 - self.bias


E2M1 = MiniFloat("e2m1", 2, 1, 1, 6.0, nan_code=0x7, first_special=0x8)
E4M3 = MiniFloat("e4m3", 4, 3, 7, 448.0, nan_code=0x7F, first_special=0x7F)
E5M2 = MiniFloat("e5m2", 5, 2, 15, 57344.0, nan_code=0x7F, first_special=0x7C)


def _bits(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.int32)


def _from_bits(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(bits, jnp.float32)


def round_to_bfloat16(x: ArrayLike) -> jax.Array:
    """Rounds to the nearest bfloat16 (ties to even) and returns the value as float32.

    Args:
      x: Array of any float dtype.

    Returns:
      float32 array of the same shape whose values bfloat16 holds exactly.

    Example:
      >>> float(round_to_bfloat16(1.0 + 2**-9))
      1.0
    """
    # Unlike a conversion to bfloat16 and back, which XLA may leave out, this rounds wherever the values come from.
    return lax.reduce_precision(jnp.asarray(x, jnp.float32), exponent_bits=8, mantissa_bits=7)


def round_to(x: ArrayLike, fmt: MiniFloat, *, ties: Ties = "even", divisor: ArrayLike | None = None) -> jax.Array:
    """Rounds to the nearest value of ``fmt``, saturating at its largest finite value.

    Args:
      x: Array of any float dtype.
      fmt: Target format.
      ties: ``"even"`` sends a midpoint to the code with an even last bit (the hardware rule),
        ``"toward_zero"`` to the smaller magnitude (strict comparison with the midpoint).
      divisor: Rounds ``x / divisor`` instead. Non-negative, broadcastable against ``x``; where it
        is 0 the result is 0. With at most 16 significant bits, as the scales of blocks have, it is
        the exact quotient that is rounded.

    Returns:
      float32 array of the same shape. NaN stays NaN, infinities saturate, the sign of zero is kept.

    Raises:
      ValueError: If ``ties`` is neither of both.

    Example:
      >>> round_to(jnp.array([0.25, 0.3, 5.0, -100.0]), E2M1).tolist()
      [0.0, 0.5, 4.0, -6.0]
    """
    if ties not in ("even", "toward_zero"):
        raise ValueError(f"ties: expected 'even' or 'toward_zero', got {ties!r}")
    x = jnp.asarray(x, jnp.float32)
    magnitude = jnp.abs(x)
    step = jnp.asarray(1.0 if divisor is None else divisor, jnp.float32)
    # Compilers divide by multiplying with a rounded reciprocal, which moves a quotient off a
    # midpoint. So the quotient only finds the codes below and above; the choice between the two
    # compares |x| with the midpoint times the divisor, a product of few bits and hence exact.
    quotient = magnitude if divisor is None else magnitude / jnp.where(step == 0, 1.0, step)
    quotient = jnp.minimum(quotient, fmt.max_value)
    exponent = jnp.maximum(_bits(quotient) >> _F32_MANTISSA_BITS, fmt.min_exponent + _F32_BIAS)
    spacing_exponent = exponent - fmt.mantissa_bits
    spacing = _from_bits(spacing_exponent << _F32_MANTISSA_BITS)
    inverse = _from_bits((2 * _F32_BIAS - spacing_exponent) << _F32_MANTISSA_BITS)
    below = jnp.floor(quotient * inverse)
    midpoint = (below + 0.5) * (spacing * step)
    up = magnitude > midpoint
    if ties == "even":
        up = up | ((magnitude == midpoint) & (below % 2 == 1))
    value = jnp.copysign(jnp.minimum((below + up.astype(jnp.float32)) * spacing, fmt.max_value), x)
    return value if divisor is None else jnp.where(step == 0, 0.0, value)


def encode(x: ArrayLike, fmt: MiniFloat, *, ties: Ties = "even", divisor: ArrayLike | None = None) -> jax.Array:
    """Rounds to ``fmt`` and returns the codes, one a byte.

    Args:
      x: Array of any float dtype.
      fmt: Target format.
      ties: Rounding of midpoints, see :func:`round_to`.
      divisor: Encodes ``x / divisor`` instead, see :func:`round_to`.

    Returns:
      uint8 array of the same shape: sign, exponent and mantissa in the low ``fmt.bits`` bits.
      NaN becomes ``fmt.nan_code``.

    Example:
      >>> encode(jnp.array([0.5, 6.0, -1.0]), E2M1).tolist()
      [1, 7, 10]
    """
    value = round_to(x, fmt, ties=ties, divisor=divisor)
    magnitude = jnp.abs(value)
    normal = (_bits(magnitude) >> (_F32_MANTISSA_BITS - fmt.mantissa_bits)) - (
        (_F32_BIAS - fmt.bias) << fmt.mantissa_bits
    )
    smallest_step = 2.0 ** (fmt.min_exponent - fmt.mantissa_bits)
    is_normal = magnitude >= 2.0**fmt.min_exponent
    # NaN fails the comparison; keep it out of the float-to-integer conversion, which is undefined
    # there.
    subnormal = jnp.where(is_normal | jnp.isnan(value), 0.0, magnitude / smallest_step)
    code = jnp.where(is_normal, normal, subnormal.astype(jnp.int32))
    sign = (_bits(value) < 0).astype(jnp.int32) << (fmt.bits - 1)
    return jnp.where(jnp.isnan(value), fmt.nan_code, code | sign).astype(jnp.uint8)


def decode(codes: ArrayLike, fmt: MiniFloat) -> jax.Array:
    """Decodes codes of ``fmt`` to float32.

    Args:
      codes: Integer array, one code an element in the low ``fmt.bits`` bits.
      fmt: Format of the codes.

    Returns:
      float32 array of the same shape; NaN and infinity codes give NaN and infinity.

    Example:
      >>> decode(jnp.arange(8), E2M1).tolist()
      [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    """
    codes = jnp.asarray(codes).astype(jnp.int32)
    magnitude = codes & ((1 << (fmt.bits - 1)) - 1)
    normal = _from_bits(
        (magnitude + ((_F32_BIAS - fmt.bias) << fmt.mantissa_bits)) << (_F32_MANTISSA_BITS - fmt.mantissa_bits)
    )
    subnormal = magnitude.astype(jnp.float32) * 2.0 ** (fmt.min_exponent - fmt.mantissa_bits)
    value = jnp.where(magnitude < (1 << fmt.mantissa_bits), subnormal, normal)
    if fmt.first_special < 1 << (fmt.bits - 1):
        is_infinity = (magnitude == fmt.first_special) & (fmt.first_special != fmt.nan_code)
        # As bits, since an array of NaNs to choose from would trip jax_debug_nans.
        special = jnp.where(is_infinity, 0x7F800000, 0x7FC00000)
        value = _from_bits(jnp.where(magnitude >= fmt.first_special, special, _bits(value)))
    sign = (codes >> (fmt.bits - 1)) & 1
    return jnp.where(sign == 1, -value, value)
