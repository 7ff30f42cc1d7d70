"""Rounding to E2M1 by comparing magnitudes with midpoints.

A midpoint of E2M1 times a scale of at most five significant bits is a bfloat16, and so is the magnitude that it is
compared with: every decision is exact, ties included, without a quotient.
"""

from kernels.words import MAGNITUDES, Uint32, at_least, bytes_of, choose, multiply_add

MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Between the values 0, 0.5, 1, 1.5, 2, 3, 4, 6 of the codes 0 to 7."""


# Times a pair of masks (0xFFFF or 0 in each half), this is a one in every half that is set: multiplications by it take
# the place of logical operations, of which the kernels have more than the GPU has room for.
_ONES = -0x10001


def codes_of_pairs(pairs: list[Uint32], thresholds: list[Uint32]) -> Uint32:
    """Packed codes of eight bfloat16.

    Args:
      pairs: Four pairs.
      thresholds: Seven pairs of equal halves; the least magnitudes that get the codes 1 to 7.

    Returns:
      The codes, the first in the lowest four bits.
    """
    # The codes of the first of two pairs go to the lowest bits of the halves, those of the second to bit 8.
    first, second = (
        _add_codes(_add_codes(Uint32(0), pairs[i], thresholds, 0), pairs[i + 1], thresholds, 8) for i in (0, 2)
    )
    even, odd = bytes_of(first, second, 0x5410), bytes_of(first, second, 0x7632)
    return even + odd * 16


def _add_codes(codes: Uint32, pair: Uint32, thresholds: list[Uint32], place: int) -> Uint32:
    """Adds sign and code of both values of a pair, from bit ``place`` of each half on."""
    magnitude = pair & MAGNITUDES
    t1, t2, t3, t4, t5, t6, t7 = thresholds
    bit2 = at_least(magnitude, t4)
    bit1 = at_least(magnitude, _choose_equal(bit2, t6, t2))
    bit0 = at_least(magnitude, choose(bit1, _choose_equal(bit2, t7, t3), _choose_equal(bit2, t5, t1)))
    codes = codes | (pair >> (12 - place)) & Uint32(0x00080008 << place)
    for bit, weight in ((bit2, 4), (bit1, 2), (bit0, 1)):
        codes = multiply_add(bit, Uint32(_ONES * (weight << place) % 2**32), codes)
    return codes


def _choose_equal(mask: Uint32, a: Uint32, b: Uint32) -> Uint32:
    """``a`` in each half where the mask is set and ``b`` elsewhere, for pairs of equal halves."""
    return multiply_add(mask, b - a, b)
