"""Logic, shifts, fields and permutations of bits."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

import numpy as np

from .operation import CODES, Opcode, Operation
from .parts import join

_SIZES = ("b16", "b32", "b64")
_LOGIC = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}


def _code(opcode: Opcode, *kinds: str) -> str:
    if opcode.type not in kinds:
        raise opcode.unsupported(f"type .{opcode.type}")
    return CODES[opcode.type]


def _width(code: str) -> int:
    return 8 * int(code[1])


def logic(opcode: Opcode) -> Operation:
    code = _code(opcode, *_SIZES, "pred")
    opcode.allow()
    return Operation(_LOGIC[opcode.name], (code, code), code)


def invert(opcode: Opcode) -> Operation:
    code = _code(opcode, *_SIZES, "pred")
    opcode.allow()
    return Operation(np.logical_not if code == "b1" else np.invert, (code,), code)


def logical_not(opcode: Opcode) -> Operation:
    """`cnot`: 1 where the operand is 0, otherwise 0."""
    code = _code(opcode, *_SIZES)
    opcode.allow()
    return Operation(lambda a: (a == 0).astype(code), (code,), code)


def lookup3(opcode: Opcode) -> Operation:
    """`lop3.b32 d, a, b, c, table`: bit 4 a + 2 b + c of the table, for each bit. The table is a literal."""
    _code(opcode, "b32")
    opcode.allow()
    table = opcode.immediates[3] if len(opcode.immediates) == 4 else None
    if table is None:
        raise opcode.unsupported("the table must be a literal")
    return Operation(_lookup3(table & 0xFF), ("u4",) * 3, "u4")


# Tables of few operations: a, b and c alone are 0xF0, 0xCC and 0xAA.
_SHORT_TABLES: dict[int, Callable] = {
    0xC0: lambda a, b, c: a & b,
    0x80: lambda a, b, c: a & b & c,
    0xFE: lambda a, b, c: a | b | c,
    0x96: lambda a, b, c: a ^ b ^ c,
    0xF8: lambda a, b, c: a | (b & c),
    0xEA: lambda a, b, c: (a & b) | c,
    0xEC: lambda a, b, c: (a & c) | b,
    0xE0: lambda a, b, c: a & (b | c),
    0xA8: lambda a, b, c: (a | b) & c,
    0xC8: lambda a, b, c: (a | c) & b,
    0x78: lambda a, b, c: a ^ (b & c),
    0x6A: lambda a, b, c: (a & b) ^ c,
    0x6C: lambda a, b, c: (a & c) ^ b,
    0x56: lambda a, b, c: (a | b) ^ c,
    0xCA: lambda a, b, c: c ^ (a & (b ^ c)),
    0xD8: lambda a, b, c: a ^ (c & (a ^ b)),
    0xE4: lambda a, b, c: b ^ (c & (a ^ b)),
    0xAC: lambda a, b, c: b ^ (a & (b ^ c)),
    0xE8: lambda a, b, c: (a & b) | (c & (a | b)),
}


def _lookup3(table: int) -> Callable:
    if table in _SHORT_TABLES:
        return _SHORT_TABLES[table]
    minterms = [i for i in range(8) if table >> i & 1]

    def function(a, b, c):
        zero = (a ^ a) | (b ^ b) | (c ^ c)
        positive, negative = (c, b, a), (~c, ~b, ~a)
        terms = (
            reduce(np.bitwise_and, [(positive if i >> k & 1 else negative)[k] for k in range(3)]) for i in minterms
        )
        return reduce(np.bitwise_or, terms, zero)

    return function


def shift(opcode: Opcode) -> Operation:
    """`shl` and `shr`. Amounts of the width and more leave zeros, or the sign; NumPy's shifts say the same."""
    opcode.allow()
    function: Callable
    if opcode.name == "shl":
        code = _code(opcode, *_SIZES)
        function = np.left_shift
    else:
        code = _code(opcode, *_SIZES, "u16", "u32", "u64", "s16", "s32", "s64")
        function = np.right_shift
    if _width(code) == 16:
        return Operation(lambda a, n: function(a, np.minimum(n, 16).astype(code)), (code, "u4"), code)
    # An amount viewed as signed is out of range all the same.
    amount = code if _width(code) == 32 else "u4"
    return Operation(function, (code, amount), code)


