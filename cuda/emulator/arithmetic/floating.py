"""float32 and float64: sums, products, quotients and roots, all correctly rounded.

A NaN that comes out of add, sub, mul, fma, div, rcp or sqrt has the sign and payload that the CPU gives it, where
the GPU gives float32 the canonical 0x7fffffff. Saturation, relu, min and max do give the canonical one.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import numpy as np

from . import formats
from .operation import CODES, ROUNDINGS, Opcode, Operation
from .rounding import (
    SMALLEST_NORMAL,
    after,
    before,
    canonical,
    directed,
    flush,
    saturate,
    sum_to_odd,
    sum_to_odd_rounding_down,
)

_SMALLEST_NORMAL = float(SMALLEST_NORMAL["f4"])


def _wide(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float64)


def fma_float32(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c rounded once, to nearest. The product is exact in float64; the sum is rounded there, then here.

    Rounding twice can only differ where the first result lies in the middle between two float32 values.
    """
    product = _wide(a) * b
    total = product + c
    middle = (total.view("i8") & 0x1FFFFFFF) == 0x10000000
    if np.count_nonzero(middle) or np.count_nonzero(np.abs(total) < _SMALLEST_NORMAL):
        total = sum_to_odd(product, _wide(c))
    return total.astype("f4")


def _directed_sum(rounding: str) -> Callable:
    """The nearest sum and its error are two float32 (Knuth's two-sum), unless the sum is zero or overflows."""
    add = sum_to_odd_rounding_down if rounding == "rm" else sum_to_odd

    def function(a, b):
        near = a + b
        part = near - a
        error = (a - (near - part)) + (b - part)
        if np.count_nonzero(near) < near.size or np.count_nonzero(error != error):
            return directed(add(_wide(a), _wide(b)), "f4", rounding)
        return _step(near, error, rounding)

    return function


def _directed_fma(rounding: str) -> Callable:
    add = sum_to_odd_rounding_down if rounding == "rm" else sum_to_odd
    return lambda a, b, c: directed(add(_wide(a) * b, _wide(c)), "f4", rounding)


def _step(near: np.ndarray, error: np.ndarray, rounding: str) -> np.ndarray:
    """`near` moved by one float32 where the exact value, `near` + error, asks for it."""
    if rounding == "rm":
        return np.where(error < 0, np.nextafter(near, np.float32(-np.inf)), near)
    if rounding == "rp":
        return np.where(error > 0, np.nextafter(near, np.float32(np.inf)), near)
    return np.where(error * np.sign(near) < 0, np.nextafter(near, np.float32(0)), near)


def _directed_quotient(rounding: str) -> Callable:
    """The remainder a - q b is exact in float64 and has the sign of the error of q, up to the sign of b."""

    def divide(a, b):
        near = a / b
        error = (_wide(a) - _wide(near) * b) * np.sign(b)
        # A finite quotient that overflowed is too large; where the error is NaN the result is exact.
        overflow = np.isinf(near) & np.isfinite(a) & (b != 0)
        error = np.where(overflow, -near, error)
        return _step(near, error, rounding)

    return divide


def _directed_root(rounding: str) -> Callable:
    def root(a):
        near = np.sqrt(a)
        return _step(near, _wide(a) - _wide(near) * near, rounding)

    return root


def _one_over(x: np.ndarray) -> np.ndarray:
    return np.divide(x.dtype.type(1), x)


FLOAT32: dict[str, tuple[Callable, Callable[[str], Callable]]] = {
    "add": (np.add, _directed_sum),
    "sub": (np.subtract, lambda rounding: _minus(_directed_sum(rounding))),
    "mul": (np.multiply, lambda rounding: lambda a, b: directed(_wide(a) * b, "f4", rounding)),
    "fma": (fma_float32, _directed_fma),
    "div": (np.divide, _directed_quotient),
    "rcp": (_one_over, lambda rounding: _reciprocal(_directed_quotient(rounding))),
    "sqrt": (np.sqrt, _directed_root),
}
FLOAT32["mad"] = FLOAT32["fma"]

