"""`cvt` to and from packed types: f16x2, bf16x2, the 8-, 6- and 4-bit formats, ue8m0; and tf32."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from . import formats
from .operation import CODES, SMALL_PAIRS, SMALL_QUADS, Opcode, Operation
from .parts import split
from .rounding import after, before, canonical, directed, relu

_LARGEST = {
    "f16x2": np.float32(65504.0),
    "bf16x2": np.float32(2.0**128 - 2.0**120),
    "tf32": np.float32(2.0**128 - 2.0**117),
}


def convert(opcode: Opcode) -> Operation:
    target, source = opcode.types
    if source in SMALL_PAIRS:
        return _unpack(opcode)
    if target in SMALL_QUADS:
        raise opcode.unsupported("the ISA does not say how random bits are added to four values")
    if target == "ue8m0x2":
        return _to_ue8m0(opcode)
    if target in SMALL_PAIRS:
        return _to_small(opcode)
    if source == "f32" and target == "tf32":
        return _to_tf32(opcode)
    if source == "f32" and target in ("f16x2", "bf16x2"):
        return _to_halves(opcode)
    raise opcode.unsupported()


def _unpack(opcode: Opcode) -> Operation:
    """Pairs of small codes to `f16x2` (from ue8m0 to `bf16x2`), all exact: one look in a table."""
    target, source = opcode.types
    if target not in ("f16x2", "bf16x2") or (source == "ue8m0x2") != (target == "bf16x2"):
        raise opcode.unsupported()
    opcode.allow("rn", *(() if source == "ue8m0x2" else ("relu",)))
    opcode.one_of("rn")
    table = formats.decode_pairs(source.removesuffix("x2"), target.removesuffix("x2"), opcode.has("relu"))
    if len(table) == 256:
        return Operation(lambda x: table.take(x & 0xFF), ("u2",), "u4")
    return Operation(lambda x: table.take(x), ("u2",), "u4")


def _float32_bits(source: str) -> Callable:
    """The bits of float32 values from the halves of `f16x2` or `bf16x2`, the upper one first."""

    def halves(x):
        parts = split(x, "u2" if source == "bf16x2" else "f2")
        parts = formats.bfloat16_to_float32(parts) if source == "bf16x2" else parts.astype("f4")
        bits = parts.view("u4")
        return bits[..., 1], bits[..., 0]

    return halves


def _by_tables(upper: np.ndarray, lower: np.ndarray, source: str, output: str, opcode: Opcode) -> Operation:
    """Two float32, or the halves of one word, to the codes in the tables of the bfloat16 values."""

    def look(high, low):
        return upper.take(formats.sticky_bfloat16(high)) | lower.take(formats.sticky_bfloat16(low))

    if source == "f32":
        return Operation(lambda a, b: look(a.view("u4"), b.view("u4")), ("f4", "f4"), output)
    if source in ("f16x2", "bf16x2"):
        halves = _float32_bits(source)
        return Operation(lambda x: look(*halves(x)), ("u4",), output)
    raise opcode.unsupported()


def _to_small(opcode: Opcode) -> Operation:
    target, source = opcode.types
    opcode.allow("rn", "satfinite", "relu")
    opcode.one_of("rn")
    opcode.one_of("satfinite")
    name = target.removesuffix("x2")
    step = 4 if name == "e2m1" else 8
    upper, lower = (formats.encode_table(name, opcode.has("relu"), shift, "u2") for shift in (step, 0))
    return _by_tables(upper, lower, source, "u2", opcode)


def _to_ue8m0(opcode: Opcode) -> Operation:
    _, source = opcode.types
    opcode.allow("rz", "rp", "satfinite")
    rounding = opcode.one_of("rz", "rp")
    upper, lower = (formats.ue8m0_table(rounding, opcode.has("satfinite"), shift) for shift in (8, 0))
    if source == "f16x2":
        raise opcode.unsupported()
    return _by_tables(upper, lower, source, "u2", opcode)


def _prepare(opcode: Opcode) -> Callable | None:
    """What happens to float32 values before they are rounded: `.relu`, `.satfinite`."""
    largest = _LARGEST[opcode.types[0]]

    def clamp(x):
        return np.minimum(np.maximum(x, -largest), largest)

    steps = ([relu] if opcode.has("relu") else []) + ([clamp] if opcode.has("satfinite") else [])
    return after(*steps) if steps else None


def _to_tf32(opcode: Opcode) -> Operation:
    """The low 13 bits of the result are zero, also those of a NaN, 0x7fffe000 (measured on an H200)."""
    opcode.allow("rn", "rz", "rna", "satfinite", "relu")
    rounding = opcode.one_of("rn", "rz", "rna")
    if rounding == "rna":
        return _to_tf32_away(opcode)
    prepare = _prepare(opcode)

    def function(x):
        bits = np.asarray(x if prepare is None else prepare(x)).view("u4")
        rounded = bits + (((bits >> 13) & 1) + 0xFFF) if rounding == "rn" else bits
        return np.where(x != x, np.uint32(0x7FFFE000), rounded & 0xFFFFE000)

    return Operation(function, ("f4",), "u4")


def _to_tf32_away(opcode: Opcode) -> Operation:
    """`.rna`: half of the last place is added to the magnitude of finite values, then the low 13 bits are cut off.

    A NaN is cut off too, so that one with few payload bits becomes infinity. `.satfinite` subtracts one in the last
    place from what is not finite: right for infinity, but a NaN with the least payload becomes infinity and most
    others stay NaN. The ISA has neither; both are what ptxas 13.0 makes of the instruction, confirmed on an H200.
    """
    if opcode.has("relu"):
        raise opcode.unsupported(".relu with .rna")
    satfinite = opcode.has("satfinite")

    def function(x):
        bits = np.asarray(x).view("u4")
        result = (bits + np.where(np.isfinite(x), np.uint32(0x1000), np.uint32(0))) & 0xFFFFE000
        if satfinite:
            result = result - np.where((result & 0x7FFFFFFF) >= 0x7F800000, np.uint32(0x2000), np.uint32(0))
        return result

    return Operation(function, ("f4",), "u4")


def _to_halves(opcode: Opcode) -> Operation:
    """Two float32 to `f16x2` or `bf16x2`, the first in the upper half."""
    target, _ = opcode.types
    opcode.allow("rn", "rz", "rs", "satfinite", "relu")
    rounding = opcode.one_of("rn", "rz", "rs")
    if rounding == "rs":
        function = _stochastic_bfloat16(opcode)
    elif target == "bf16x2":
        function = _bfloat16_pair(rounding)
    else:
        function = _float16_pair(rounding)
    prepare = _prepare(opcode)
    if prepare is not None:
        function = before(function, prepare, 2)
    return Operation(function, ("f4", "f4", "u4") if rounding == "rs" else ("f4", "f4"), CODES[target])


def _with_nan(a: np.ndarray, b: np.ndarray, result: np.ndarray) -> np.ndarray:
    """The packed result with the canonical NaN where an operand is NaN."""
    both = a + b
    if not np.count_nonzero(both != both):
        return result
    result = np.where(a != a, (result & 0xFFFF) | 0x7FFF0000, result)
    return np.where(b != b, (result & 0xFFFF0000) | 0x7FFF, result)


def _bfloat16_pair(rounding: str) -> Callable:
    def function(a, b):
        upper = formats.round_bfloat16(a.view("u4"), rounding) & 0xFFFF0000
        lower = formats.round_bfloat16(b.view("u4"), rounding) >> 16
        return _with_nan(a, b, upper | lower)

    return function


def _float16_pair(rounding: str) -> Callable:
    def narrow(x):
        if rounding == "rn":
            return x.astype("f2")
        return directed(x.astype("f8"), "f2", rounding)

    def function(a, b):
        upper, lower = (np.asarray(canonical(narrow(x))).view("u2").astype("u4") for x in (a, b))
        return (upper << 16) | lower

    return function


def _stochastic_bfloat16(opcode: Opcode) -> Callable:
    """The random half word is added to the half word that is cut off; its carry rounds up."""
    if opcode.types[0] != "bf16x2":
        raise opcode.unsupported("the ISA does not say which bits decide for subnormal results")

    def function(a, b, random):
        upper = (a.view("u4") + (random >> 16)) & 0xFFFF0000
        lower = (b.view("u4") + (random & 0xFFFF)) >> 16
        return _with_nan(a, b, upper | lower)

    return function
