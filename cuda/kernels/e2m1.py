"""Rounding to E2M1 by comparing magnitudes with midpoints.

A midpoint of E2M1 times a scale of at most five significant bits is a bfloat16, and so is the magnitude that it is
compared with: every decision is exact, ties included, without a quotient.
"""

from kernels.words import SIGNS, Uint32, at_least, bytes_of, choose

MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Between the values 0, 0.5, 1, 1.5, 2, 3, 4, 6 of the codes 0 to 7."""


def codes_of_pair(pair: Uint32, thresholds: list[Uint32]) -> Uint32:
    """Codes of two bfloat16.

    Args:
      pair: The two values.
      thresholds: Seven pairs; the least magnitudes that get the codes 1 to 7.

    Returns:
      Sign and code of each in the low four bits of its half.
    """
    magnitude = pair & 0x7FFF7FFF
    t1, t2, t3, t4, t5, t6, t7 = thresholds
    bit2 = at_least(magnitude, t4)
    bit1 = at_least(magnitude, choose(bit2, t6, t2))
    bit0 = at_least(magnitude, choose(bit1, choose(bit2, t7, t3), choose(bit2, t5, t1)))
    sign = (pair & Uint32(SIGNS)) >> 12
    return choose(Uint32(0x00040004), bit2, choose(Uint32(0x00020002), bit1, bit0)) & 0x00070007 | sign


def pack_codes(pairs: list[Uint32]) -> Uint32:
    """Eight codes from :func:`codes_of_pair`, in order, the first in the lowest four bits."""
    p0, p1, p2, p3 = pairs
    first, second = p0 | (p1 << 8), p2 | (p3 << 8)
    return bytes_of(first | (first >> 12), second | (second >> 12), 0x5410)