def funnel_shift(opcode: Opcode) -> Operation:
    """`shf.l` and `shf.r`: the upper or lower word of {b, a} shifted by c, which wraps or is clamped at 32."""
    _code(opcode, "b32")
    side, limit = opcode.one_of("l", "r"), opcode.one_of("wrap", "clamp")
    opcode.allow("l", "r", "wrap", "clamp")
    bound = (lambda n: n & 31) if limit == "wrap" else (lambda n: np.minimum(n, 32))

    def function(a, b, c):
        both = (b.astype("u8") << 32) | a
        n = bound(c)
        return ((both << n) >> 32 if side == "l" else both >> n).astype("u4")

    return Operation(function, ("u4",) * 3, "u4")


def _field_operand(width: int) -> Callable:
    """A position or length of `bfe` and `bfi`, as uint64.

    The ISA restricts both to the low eight bits of their registers. The instructions on 64 bits take the whole
    register, of which 64 and more are the same (measured on an H200).
    """
    if width == 64:
        return lambda n: np.minimum(n, 64).astype("u8")
    return lambda n: (n & 0xFF).astype("u8")


def extract_field(opcode: Opcode) -> Operation:
    """`bfe`: the field of c bits from bit b, extended by its sign or zeros."""
    code = _code(opcode, "u32", "s32", "u64", "s64")
    opcode.allow()
    width, signed = _width(code), code[0] == "i"
    amount = _field_operand(width)

    def function(a, b, c):
        position, length = amount(b), amount(c)
        left = 64 - np.minimum(position + length, width)
        right = left + position
        if signed:
            field = (a.astype("i8") << left.astype("i8")) >> np.minimum(right, 63).astype("i8")
        else:
            field = (a.astype("u8") << left) >> right
        return np.where(length == 0, 0, field).astype(code)

    return Operation(function, (code, "u4", "u4"), code)


def insert_field(opcode: Opcode) -> Operation:
    """`bfi`: b with the field of d bits from bit c replaced by the low bits of a."""
    code = _code(opcode, "b32", "b64")
    opcode.allow()
    amount = _field_operand(_width(code))

    def function(a, b, c, d):
        position, length = amount(c), amount(d)
        field = (np.left_shift(np.uint64(1), length) - 1) << position
        return ((b & ~field) | ((a.astype("u8") << position) & field)).astype(code)

    return Operation(function, (code, code, "u4", "u4"), code)


def _bit_length(x: np.ndarray) -> np.ndarray:
    """Of unsigned integers, as int32. Both halves of 64 bits are exact in float64."""
    if x.dtype.itemsize == 8:
        upper = np.frexp((x >> 32).astype("f8"))[1]
        lower = np.frexp((x & 0xFFFFFFFF).astype("f8"))[1]
        return np.where(upper > 0, upper + 32, lower)
    return np.frexp(x.astype("f8"))[1]


def count_leading_zeros(opcode: Opcode) -> Operation:
    code = _code(opcode, "b32", "b64")
    opcode.allow()
    width = _width(code)
    return Operation(lambda a: (width - _bit_length(a)).astype("u4"), (code,), "u4")


def count_ones(opcode: Opcode) -> Operation:
    code = _code(opcode, "b32", "b64")
    opcode.allow()
    return Operation(lambda a: np.bitwise_count(a).astype("u4"), (code,), "u4")


def find_leading(opcode: Opcode) -> Operation:
    """`bfind`: the position of the highest bit that is not the sign, or with `.shiftamt` its distance from the top."""
    code = _code(opcode, "u32", "s32", "u64", "s64")
    opcode.allow("shiftamt")
    width = _width(code)
    unsigned = code.replace("i", "u")

    def function(a):
        if code[0] == "i":
            a = (a ^ (a >> (width - 1))).view(unsigned)
        length = _bit_length(a)
        if opcode.has("shiftamt"):
            return np.where(length == 0, -1, width - length).astype("i4").view("u4")
        return (length - 1).astype("i4").view("u4")

    return Operation(function, (code,), "u4")


