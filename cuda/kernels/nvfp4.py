"""NVFP4 blocks of 16: scale from the largest magnitude, codes from the midpoints times the scale."""

import cutlass
from kernels.e2m1 import MIDPOINTS, codes_of_pairs
from kernels.words import (
    MAGNITUDES,
    Float32,
    Uint32,
    as_bits,
    as_float,
    larger_of_pairs,
    pair_of,
    to_e4m3,
    when,
)

Int32 = cutlass.Int32

NAN_SCALE = 0x7F
NAN_CODES = 0x77777777
_INFINITY = 0x7F800000
_ABOVE_ALL = 2.0**100

# A threshold that a tie must not reach is the next bfloat16 above the midpoint. For a midpoint of seven significant
# bits this factor adds 0.75 to 1.49 units in the last place, which round to one.
_JUST_ABOVE = 1.0 + 0.75 / 128
_UP_ON_TIE = (False, True, False, True, False, True, False)


def largest_magnitude(pairs: list[Uint32]) -> Uint32:
    """Bits of the largest magnitude of bfloat16 pairs, in the low 16 bits; above 0x7F80 if there is a NaN."""
    largest = pairs[0] & MAGNITUDES
    for pair in pairs[1:]:
        largest = larger_of_pairs(largest, pair & MAGNITUDES)
    return larger_of_pairs(largest, largest >> 16) & 0xFFFF


def scale_of(amax: Float32) -> Uint32:
    """E4M3 byte of a sixth of a magnitude of at most 12 significant bits; NaN for NaN."""
    return when(as_bits(amax) > _INFINITY, Uint32(NAN_SCALE), nearest_scale(amax * (1.0 / 6.0)))


def nearest_scale(quotient: Float32) -> Uint32:
    """E4M3 byte of such a sixth, exactly, though the product is rounded; docs/native.md says why."""
    rounded = as_float((as_bits(quotient) + 0x100) & Uint32(0xFFFFFE00))
    return to_e4m3(rounded, Float32(0.0))


def thresholds_of(scale: Float32, ties_toward_zero: Int32) -> list[Uint32]:
    """Least magnitudes of the codes 1 to 7, for both halves of a pair.

    Args:
      scale: Value of the scale byte.
      ties_toward_zero: Whether no tie goes up.

    Returns:
      Seven pairs.
    """
    unit = when(scale == 0.0, Float32(_ABOVE_ALL), scale)
    rounded_up = unit * when(ties_toward_zero != 0, Float32(_JUST_ABOVE), Float32(1.0))
    thresholds = []
    for midpoint, up in zip(MIDPOINTS, _UP_ON_TIE, strict=True):
        threshold = rounded_up * midpoint if up else unit * (midpoint * _JUST_ABOVE)
        thresholds.append(pair_of(threshold, threshold))
    return thresholds


def quantize_block(pairs: list[Uint32], scale: Uint32, thresholds: list[Uint32]) -> list[Uint32]:
    """Packed codes of a block, eight a word."""
    return [
        codes_or_marks(codes_of_pairs(pairs[start : start + 4], thresholds), scale) for start in range(0, len(pairs), 4)
    ]


def codes_or_marks(codes: Uint32, scale: Uint32) -> Uint32:
    """The packed codes, unless the scale is NaN or zero."""
    return when(scale == NAN_SCALE, Uint32(NAN_CODES), when(scale == 0, Uint32(0), codes))
