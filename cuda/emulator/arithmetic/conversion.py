"""`cvt` between integers, float16, bfloat16, float32 and float64, and `cvt.pack`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from . import packed_conversion
from .formats import bfloat16_to_float32
from .half import bits_to_bfloat16, to_float16
from .operation import CODES, ROUNDINGS, SMALL_PAIRS, SMALL_QUADS, Opcode, Operation
from .rounding import after, canonical, directed, float32_to_odd_bits, flush, relu, saturate, sum_to_odd

_INTEGERS = {"u8": "u1", "s8": "i1", "u16": "u2", "s16": "i2", "u32": "u4", "s32": "i4", "u64": "u8", "s64": "i8"}
_FLOATS = ("f16", "bf16", "f32", "f64")
_INTEGRAL = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
_PRECISION = {"f16": 11, "bf16": 8, "f32": 24, "f64": 53}


def convert(opcode: Opcode) -> Operation:
    """`cvt`."""
    if opcode.has("pack"):
        return pack(opcode)
    if len(opcode.types) != 2:
        raise opcode.unsupported("two types expected")
    target, source = opcode.types
    if target.endswith("x2") or target == "tf32" or target in SMALL_QUADS or source in SMALL_PAIRS:
        return packed_conversion.convert(opcode)
    if target in _INTEGERS and source in _INTEGERS:
        function = _integer_to_integer(opcode)
    elif target in _INTEGERS and source in _FLOATS:
        function = _float_to_integer(opcode)
    elif target in _FLOATS and source in _INTEGERS:
        function = _integer_to_float(opcode)
    elif target in _FLOATS and source in _FLOATS:
        function = _float_to_float(opcode)
    else:
        raise opcode.unsupported()
    return Operation(function, (CODES[source],), CODES[target])


def _narrow_register(source: str) -> Callable | None:
    """Eight-bit operands are the low bytes of their registers."""
    if source in ("u8", "s8"):
        code = _INTEGERS[source]
        return lambda x: x.astype(code)
    return None


def _integer_to_integer(opcode: Opcode) -> Callable:
    target, source = opcode.types
    opcode.allow("sat")
    low, high = _bounds(target)
    source_low, source_high = _bounds(source)
    output = CODES[target]
    narrow = _INTEGERS[target]

    def function(x):
        if source in ("u8", "s8"):
            x = x.astype(_INTEGERS[source])
        if clamp:
            x = np.clip(x, max(low, source_low), min(high, source_high))
        return x.astype(narrow).astype(output)

    clamp = opcode.has("sat") and (source_low < low or source_high > high)
    if not clamp and source not in ("u8", "s8") and narrow == output:
        return lambda x: x.astype(output)
    return function


def _bounds(kind: str) -> tuple[int, int]:
    info = np.iinfo(_INTEGERS[kind])
    return int(info.min), int(info.max)


def _widen(opcode: Opcode, source: str) -> Callable:
    """From registers of a float type to float64, subnormal float32 flushed with `.ftz`."""
    if source == "bf16":
        return lambda x: bfloat16_to_float32(x).astype("f8")
    if opcode.has("ftz") and source == "f32":
        return lambda x: flush(x).astype("f8")
    return lambda x: x.astype("f8")


def _float_to_integer(opcode: Opcode) -> Callable:
    """Out of range values become the nearest in range. NaN becomes 0, or the highest bit alone if 64 bits take part."""
    target, source = opcode.types
    opcode.allow(*_INTEGRAL, "sat", *(("ftz",) if source == "f32" else ()))
    integral = _INTEGRAL[opcode.one_of(*_INTEGRAL)]
    widen = _widen(opcode, source)
    low, high = _bounds(target)
    code, output = _INTEGERS[target], CODES[target]
    highest_bit = 1 << (8 * int(code[1]) - 1) if source == "f64" or target in ("u64", "s64") else 0
    nan = np.array(highest_bit, f"u{code[1]}").astype(code)
    if int(code[1]) < 8:

        def function(x):
            x = integral(widen(x))
            result = np.minimum(np.maximum(x, low), high).astype(code)
            if np.count_nonzero(x != x):
                result = np.where(x != x, nan, result)
            return result.astype(output)

        return function

    above = float(high + 1)

    def long_function(x):
        x = integral(widen(x))
        # The highest 64-bit integer is no float64 value, so that clamping goes by the next one.
        large = x >= above
        inside = np.where(large | (x != x), 0.0, np.maximum(x, float(low))).astype(code)
        return np.where(x != x, nan, np.where(large, highest, inside))

    highest = np.array(high, code)[()]
    return long_function


def integer_to_odd(x: np.ndarray) -> np.ndarray:
    """A 64-bit integer as float64, rounded to odd."""
    return sum_to_odd((x >> 32).astype("f8") * 4294967296.0, (x & 0xFFFFFFFF).astype("f8"))


def _integer_to_float(opcode: Opcode) -> Callable:
    target, source = opcode.types
    opcode.allow(*ROUNDINGS, "sat", *(("ftz",) if target == "f32" else ()))
    rounding = opcode.one_of(*ROUNDINGS)
    narrow = _narrow_register(source)
    if source in ("u64", "s64"):
        if target == "f64":
            function = _integer_to_float64(rounding)
        elif rounding == "rn" and target == "f32":
            function = lambda x: x.astype("f4")  # noqa: E731
        else:
            function = after(integer_to_odd, _from_float64(target, rounding))
    else:
        function = after(lambda x: x.astype("f8"), _from_float64(target, rounding))
    if narrow is not None:
        function = after(narrow, function)
    return after(function, _saturation(target)) if opcode.has("sat") else function


def _integer_to_float64(rounding: str) -> Callable:
    """The high and the low word are exact; the nearest sum is moved by its error."""

    def function(x):
        near = np.asarray(x.astype("f8"))
        upper, lower = (x >> 32).astype("f8") * 4294967296.0, (x & 0xFFFFFFFF).astype("f8")
        error = (upper - near) + lower
        if rounding == "rm":
            return np.where(error < 0, np.nextafter(near, -np.inf), near)
        if rounding == "rp":
            return np.where(error > 0, np.nextafter(near, np.inf), near)
        return np.where(error * np.sign(near) < 0, np.nextafter(near, 0.0), near)

    return (lambda x: x.astype("f8")) if rounding == "rn" else function


def _from_float64(target: str, rounding: str) -> Callable:
    """From float64 (rounded to odd if it was wider) to registers of a float type."""
    if target == "f64":
        return lambda x: x
    if target == "bf16":
        return lambda x: bits_to_bfloat16(float32_to_odd_bits(x), rounding)
    code = CODES[target]
    narrow = (lambda x: x.astype(code)) if rounding == "rn" else (lambda x: directed(x, code, rounding))
    return after(narrow, canonical) if target == "f16" else narrow


def _saturation(target: str) -> Callable:
    """Clamping to [0, 1], of registers of a float type."""
    if target == "bf16":
        return lambda x: (saturate(bfloat16_to_float32(x)).view("u4") >> 16).astype("u2")
    return saturate


def _largest(target: str) -> float:
    return {"f16": 65504.0, "bf16": 2.0**128 - 2.0**120, "f32": 2.0**128 - 2.0**104}[target]


def _float_to_float(opcode: Opcode) -> Callable:
    target, source = opcode.types
    ftz = ("ftz",) if "f32" in (target, source) else ()
    saturating = ("relu", "satfinite") if target in ("f16", "bf16") and source == "f32" else ()
    opcode.allow(*ROUNDINGS, *_INTEGRAL, "sat", *ftz, *saturating)
    function = _unsaturated_float_to_float(opcode, target, source)
    if opcode.has("satfinite"):
        largest = np.float32(_largest(target))
        function = _clamped(function, largest)
    if opcode.has("relu"):
        function = after(relu, function)
    if opcode.has("ftz") and source == "f32":
        function = after(flush, function)
    if opcode.has("ftz") and source == "f64":
        function = _flushing_float64(function, opcode.one_of(*ROUNDINGS))
    elif opcode.has("ftz") and target == "f32":
        function = after(function, flush)
    return after(function, _saturation(target)) if opcode.has("sat") else function


def _flushing_float64(function: Callable, rounding: str) -> Callable:
    """From float64 to float32 with `.ftz`: zeros below limits that were measured on an H200; the ISA gives none."""
    toward_zero = 2.0**-126
    # The limit itself is flushed, too.
    away = np.nextafter(toward_zero * (1 - 2.0**-24), 1.0)
    nearest = toward_zero * (1 - 2.0**-25)
    positive, negative = {
        "rn": (nearest, nearest),
        "rz": (toward_zero, toward_zero),
        "rm": (toward_zero, away),
        "rp": (away, toward_zero),
    }[rounding]

    def flushed(x):
        limit = np.where(np.signbit(x), negative, positive)
        return np.where(np.abs(x) < limit, np.copysign(np.float32(0), x.astype("f4")), function(x))

    return flushed


def _clamped(function: Callable, largest: np.floating) -> Callable:
    return lambda x: function(np.minimum(np.maximum(x, -largest), largest))


def _unsaturated_float_to_float(opcode: Opcode, target: str, source: str) -> Callable:
    narrows = _PRECISION[target] < _PRECISION[source] or (target, source) == ("bf16", "f16")
    narrows = narrows or (target, source) == ("f16", "bf16")
    if narrows:
        rounding = opcode.one_of(*ROUNDINGS)
        if source == "f32" and rounding == "rn" and target == "f16":
            return to_float16
        if source == "f32" and target == "bf16":
            return lambda x: bits_to_bfloat16(np.asarray(x).view("u4"), rounding)
        widen = _widen(Opcode("cvt", (), ()), source)
        return after(widen, _from_float64(target, rounding))
    if target == source:
        if any(opcode.has(rounding) for rounding in ROUNDINGS):
            raise opcode.unsupported("a float rounding between equal types")
        integral = _INTEGRAL[opcode.one_of(*_INTEGRAL)] if any(map(opcode.has, _INTEGRAL)) else None
        if integral is None:
            return lambda x: x
        if target == "bf16":
            return lambda x: bits_to_bfloat16(integral(bfloat16_to_float32(x)).view("u4"))
        return integral
    if any(map(opcode.has, _INTEGRAL)):
        raise opcode.unsupported("an integral rounding between different float types")
    if source == "bf16":
        code = CODES[target]
        return bfloat16_to_float32 if target == "f32" else (lambda x: bfloat16_to_float32(x).astype(code))
    code = CODES[target]
    return lambda x: x.astype(code)


def pack(opcode: Opcode) -> Operation:
    """`cvt.pack.sat`: a and b clamped and packed, a above b, below the low bits of c shifted up by both."""
    opcode.allow("pack", "sat")
    opcode.one_of("sat")
    target, source, *rest = opcode.types
    if source != "s32" or rest not in ([], ["b32"]):
        raise opcode.unsupported()
    bits = int(target[1:])
    if (bits == 16) != (rest == []) or bits not in (2, 4, 8, 16):
        raise opcode.unsupported()
    low, high = (0, (1 << bits) - 1) if target[0] == "u" else (-(1 << (bits - 1)), (1 << (bits - 1)) - 1)
    mask = (1 << bits) - 1

    def pair(a, b):
        upper, lower = (np.clip(x, low, high).astype("u4") & mask for x in (a, b))
        return (upper << bits) | lower

    if not rest:
        return Operation(pair, ("i4", "i4"), "u4")
    return Operation(lambda a, b, c: pair(a, b) | (c << (2 * bits)), ("i4", "i4", "u4"), "u4")
