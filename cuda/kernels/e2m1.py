"""Rounding to E2M1 by comparing magnitudes with midpoints.

A midpoint of E2M1 times a scale of at most five significant bits is a bfloat16, and so is the magnitude that it is
compared with: every decision is exact, ties included, without a quotient.
"""

from kernels.words import MAGNITUDES, Uint32, at_least, bytes_of, choose

MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Between the values 0, 0.5, 1, 1.5, 2, 3, 4, 6 of the codes 0 to 7."""


def codes_of_pairs(pairs: list[Uint32], thresholds: list[Uint32]) -> Uint32:
    """Packed codes of eight bfloat16.

    Args:
      pairs: Four pairs.
      thresholds: Seven pairs; the least magnitudes that get the codes 1 to 7.

    Returns:
      The codes, the first in the lowest four bits.
    """
    # The codes of the first of two pairs go to the lowest bits of the halves, those of the second to bit 8.
    first, second = (_place_codes(pairs[i], thresholds, 0) | _place_codes(pairs[i + 1], thresholds, 8) for i in (0, 2))
    even, odd = bytes_of(first, second, 0x5410), bytes_of(first, second, 0x7632)
    return even + odd * 16


def _place_codes(pair: Uint32, thresholds: list[Uint32], place: int) -> Uint32:
    """Sign and code of both values of a pair, from bit ``place`` of each half on; the other bits are 0."""
    magnitude = pair & MAGNITUDES
    t1, t2, t3, t4, t5, t6, t7 = thresholds
    bit2 = at_least(magnitude, t4)
    bit1 = at_least(magnitude, choose(bit2, t6, t2))
    bit0 = at_least(magnitude, choose(bit1, choose(bit2, t7, t3), choose(bit2, t5, t1)))
    sign = pair >> (12 - place)
    parts = [
        part & Uint32((weight << place) * 0x10001) for part, weight in ((bit0, 1), (bit1, 2), (bit2, 4), (sign, 8))
    ]
    return parts[0] | parts[1] | parts[2] | parts[3]
