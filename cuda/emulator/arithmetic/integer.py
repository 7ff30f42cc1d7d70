"""Integer arithmetic. Where two's complement makes signed and unsigned the same, the unsigned type is used."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .operation import CODES, Opcode, Operation
from .parts import paired, split

_INTEGERS = ("u16", "s16", "u32", "s32", "u64", "s64")
_PAIRS = ("u16x2", "s16x2")
_DOUBLE = {"u2": "u4", "i2": "i4", "u4": "u8", "i4": "i8"}


def _code(opcode: Opcode, *kinds: str) -> str:
    if opcode.type not in kinds:
        raise opcode.unsupported(f"type .{opcode.type}")
    return CODES[opcode.type]


def _unsigned(code: str) -> str:
    return code.replace("i", "u")


def _pair_code(opcode: Opcode) -> str:
    return "i2" if opcode.type == "s16x2" else "u2"


def _of_pairs(function: Callable, code: str, count: int) -> Operation:
    return Operation(paired(function, code), ("u4",) * count, "u4")


def add_subtract(opcode: Opcode) -> Operation:
    """`add` and `sub`, `.sat` on `s32`."""
    function = np.add if opcode.name == "add" else np.subtract
    if opcode.type in _PAIRS:
        opcode.allow()
        return _of_pairs(function, "u2", 2)
    code = _code(opcode, *_INTEGERS)
    opcode.allow(*(("sat",) if opcode.type == "s32" else ()))
    if opcode.has("sat"):
        return Operation(lambda a, b: _saturate(function(a.astype("i8"), b)), ("i4", "i4"), "i4")
    return Operation(function, (_unsigned(code),) * 2, _unsigned(code))


def _saturate(x: np.ndarray) -> np.ndarray:
    return np.clip(x, -(1 << 31), (1 << 31) - 1).astype("i4")


def multiply(opcode: Opcode) -> Operation:
    """`mul.lo`, `mul.hi` and `mul.wide`; `mad` likewise, with `.sat` on `mad.hi.s32`."""
    code = _code(opcode, *_INTEGERS)
    part = opcode.one_of("lo", "hi", "wide")
    add = opcode.name == "mad"
    saturated = add and part == "hi" and opcode.type == "s32"
    opcode.allow(part, *(("sat",) if saturated else ()))
    function: Callable
    if part == "lo":
        code = output = _unsigned(code)
        function = np.multiply
    elif part == "hi":
        output = code
        function = _high_product(code)
    else:
        if code not in _DOUBLE:
            raise opcode.unsupported("no wider type")
        output = _DOUBLE[code]
        function = _wide_product(output)
    if not add:
        return Operation(function, (code, code), output)
    if opcode.has("sat"):
        return Operation(lambda a, b, c: _saturate(function(a, b) + c.astype("i8")), (code,) * 3, code)
    return Operation(lambda a, b, c: function(a, b) + c, (code, code, output), output)


def _wide_product(output: str) -> Callable:
    return lambda a, b: a.astype(output) * b


def _high_product(code: str) -> Callable:
    if code in _DOUBLE:
        double, bits = _DOUBLE[code], 8 * int(code[1])
        return lambda a, b: ((a.astype(double) * b) >> bits).astype(code)
    if code == "u8":
        return _high_unsigned64
    return _high_signed64


def _high_unsigned64(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    mask = 0xFFFFFFFF
    a1, a0, b1, b0 = a >> 32, a & mask, b >> 32, b & mask
    middle = a1 * b0 + ((a0 * b0) >> 32)
    return a1 * b1 + (middle >> 32) + ((a0 * b1 + (middle & mask)) >> 32)


def _high_signed64(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    high = _high_unsigned64(a.view("u8"), b.view("u8")).view("i8")
    return high - np.where(a < 0, b, 0) - np.where(b < 0, a, 0)


def multiply24(opcode: Opcode) -> Operation:
    """`mul24` and `mad24`: the product of the low 24 bits, its bits 0 to 31 (`lo`) or 16 to 47 (`hi`)."""
    code = _code(opcode, "u32", "s32")
    part = opcode.one_of("lo", "hi")
    add = opcode.name == "mad24"
    saturated = add and part == "hi" and code == "i4"
    opcode.allow(part, *(("sat",) if saturated else ()))
    double, shift = _DOUBLE[code], 0 if part == "lo" else 16

    def product(a, b):
        return ((((a << 8) >> 8).astype(double) * ((b << 8) >> 8)) >> shift).astype(code)

    if not add:
        return Operation(product, (code, code), code)
    if opcode.has("sat"):
        return Operation(lambda a, b, c: _saturate(product(a, b).astype("i8") + c), (code,) * 3, code)
    return Operation(lambda a, b, c: product(a, b) + c, (code,) * 3, code)


def divide(opcode: Opcode) -> Operation:
    """`div` and `rem`, truncating. What a division by zero gives is left open by the ISA; here all bits are set,
    and the remainder is the dividend.
    """
    code = _code(opcode, *_INTEGERS)
    opcode.allow()
    ones = np.array(-1, "i8").astype(code)[()]

    def remainder(a, b):
        return np.where(b == 0, a, np.fmod(a, b))

    def quotient(a, b):
        return np.where(b == 0, ones, (a - np.fmod(a, b)) // b)

    return Operation(quotient if opcode.name == "div" else remainder, (code, code), code)


def minmax(opcode: Opcode) -> Operation:
    """`min` and `max`, `.relu` on `s32` and `s16x2`."""
    choose = np.minimum if opcode.name == "min" else np.maximum
    opcode.allow(*(("relu",) if opcode.type in ("s32", "s16x2") else ()))
    function = (lambda a, b: np.maximum(choose(a, b), 0)) if opcode.has("relu") else choose
    if opcode.type in _PAIRS:
        return _of_pairs(function, _pair_code(opcode), 2)
    code = _code(opcode, *_INTEGERS)
    return Operation(function, (code, code), code)


def absolute(opcode: Opcode) -> Operation:
    code = _code(opcode, "s16", "s32", "s64")
    opcode.allow()
    return Operation(np.abs, (code,), code)


def negate(opcode: Opcode) -> Operation:
    code = _unsigned(_code(opcode, "s16", "s32", "s64"))
    opcode.allow()
    return Operation(np.negative, (code,), code)


def sum_of_differences(opcode: Opcode) -> Operation:
    """`sad`: c + |a - b|."""
    code = _code(opcode, *_INTEGERS)
    opcode.allow()
    unsigned = _unsigned(code)
    return Operation(
        lambda a, b, c: c + (np.maximum(a, b).view(unsigned) - np.minimum(a, b).view(unsigned)),
        (code, code, unsigned),
        unsigned,
    )


def dot_product(opcode: Opcode) -> Operation:
    """`dp4a` (four bytes by four bytes) and `dp2a` (two halves by the lower or upper two bytes), added to c."""
    if len(opcode.types) != 2 or not set(opcode.types) <= {"u32", "s32"}:
        raise opcode.unsupported()
    a_bytes = "1" if opcode.name == "dp4a" else "2"
    a_code, b_code = (("i" if kind == "s32" else "u") for kind in opcode.types)
    if opcode.name == "dp4a":
        opcode.allow()
        chosen = slice(None)
    else:
        opcode.allow("lo", "hi")
        chosen = slice(0, 2) if opcode.one_of("lo", "hi") == "lo" else slice(2, 4)

    def function(a, b, c):
        left, right = split(a, a_code + a_bytes), split(b, b_code + "1")[..., chosen]
        return np.multiply(left, right, dtype="i8").sum(-1).astype("u4") + c

    return Operation(function, ("u4",) * 3, "u4")