def reverse(opcode: Opcode) -> Operation:
    """`brev`."""
    code = _code(opcode, "b32", "b64")
    opcode.allow()
    ones = (1 << _width(code)) - 1
    steps = [(n, ones // ((1 << n) + 1)) for n in (1, 2, 4)]

    def function(a):
        for n, mask in steps:
            a = ((a >> n) & mask) | ((a & mask) << n)
        return np.asarray(a).byteswap()

    return Operation(function, (code,), code)


# Source bytes (0 to 7, of {b, a}) for each value of the two low bits of the selector, lowest byte first.
_PERMUTE_MODES = {
    "f4e": [(0, 1, 2, 3), (1, 2, 3, 4), (2, 3, 4, 5), (3, 4, 5, 6)],
    "b4e": [(0, 7, 6, 5), (1, 0, 7, 6), (2, 1, 0, 7), (3, 2, 1, 0)],
    "rc8": [(0, 0, 0, 0), (1, 1, 1, 1), (2, 2, 2, 2), (3, 3, 3, 3)],
    "ecl": [(0, 1, 2, 3), (1, 1, 2, 3), (2, 2, 2, 3), (3, 3, 3, 3)],
    "ecr": [(0, 0, 0, 0), (0, 1, 1, 1), (0, 1, 2, 2), (0, 1, 2, 3)],
    "rc16": [(0, 1, 0, 1), (2, 3, 2, 3), (0, 1, 0, 1), (2, 3, 2, 3)],
}


def permute(opcode: Opcode) -> Operation:
    """`prmt`. Faster where the selector is a literal: only the bytes it names are moved."""
    _code(opcode, "b32")
    opcode.allow(*_PERMUTE_MODES)
    mode = opcode.one_of(*_PERMUTE_MODES, default="generic")
    literal = opcode.immediates[2] if len(opcode.immediates) == 3 else None
    if literal is not None:
        selector = literal & 0xFFFF if mode == "generic" else _selector(_PERMUTE_MODES[mode][literal & 3])
        return Operation(_permute_by(selector), ("u4", "u4"), "u4")
    if mode == "generic":
        return Operation(_permute, ("u4",) * 3, "u4")
    selectors = np.array([_selector(sources) for sources in _PERMUTE_MODES[mode]], "u4")
    return Operation(lambda a, b, c: _permute(a, b, selectors[c & 3]), ("u4",) * 3, "u4")


def _selector(sources: tuple[int, ...]) -> int:
    return sum(source << (4 * i) for i, source in enumerate(sources))


_NIBBLES = np.arange(0, 16, 4, dtype="u4")


def _permute(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """Each four bits of the selector choose a byte of {b, a}; the highest of the four replicates its sign."""
    both = (b.astype("u8") << 32) | a
    nibbles = np.asarray(selector)[..., None] >> _NIBBLES
    chosen = (np.asarray(both)[..., None] >> ((nibbles & 7) << 3)).astype("i1")
    # An arithmetic shift by 7 leaves the sign in every bit.
    return join(chosen >> (((nibbles >> 3) & 1) * 7).astype("i1"))


def _permute_by(selector: int) -> Callable:
    nibbles = [selector >> (4 * i) & 15 for i in range(4)]
    signs = [i for i in range(4) if nibbles[i] & 8]
    # Bytes that move by the same distance go together: (from b, distance) -> mask of their place in the result.
    moves: dict[tuple[bool, int], int] = {}
    for i, nibble in enumerate(nibbles):
        if not nibble & 8:
            key = (nibble > 3, 8 * (i - (nibble & 3)))
            moves[key] = moves.get(key, 0) | 0xFF << (8 * i)

    def function(a, b):
        result = (a ^ a) | (b ^ b) if len(moves) != 1 or signs else None
        for (from_b, distance), mask in moves.items():
            word = b if from_b else a
            word = word << distance if distance > 0 else word >> -distance
            word = word & mask
            result = word if result is None else result | word
        for i in signs:
            word = b if nibbles[i] & 4 else a
            result = result | (((word >> (8 * (nibbles[i] & 3) + 7)) & 1) * (0xFF << (8 * i)))
        return result

    return function
