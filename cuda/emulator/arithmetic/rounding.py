"""Rounding float64 values to narrower types, and sums that are rounded once.

A float64 "rounded to odd" keeps its last bit set whenever bits were lost, so that rounding it again, to a type of
at most 51 bits, gives what a single rounding of the exact value would have given (Boldo and Melquiond, 2008).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

# The smallest normal values.
SMALLEST_NORMAL: dict[str, np.floating] = {"f2": np.float16(2.0**-14), "f4": np.float32(2.0**-126)}

CANONICAL_NAN: dict[str, np.unsignedinteger] = {
    "f2": np.uint16(0x7FFF),
    "f4": np.uint32(0x7FFFFFFF),
    "f8": np.uint64(0x7FFFFFFFFFFFFFFF),
}

_TOWARD = {"rm": -np.inf, "rp": np.inf, "rz": 0.0}


def flush(x: np.ndarray) -> np.ndarray:
    """Subnormal float32 values become zeros of the same sign."""
    return x * (np.abs(x) >= SMALLEST_NORMAL["f4"])


def flush_half(x: np.ndarray) -> np.ndarray:
    """Subnormal float16 values become zeros of the same sign."""
    return x * (np.abs(x) >= SMALLEST_NORMAL["f2"])


def saturate(x: np.ndarray) -> np.ndarray:
    """Clamp to [0, 1]; NaN and -0 become +0."""
    zero, one = x.dtype.type(0), x.dtype.type(1)
    # The sum makes signalling NaNs quiet, which NumPy's fmax needs, and -0 positive.
    return np.fmin(np.fmax(x + zero, zero), one)


def relu(x: np.ndarray) -> np.ndarray:
    """Negative values and -0 become +0; a NaN becomes the canonical one."""
    zero = x.dtype.type(0)
    return canonical(np.maximum(x, zero) + zero)


def canonical(x: np.ndarray) -> np.ndarray:
    """The same values, each NaN the one that PTX calls canonical."""
    nan = x != x
    if not np.count_nonzero(nan):
        return x
    code = x.dtype.str[1:]
    return np.where(nan, CANONICAL_NAN[code].view(code), x)


def sum_to_odd(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a + b of float64 arrays, rounded to odd; finite values must be far from overflow and underflow."""
    total = np.asarray(a + b)
    part = total - a
    error = (a - (total - part)) + (b - part)
    inexact = np.abs(error) > 0
    bits = total.view("i8")
    step = np.where((error > 0) == (total > 0), 1, -1)
    return (bits + step * (inexact & ((bits & 1) == 0))).view("f8")


def sum_to_odd_rounding_down(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """`sum_to_odd`, with the sign that rounding toward minus infinity gives to an exact zero."""
    total = sum_to_odd(a, b)
    return np.where((total == 0) & (np.signbit(a) | np.signbit(b)), -0.0, total)


def directed(x: np.ndarray, code: str, rounding: str) -> np.ndarray:
    """float64 `x` rounded to "f2" or "f4" by "rz", "rm" or "rp"."""
    near = x.astype(code)
    back = near.astype("f8")
    if rounding == "rm":
        wrong = back > x
    elif rounding == "rp":
        wrong = back < x
    else:
        wrong = np.abs(back) > np.abs(x)
    return np.where(wrong, np.nextafter(near, near.dtype.type(_TOWARD[rounding])), near)


def narrow(x: np.ndarray, code: str, rounding: str) -> np.ndarray:
    """float64 `x` rounded once to "f2" or "f4"."""
    return x.astype(code) if rounding == "rn" else directed(x, code, rounding)


def float32_to_odd_bits(x: np.ndarray) -> np.ndarray:
    """The bits (uint32) of float64 `x` rounded to odd float32."""
    near = np.asarray(x.astype("f4"))
    back = near.astype("f8")
    return (near.view("u4") - (np.abs(back) > np.abs(x))) | (back != x)


def after(function: Callable, *then: Callable) -> Callable:
    """`function` followed by the functions `then` of one argument."""
    if not then:
        return function
    first, *rest = then

    def composed(*arguments):
        return first(function(*arguments))

    return after(composed, *rest)


def before(function: Callable, prepare: Callable, count: int) -> Callable:
    """`function` of the first `count` arguments after `prepare`, and of any others as they are."""
    if count == 1:
        return lambda a, *rest: function(prepare(a), *rest)
    if count == 2:
        return lambda a, b, *rest: function(prepare(a), prepare(b), *rest)
    return lambda a, b, c, *rest: function(prepare(a), prepare(b), prepare(c), *rest)