# Powers of two for each operand that multiply the result by _AWAY; sums need none, being exact near underflow.
_AWAY = np.float32(2.0**30)
_ONE = np.float32(1)
_TO_SCALE = {
    "mul": (_AWAY, _ONE),
    "fma": (_AWAY, _ONE, _AWAY),
    "mad": (_AWAY, _ONE, _AWAY),
    "div": (_AWAY, _ONE),
    "rcp": (1 / _AWAY,),
}

ARGUMENTS = {"add": 2, "sub": 2, "mul": 2, "fma": 3, "mad": 3, "div": 2, "rcp": 1, "sqrt": 1}


def _minus(add: Callable) -> Callable:
    return lambda a, b: add(a, -b)


def _reciprocal(divide: Callable) -> Callable:
    return lambda a: divide(np.float32(1), a)


def _flushing(function: Callable, name: str) -> Callable:
    """`.ftz`: subnormal operands become zeros, and so do results that underflow.

    A result underflows if it is below the smallest normal value once rounded to 24 bits with an unbounded exponent:
    0x00800000 * 0x3f7fffff is 0. The ISA does not say when it is judged; this was measured on an H200.
    """
    scales = _TO_SCALE.get(name)
    smallest = SMALLEST_NORMAL["f4"]

    def flushed(*operands):
        values = [flush(x) for x in operands]
        result = flush(function(*values))
        if scales is None:
            return result
        # Only these may have been rounded up from below.
        at_edge = np.abs(result) == smallest
        if not np.count_nonzero(at_edge):
            return result
        scaled = function(*(x * scale for x, scale in zip(values, scales, strict=True)))
        underflow = at_edge & (np.abs(scaled) < smallest * _AWAY)
        return np.where(underflow, np.copysign(np.float32(0), result), result)

    return flushed


def float32(opcode: Opcode) -> Operation:
    """`add`, `sub`, `mul`, `fma`, `mad`, `div`, `rcp` and `sqrt` with an IEEE rounding, on `f32`."""
    opcode.allow(*ROUNDINGS, "ftz", "sat")
    rounding = opcode.one_of(*ROUNDINGS, default="rn" if opcode.name in ("add", "sub", "mul") else None)
    nearest, make = FLOAT32[opcode.name]
    function = nearest if rounding == "rn" else make(rounding)
    count = ARGUMENTS[opcode.name]
    if opcode.has("ftz"):
        function = _flushing(function, opcode.name)
    if opcode.has("sat"):
        function = after(function, saturate)
    return Operation(function, ("f4",) * count, "f4")


def mixed(opcode: Opcode) -> Operation:
    """`add`, `sub` and `fma` to `f32` whose first operands are `f16` or `bf16` (`add.f32.bf16 d, a, c`)."""
    source = opcode.types[1]
    if opcode.name not in ("add", "sub", "fma") or opcode.types[0] != "f32" or source not in ("f16", "bf16"):
        raise opcode.unsupported()
    opcode.allow(*ROUNDINGS, "sat")
    plain = float32(Opcode(opcode.name, opcode.modifiers, ("f32",)))
    count = len(plain.inputs) - 1
    widen = formats.bfloat16_to_float32 if source == "bf16" else lambda x: x.astype("f4")
    return Operation(before(plain.function, widen, count), (CODES[source],) * count + ("f4",), "f4")


