"""MXFP4 blocks of 32 in the alpha/6 convention: a power of two that stands for the largest magnitude, and codes.

A code rounds ``6 x / alpha``. The quotient by a power of two is exact in bfloat16, and the least bfloat16 that gets a
code is a constant: of the midpoints over six only 0.75 / 6 is a bfloat16, and its tie goes up, to the even code.
"""

import math
import struct

import cutlass
from kernels.e2m1 import MIDPOINTS
from kernels.words import Uint32, when

Int32 = cutlass.Int32

NAN_BYTE = 255
_LARGEST_FINITE = 0x7F80


def _least_at_or_above(value: float) -> int:
    """A pair of the least bfloat16 that is not below a positive number."""
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    exact = struct.unpack("<f", struct.pack("<I", bits))[0]
    single = bits if exact >= value else bits + 1
    half = math.ceil(single / (1 << 16))
    return half << 16 | half


THRESHOLDS = tuple(_least_at_or_above(midpoint / 6) for midpoint in MIDPOINTS)


def byte_of(largest: Uint32, round_up_at: Int32, odd_weight: Int32) -> Uint32:
    """E8M0 byte of a block; 0 for zero and subnormal maxima, 255 for NaN.

    Args:
      largest: Bits of the largest magnitude, bfloat16.
      round_up_at: The exponent is raised where the mantissa (of 7 bits) reaches this.
      odd_weight: 1 if an odd exponent counts as one more in the mantissa (ties to even), else 0.

    Returns:
      The byte.
    """
    exponent, mantissa = largest >> 7, Int32(largest & 0x7F)
    up = mantissa + (Int32(exponent & 1) & odd_weight) >= round_up_at
    byte = cutlass.min(exponent + when(up, Uint32(1), Uint32(0)), Uint32(254))
    byte = when(exponent == 0, Uint32(0), byte)
    return when(largest > _LARGEST_FINITE, Uint32(NAN_BYTE), byte)


def inverse_of(byte: Uint32) -> Uint32:
    """Bits of the bfloat16 that takes a block with a finite, positive scale to units of the scale."""
    field = 254 - byte
    return when(field == 0, Uint32(0x40), field << 7)  # 2**-127 is subnormal.
