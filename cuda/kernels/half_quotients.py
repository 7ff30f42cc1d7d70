"""Quotients in float16, rounded to E2M1 as integers.

From exponent -14 down, float16 has the layout of E2M1 with eight more bits: 2^-14 is the smallest normal number, like 1
in E2M1, and what is smaller is evenly spaced. So a quotient is computed times 2^-14, and its upper bits are the code.
Magnitudes are taken in units of the power of two in the largest of them. Every magnitude but a midpoint itself gets the
right code; docs/native.md says why.
"""

import cutlass
from kernels.instructions import equal_halves, product_of_halves, sum_clamped
from kernels.words import MAGNITUDES, Float32, Uint32, as_float, bytes_of, choose, reciprocal

Int32 = cutlass.Int32

_EXPONENT = 0x7F80
_SHIFT = 7
_FLOAT16_BIAS = 15
_ONE = 14  # 2^-14 stands for 1.
# The codes of other units are zeros or saturate: a scale is between 2^-9 and 448.
_SMALLEST_UNIT, _LARGEST_UNIT = _FLOAT16_BIAS << _SHIFT, (127 + 13) << _SHIFT
_BELOW_TWO = 0x07FF07FF  # In bfloat16 with the bias of float16.

_HALF_STEP, _LAST_BIT = 0x01000100, 0x00010001
_CODES = 0xFE00FE00
_TOP = 0x0FFF0FFF  # Of the code 7, the largest one.
UP_ON_TIE = 1.0 + 3.0 * 2.0**-16
"""Factor of an inverse with which a quotient is never below a midpoint that has to be rounded up."""


def unit_of(largest: Uint32) -> Uint32:
    """The power of two in the largest magnitude, as a bfloat16, within the limits of what has codes."""
    unit = cutlass.max(largest & _EXPONENT, Uint32(_SMALLEST_UNIT))
    return cutlass.min(unit, Uint32(_LARGEST_UNIT))


def in_units(pairs: list[Uint32], unit: Uint32) -> list[Uint32]:
    """Magnitudes of bfloat16 pairs as float16 multiples of the unit.

    They are exact from 2^-14 on and off by less than 2^-14 below; from 2 on they are the last bfloat16 below 2.
    """
    lowered = ((Uint32(_FLOAT16_BIAS << _SHIFT) - unit) & 0xFFFF) * 0x10001
    return [sum_clamped(pair & MAGNITUDES, lowered, _BELOW_TWO) << (10 - _SHIFT) for pair in pairs]


def inverse_of(scale: Float32, unit: Uint32, factor: Float32 | float = 1.0) -> Uint32:
    """2^-14 units over a scale, times the factor, in both halves; infinite for the scale 0."""
    return equal_halves(reciprocal(scale) * as_float((unit - (_ONE << _SHIFT)) << 16) * factor)


def step_of(scale: Float32, unit: Uint32) -> Uint32:
    """Minus what a scale is for the codes of :func:`rounded`, in both halves."""
    return equal_halves(scale * as_float(Uint32(0x80000000) | ((Uint32((2 * 127 + _ONE) << _SHIFT) - unit) << 16)))


def half_step_of(count: Int32) -> Uint32:
    """Half a step of the codes, for both halves.

    Args:
      count: Any number that is not negative. The assembler does not know that, and so it keeps the sum in a register;
        a constant it would load anew for each use.
    """
    return Uint32(_HALF_STEP) + Uint32(count >> 31)


def rounded(quotients: Uint32, half_step: Uint32) -> Uint32:
    """Nearest values of E2M1, times 2^-14; of a tie either."""
    return sum_clamped(quotients, half_step, _TOP) & Uint32(_CODES)


def codes_of_pairs(
    pairs: list[Uint32], magnitudes: list[Uint32], inverse: Uint32, half_step: Uint32, ties_toward_zero: bool
) -> Uint32:
    """Packed codes of eight bfloat16.

    Args:
      pairs: Four pairs.
      magnitudes: Of the pairs, from :func:`in_units`.
      inverse: From :func:`inverse_of`, unless ties go toward zero times :data:`UP_ON_TIE`.
      half_step: From :func:`half_step_of`.
      ties_toward_zero: Whether no tie goes up.

    Returns:
      The codes, the first in the lowest four bits.
    """
    nibbles = []
    for pair, magnitude in zip(pairs, magnitudes, strict=True):
        quotient = product_of_halves(magnitude, inverse)
        addend = half_step - _LAST_BIT
        if not ties_toward_zero:
            addend = addend + ((quotient >> 9) & _LAST_BIT)
        # Sign and code in the upper four bits of each half.
        nibbles.append(choose(Uint32(0x70007000), sum_clamped(quotient, addend, _TOP) << 3, pair))
    first, second = (bytes_of(nibbles[i], nibbles[i + 1], 0x7351) for i in (0, 2))
    even, odd = bytes_of(first, second, 0x5410), bytes_of(first, second, 0x7632)
    return choose(Uint32(0x0F0F0F0F), even >> 4, odd)
