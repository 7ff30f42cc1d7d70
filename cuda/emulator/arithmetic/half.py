"""float16 and bfloat16, single (`f16`, `bf16`) and in pairs (`f16x2`, `bf16x2`).

Every instruction is computed on float32 or float64 values, where it is exact or harmless to round twice, and rounded.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from . import floating
from .formats import bfloat16_to_float32, round_bfloat16
from .operation import Opcode, Operation
from .parts import paired
from .rounding import (
    SMALLEST_NORMAL,
    after,
    before,
    canonical,
    float32_to_odd_bits,
    flush_half,
    relu,
    saturate,
    sum_to_odd,
)

TYPES = ("f16", "f16x2", "bf16", "bf16x2")


def to_bfloat16(x: np.ndarray) -> np.ndarray:
    """float32 to the nearest bfloat16 code (uint16); NaN to 0x7fff."""
    return bits_to_bfloat16(np.asarray(x).view("u4"))


def bits_to_bfloat16(bits: np.ndarray, rounding: str = "rn") -> np.ndarray:
    """The bits of float32 values to bfloat16 codes (uint16); NaN to 0x7fff."""
    code = (round_bfloat16(bits, rounding) >> 16).astype("u2")
    return np.where((bits & 0x7FFFFFFF) > 0x7F800000, np.uint16(0x7FFF), code)


def to_float16(x: np.ndarray) -> np.ndarray:
    """To the nearest float16; NaN to 0x7fff."""
    return canonical(np.asarray(x.astype("f2")))


def _to_float16_flushing(x: np.ndarray) -> np.ndarray:
    """`to_float16` with `.ftz`: values that underflow become zeros.

    A value underflows if it is below the smallest normal float16 once rounded to 11 bits with an unbounded exponent.
    The ISA does not say when it is judged; this was measured on an H200.
    """
    near = flush_half(to_float16(x))
    smallest = SMALLEST_NORMAL["f2"]
    at_edge = np.abs(near) == smallest
    if not np.count_nonzero(at_edge):
        return near
    underflow = at_edge & (np.abs((x * 4).astype("f2")) < 4 * smallest)
    return np.where(underflow, np.copysign(np.float16(0), near), near)


def _wide(x: np.ndarray) -> np.ndarray:
    return x.astype("f4")


def _fma_float64(a, b, c):
    # 53 bits hold the sum of float16 values, or it is so uneven that the rounding to float16 cannot tell.
    return a.astype("f8") * b + c


def _fma_bfloat16(a, b, c):
    a, b, c = (bfloat16_to_float32(x).astype("f8") for x in (a, b, c))
    return bits_to_bfloat16(float32_to_odd_bits(sum_to_odd(a * b, c)))


_BINARY = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


def arithmetic(opcode: Opcode) -> Operation:
    """`add`, `sub`, `mul` and `fma`."""
    brain = opcode.type.startswith("bf16")
    fused = opcode.name == "fma"
    opcode.allow("rn", *(() if brain else ("ftz", "sat")), *(("relu",) if fused else ()))
    if fused:
        opcode.one_of("rn")
    count = 3 if fused else 2
    if brain:
        function = _fma_bfloat16 if fused else of_float32(_BINARY[opcode.name], brain, count)
    else:
        exact = _fma_float64 if fused else before(_BINARY[opcode.name], _wide, count)
        function = after(exact, _to_float16_flushing if opcode.has("ftz") else to_float16)
    if opcode.has("ftz"):
        function = before(function, flush_half, count)
    if opcode.has("sat"):
        function = after(function, saturate)
    if opcode.has("relu"):
        function = after(function, _relu_bfloat16 if brain else relu)
    return operation(function, opcode.type, count)


def _relu_bfloat16(x: np.ndarray) -> np.ndarray:
    """Of codes whose NaN is the canonical one."""
    return np.where(x & 0x8000, np.uint16(0), x)


def of_float32(function: Callable, brain: bool, count: int) -> Callable:
    """A function of float32 values as one of float16 or bfloat16 (codes), rounded to nearest."""
    if brain:
        return after(before(function, bfloat16_to_float32, count), to_bfloat16)
    return after(before(function, _wide, count), to_float16)


def operation(function: Callable, kind: str, count: int) -> Operation:
    """A function of `f16` (float16) or `bf16` (uint16) as an operation on type `kind`."""
    code = "u2" if kind.startswith("bf16") else "f2"
    if kind.endswith("x2"):
        return Operation(paired(function, code), ("u4",) * count, "u4")
    return Operation(function, (code,) * count, code)


def minmax(opcode: Opcode) -> Operation:
    """`min` and `max`."""
    brain = opcode.type.startswith("bf16")
    opcode.allow("NaN", "xorsign", "abs", *(() if brain else ("ftz",)))
    if opcode.has("xorsign") != opcode.has("abs"):
        raise opcode.unsupported(".xorsign and .abs go together")
    function = floating.with_sign_modifiers(floating.extremum(opcode.name, opcode.has("NaN")), opcode)
    function = of_float32(function, brain, 2)
    if opcode.has("ftz"):
        function = before(function, flush_half, 2)
    return operation(function, opcode.type, 2)


def absolute(opcode: Opcode) -> Operation:
    return _signs(opcode, lambda x, sign: x & ~sign)


def negate(opcode: Opcode) -> Operation:
    return _signs(opcode, lambda x, sign: x ^ sign)


def _signs(opcode: Opcode, change: Callable) -> Operation:
    opcode.allow(*(() if opcode.type.startswith("bf16") else ("ftz",)))
    code, sign = ("u4", np.uint32(0x80008000)) if opcode.type.endswith("x2") else ("u2", np.uint16(0x8000))
    if not opcode.has("ftz"):
        return Operation(lambda x: change(x, sign), (code,), code)
    return operation(lambda x: flush_half(change(x.view("u2"), np.uint16(0x8000)).view("f2")), opcode.type, 1)
