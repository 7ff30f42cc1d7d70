"""Slow, independent meanings to compare with: rational numbers, Python integers, one value at a time."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from hypothesis import strategies as st

from cuda.emulator.arithmetic.operations import find

# Precision in bits, exponents of the smallest normal and of the largest value.
FLOATS = {"f16": (11, -14, 15), "bf16": (8, -126, 127), "f32": (24, -126, 127), "f64": (53, -1022, 1023)}
BITS = {"f16": "u2", "bf16": "u2", "f32": "u4", "f64": "u8"}

SPECIAL = {
    "f16": [0, 1, 0x3FF, 0x400, 0x401, 0x3BFF, 0x3C00, 0x3C01, 0x7800, 0x7BFF, 0x7C00, 0x7C01, 0x7FFF],
    "bf16": [0, 1, 0x7F, 0x80, 0x81, 0x3F7F, 0x3F80, 0x3F81, 0x7F00, 0x7F7F, 0x7F80, 0x7F81, 0x7FFF],
    "f32": [0, 1, 0x400000, 0x7FFFFF, 0x800000, 0x800001, 0x33800000, 0x34000000, 0x3F7FFFFF, 0x3F800000, 0x3F800001,
            0x40000000, 0x4B000001, 0x4F000000, 0x5F000000, 0x7F000000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FFFFFFF],
    "f64": [0, 1, 0xFFFFFFFFFFFFF, 0x10000000000000, 0x3FF0000000000000, 0x3FF0000000000001, 0x43E0000000000000,
            0x7FEFFFFFFFFFFFFF, 0x7FF0000000000000, 0x7FF8000000000000],
}  # fmt: skip


def apply(opcode: str, *operands, immediates: tuple = ()) -> np.ndarray:
    """An instruction on operands given as raw words or in the type of the operation; the result as raw words."""
    operation = find(tuple(opcode.split(".")), immediates)
    arrays = []
    for operand, code in zip(operands, operation.inputs, strict=True):
        if code == "b1":
            arrays.append(np.asarray(operand, bool))
            continue
        raw = f"u{code[1]}"
        operand = operand if isinstance(operand, (np.ndarray, np.generic)) else np.asarray(operand, raw)
        if operand.dtype.kind == "f":
            operand = operand.view(f"u{operand.dtype.itemsize}")
        arrays.append(operand.astype(raw).view(code))
    with np.errstate(all="ignore"):
        result = np.asarray(operation.function(*arrays))
    assert result.dtype == np.dtype(operation.output)
    return result if operation.output == "b1" else np.ascontiguousarray(result).view(f"u{operation.output[1]}")


def values(bits: np.ndarray, kind: str) -> np.ndarray:
    """Words of a float type as float64."""
    bits = np.asarray(bits, BITS[kind])
    narrow = (bits.astype("u4") << 16).view("f4") if kind == "bf16" else bits.view(BITS[kind].replace("u", "f"))
    with np.errstate(invalid="ignore"):
        return narrow.astype("f8")


def rounded(exact: Fraction, kind: str, rounding: str = "rn") -> float:
    """The value of a float type that an exact value rounds to."""
    precision, smallest, largest = FLOATS[kind]
    if exact == 0:
        return 0.0
    magnitude, negative = abs(exact), exact < 0
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if magnitude < Fraction(2) ** exponent:
        exponent -= 1
    quantum = Fraction(2) ** (max(exponent, smallest) - precision + 1)
    count, rest = divmod(magnitude, quantum)
    if rounding == "rn":
        up = 2 * rest > quantum or (2 * rest == quantum and count % 2 == 1)
    elif rounding == "rna":
        up = 2 * rest >= quantum
    else:
        up = rest > 0 and rounding == ("rm" if negative else "rp")
    result = (count + up) * quantum
    if result >= Fraction(2) ** (largest + 1):
        limit = (Fraction(2) ** precision - 1) * Fraction(2) ** (largest - precision + 1)
        to_infinity = rounding in ("rn", "rna") or rounding == ("rm" if negative else "rp")
        result = float("inf") if to_infinity else limit
    return -float(result) if negative else float(result)


def encoded(x: float, kind: str) -> int:
    """The word of a value that the float type has; a NaN is the canonical one."""
    if x != x:
        return {"f16": 0x7FFF, "bf16": 0x7FFF, "f32": 0x7FFFFFFF}[kind]
    if kind == "bf16":
        return int(np.array(x, "f4").view("u4")) >> 16
    return int(np.array(x, BITS[kind].replace("u", "f")).view(BITS[kind]))


def assert_same_floats(actual, expected, kind: str) -> None:
    """Equal words, any NaN equal to any other."""
    actual, expected = np.asarray(actual), np.asarray(expected, np.asarray(actual).dtype)
    nan = np.isnan(values(actual, kind))
    np.testing.assert_array_equal(nan, np.isnan(values(expected, kind)))
    np.testing.assert_array_equal(np.where(nan, 0, actual), np.where(nan, 0, expected))


def words(kind: str) -> st.SearchStrategy[int]:
    """Words of a float type: special ones, any bits, and values of few significant bits near one."""
    width = 8 * int(BITS[kind][1])
    sign = 1 << (width - 1)
    precision, _, largest = FLOATS[kind]
    short = st.builds(
        lambda exponent, top, low: ((largest + exponent) << (precision - 1)) | top << (precision - 5) | low,
        st.integers(-min(40, largest - 1), min(40, largest)),
        st.integers(0, 15),
        st.sampled_from([0, 0, 0, 1]),
    )
    magnitude = st.one_of(st.sampled_from(SPECIAL[kind]), st.integers(0, sign - 1), short)
    return st.builds(lambda m, s: m | (sign if s else 0), magnitude, st.booleans())


def lanes(*strategies: st.SearchStrategy, size: int = 10) -> st.SearchStrategy[list[Sequence[int]]]:
    """Columns of operands."""
    return st.lists(st.tuples(*strategies), min_size=size, max_size=size).map(
        lambda rows: [list(column) for column in zip(*rows, strict=True)]
    )


def unsigned(width: int) -> st.SearchStrategy[int]:
    """Integers of a width: any bits, small ones, and both ends."""
    top = (1 << width) - 1
    edges = [0, 1, top, top - 1, top >> 1, (top >> 1) + 1]
    return st.one_of(st.sampled_from(edges), st.integers(0, top), st.integers(0, width - 1).map(lambda n: 1 << n))


def signed(word: int, width: int) -> int:
    return word - (1 << width) if word >> (width - 1) else word