def _fma_float64(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c rounded once, after Boldo and Melquiond (2008); extreme exponents are left to rational numbers."""
    a, b, c = np.broadcast_arrays(a, b, c)
    extreme = np.zeros(a.shape, bool)
    for x in (a, b, c, a * b):
        magnitude = np.abs(x)
        extreme |= (magnitude != 0) & ~((magnitude > 2.0**-400) & (magnitude < 2.0**500))
    high, low = _product(a, b)
    upper, upper_error = _sum(c, low)
    total, total_error = _sum(high, upper)
    result = total + sum_to_odd(total_error, upper_error)
    result = np.array(np.where(result == 0, a * b + c, result))
    for index in map(tuple, np.argwhere(extreme)):
        result[index] = _fma_exact(float(a[index]), float(b[index]), float(c[index]))
    return result


def _fma_exact(a: float, b: float, c: float) -> float:
    if not all(map(np.isfinite, (a, b, c))) or a == 0 or b == 0:
        # A product of finite numbers is finite, however large.
        return c if np.isfinite(a) and np.isfinite(b) and not np.isfinite(c) else a * b + c
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    try:
        return float(exact)
    except OverflowError:
        return float("inf") if exact > 0 else float("-inf")


def _sum(a, b):
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def _product(a, b):
    def split(x):
        scaled = x * 134217729.0
        high = scaled - (scaled - x)
        return high, x - high

    product = a * b
    (a1, a0), (b1, b0) = split(a), split(b)
    return product, ((a1 * b1 - product) + a1 * b0 + a0 * b1) + a0 * b0


FLOAT64: dict[str, Callable] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "fma": _fma_float64,
    "mad": _fma_float64,
    "div": np.divide,
    "rcp": _one_over,
    "sqrt": np.sqrt,
}


def float64(opcode: Opcode) -> Operation:
    """The same instructions on `f64`, to nearest."""
    opcode.allow("rn")
    if opcode.name not in ("add", "sub", "mul"):
        opcode.one_of("rn")
    return Operation(FLOAT64[opcode.name], ("f8",) * ARGUMENTS[opcode.name], "f8")


def absolute(opcode: Opcode) -> Operation:
    return _one_operand(opcode, np.abs)


def negate(opcode: Opcode) -> Operation:
    return _one_operand(opcode, np.negative)


def _one_operand(opcode: Opcode, function: Callable) -> Operation:
    code = CODES[opcode.type]
    opcode.allow(*(("ftz",) if code == "f4" else ()))
    return Operation(after(function, flush) if opcode.has("ftz") else function, (code,), code)


def copysign(opcode: Opcode) -> Operation:
    """The sign of the first operand on the magnitude of the second."""
    opcode.allow()
    code = CODES[opcode.type]
    if code not in ("f4", "f8"):
        raise opcode.unsupported()
    return Operation(lambda a, b: np.copysign(b, a), (code, code), code)


def extremum(name: str, propagate_nan: bool) -> Callable:
    """`min` or `max` of float32 or float64: -0 is less than +0, a lone NaN loses unless it is to propagate."""
    choose: Callable
    join: Callable
    if name == "max":
        choose, join = (np.maximum if propagate_nan else np.fmax), np.bitwise_and
    else:
        choose, join = (np.minimum if propagate_nan else np.fmin), np.bitwise_or

    def function(a, b):
        result = choose(a, b)
        if np.count_nonzero(np.abs(result) > 0) == result.size:
            return result
        if not propagate_nan:
            # NumPy's choice between a number and a signalling NaN varies.
            result = np.where(a != a, b, np.where(b != b, a, result))
        # Equal operands differ at most in the sign of a zero.
        code = result.dtype.str[1:]
        bits = code.replace("f", "u")
        return canonical(np.where(a == b, join(a.view(bits), b.view(bits)).view(code), result))

    return function


def with_sign_modifiers(function: Callable, opcode: Opcode) -> Callable:
    """`.xorsign.abs` of two operands (magnitudes compared, signs multiplied), `.abs` of three."""
    if opcode.has("xorsign"):

        def xorsign(a, b):
            bits = a.dtype.str[1:].replace("f", "u")
            result = function(np.abs(a), np.abs(b))
            sign = (a.view(bits) ^ b.view(bits)) & (np.array(-0.0, a.dtype).view(bits))
            return np.where(result != result, result, (result.view(bits) | sign).view(a.dtype))

        return xorsign
    if opcode.has("abs"):
        return lambda *arguments: function(*map(np.abs, arguments))
    return function


def minmax(opcode: Opcode) -> Operation:
    """`min` and `max` of two float32 or float64, or of three float32."""
    code = CODES[opcode.type]
    opcode.allow(*(("ftz", "NaN", "xorsign", "abs") if code == "f4" else ()))
    three = len(opcode.immediates) == 3
    if (opcode.has("xorsign") != opcode.has("abs") and not three) or (opcode.has("xorsign") and three):
        raise opcode.unsupported(".xorsign.abs goes with two operands, .abs alone with three")
    two = extremum(opcode.name, opcode.has("NaN"))
    function = (lambda a, b, c: two(two(a, b), c)) if three else two
    function = with_sign_modifiers(function, opcode)
    count = 3 if three else 2
    if opcode.has("ftz"):
        function = before(function, flush, count)
    return Operation(function, (code,) * count, code)
