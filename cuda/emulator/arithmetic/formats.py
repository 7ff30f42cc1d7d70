"""Floating-point formats narrower than 32 bits: what each code means, and the nearest code to a value."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np


@dataclass(frozen=True)
class Format:
    """A small floating-point format.

    Attributes:
      exponent_bits, mantissa_bits, bias: of the code.
      special: "none" (all codes are numbers), "nan" (the largest magnitude is NaN) or "ieee".
      nan: the code that a NaN is converted to (PTX ISA, cvt, .satfinite).
      signed: whether there is a sign bit.
    """

    exponent_bits: int
    mantissa_bits: int
    bias: int
    special: str
    nan: int
    signed: bool = True

    @property
    def bits(self) -> int:
        return self.signed + self.exponent_bits + self.mantissa_bits


FORMATS = {
    "e2m1": Format(2, 1, 1, "none", 0x7),
    "e2m3": Format(2, 3, 1, "none", 0x1F),
    "e3m2": Format(3, 2, 3, "none", 0x1F),
    "e4m3": Format(4, 3, 7, "nan", 0x7F),
    "e5m2": Format(5, 2, 15, "ieee", 0x7F),
    "ue4m3": Format(4, 3, 7, "nan", 0x7F, signed=False),
}


@cache
def values(name: str) -> np.ndarray:
    """The value of every code, (2**bits,) float64; "ue8m0", or a name of FORMATS."""
    if name == "ue8m0":
        table = np.ldexp(1.0, np.arange(256) - 127)
        table[255] = np.nan
    else:
        table = _values(FORMATS[name])
    table.flags.writeable = False
    return table


def _values(form: Format) -> np.ndarray:
    magnitude_bits = form.exponent_bits + form.mantissa_bits
    code = np.arange(1 << magnitude_bits)
    exponent, mantissa = code >> form.mantissa_bits, code & ((1 << form.mantissa_bits) - 1)
    fraction = mantissa + np.where(exponent == 0, 0, 1 << form.mantissa_bits)
    magnitude = np.ldexp(fraction.astype("f8"), np.maximum(exponent, 1) - form.bias - form.mantissa_bits)
    if form.special == "nan":
        magnitude[-1] = np.nan
    elif form.special == "ieee":
        top = exponent == (1 << form.exponent_bits) - 1
        magnitude[top] = np.where(mantissa[top] == 0, np.inf, np.nan)
    return np.concatenate([magnitude, -magnitude]) if form.signed else magnitude


def encode(name: str, x: np.ndarray, relu: bool = False) -> np.ndarray:
    """Codes (uint8) of the values nearest to float64 `x`: ties to the even code, saturating, NaN to the format's NaN.

    With `relu`, what has a sign becomes zero. Slow: meant for filling tables.
    """
    form = FORMATS[name]
    finite = values(name)[: 1 << (form.exponent_bits + form.mantissa_bits)]
    finite = finite[np.isfinite(finite)]
    middles = (finite[:-1] + finite[1:]) / 2
    magnitude = np.abs(x)
    code = np.searchsorted(middles, magnitude, side="left")
    at_tie = np.append(middles, np.nan)[code] == magnitude
    code = code + (at_tie & (code % 2 == 1))
    negative = np.signbit(x)
    if relu or not form.signed:
        code = np.where(negative, 0, code)
    else:
        code = code | (negative.astype("i8") << (form.bits - 1))
    return np.where(np.isnan(x), form.nan, code).astype("u1")


def bfloat16_to_float32(bits: np.ndarray) -> np.ndarray:
    """The values of bfloat16 codes (uint16), as float32; a NaN keeps its payload."""
    return (bits.astype("u4") << 16).view("f4")


def round_bfloat16(bits: np.ndarray, rounding: str = "rn") -> np.ndarray:
    """float32 bits (uint32), no NaN, rounded to bfloat16, which is then the upper half of the word."""
    if rounding == "rn":
        return bits + (((bits >> 16) & 1) + 0x7FFF)
    if rounding == "rz":
        return bits
    if rounding == "rm":
        return bits + (bits >> 31) * 0xFFFF
    if rounding == "rp":
        return bits + ((bits >> 31) ^ 1) * 0xFFFF
    raise ValueError(rounding)


@cache
def encode_table(name: str, relu: bool, shift: int, code: str) -> np.ndarray:
    """Codes of all bfloat16 values, shifted left: the index of a float32 is `sticky_bfloat16` of its bits."""
    x = bfloat16_to_float32(np.arange(1 << 16, dtype="u2")).astype("f8")
    return (encode(name, x, relu).astype(code) << shift).astype(code)


def sticky_bfloat16(bits: np.ndarray) -> np.ndarray:
    """The upper half of float32 bits (uint32), its last bit set if the lower half is not zero.

    Rounding it to a format of at most five mantissa bits is the same as rounding the float32.
    """
    return (bits | ((bits & 0xFFFF) + 0xFFFF)) >> 16


@cache
def ue8m0_table(rounding: str, satfinite: bool, shift: int) -> np.ndarray:
    """ue8m0 codes of all bfloat16 values, shifted left; see `sticky_bfloat16`. The sign is ignored.

    Values below 2**-127 become code 0. Without `satfinite`, overflow becomes NaN.
    """
    magnitude = np.arange(1 << 16) & 0x7FFF
    code = magnitude >> 7
    if rounding == "rp":
        code = code + ((magnitude & 0x7F != 0) & (magnitude > 0x40) & (magnitude < 0x7F80))
    if satfinite:
        code = np.where(magnitude <= 0x7F80, np.minimum(code, 0xFE), code)
    return (code << shift).astype("u2")


@cache
def decode_pairs(name: str, wide: str, relu: bool = False) -> np.ndarray:
    """The pair of float16 or bfloat16 values (`wide`) of each packed pair of codes, (65536,) or (256,) uint32."""
    x = values(name)
    step = 4 if len(x) == 16 else 8
    if relu:
        x = np.where(x > 0, x, np.where(np.isnan(x), x, 0))
    if wide == "f16":
        halves = x.astype("f2").view("u2").astype("u4")
    else:
        halves = x.astype("f4").view("u4") >> 16
    halves = np.where(np.isnan(x), 0x7FFF, halves).astype("u4")
    code = np.arange(1 << (2 * step))
    mask = len(x) - 1
    return (halves[(code >> step) & mask] << 16) | halves[code & mask]
