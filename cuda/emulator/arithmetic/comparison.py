"""Comparisons: `setp`, `set`, `slct`, `testp`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .formats import bfloat16_to_float32
from .operation import CODES, Opcode, Operation
from .parts import join, split
from .rounding import before, flush, flush_half


def _unordered(opposite: Callable) -> Callable:
    """True also where an operand is NaN: not the ordered opposite."""
    return lambda a, b: ~opposite(a, b)


def _unequal(a, b):
    return (a < b) | (a > b)


_ORDERED: dict[str, Callable] = {
    "eq": np.equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
INTEGER = _ORDERED | {
    "ne": np.not_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
}
FLOAT = _ORDERED | {
    "ne": _unequal,
    "equ": _unordered(_unequal),
    "neu": np.not_equal,
    "ltu": _unordered(np.greater_equal),
    "leu": _unordered(np.greater),
    "gtu": _unordered(np.less_equal),
    "geu": _unordered(np.less),
    "num": lambda a, b: (a == a) & (b == b),
    "nan": lambda a, b: (a != a) | (b != b),
}
_COMBINE = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}
_COMPARISONS = tuple(INTEGER | FLOAT)


def _comparison(opcode: Opcode, kind: str) -> tuple[Callable, str]:
    """The comparison of two values of type `kind`, as bools, and the type code of its operands.

    Of packed types it compares the halves, along a new last axis.
    """
    opcode.allow(*_COMPARISONS, *_COMBINE, "ftz")
    name = opcode.one_of(*_COMPARISONS)
    if kind not in CODES or kind in ("pred", "b8", "u8", "s8", "tf32", "u16x2", "s16x2"):
        raise opcode.unsupported(f"type .{kind}")
    is_float = kind.startswith(("f", "bf"))
    allowed = FLOAT if is_float else INTEGER
    if name not in allowed or (kind[0] == "b" and not is_float and name not in ("eq", "ne")):
        raise opcode.unsupported(f".{name} of .{kind}")
    if opcode.has("ftz") and kind not in ("f32", "f16", "f16x2"):
        raise opcode.unsupported(f".ftz of .{kind}")
    function = allowed[name]
    if kind.startswith("bf16"):
        function = before(function, bfloat16_to_float32, 2)
    if opcode.has("ftz"):
        function = before(function, flush if kind == "f32" else flush_half, 2)
    if kind.endswith("x2"):
        code = "u2" if kind.startswith("bf16") else "f2"
        function = before(function, lambda x: split(x, code), 2)
    return function, CODES[kind]


def _combining(opcode: Opcode) -> Callable | None:
    names = [name for name in _COMBINE if opcode.has(name)]
    if len(names) > 1:
        raise opcode.unsupported("one Boolean operator at most")
    return _COMBINE[names[0]] if names else None


def set_predicate(opcode: Opcode) -> Operation:
    """`setp`. The second destination is the complement, of packed types the upper half."""
    kind = opcode.type
    compare, code = _comparison(opcode, kind)
    combine = _combining(opcode)
    if kind.endswith("x2"):
        results = [lambda a, b: compare(a, b)[..., 0], lambda a, b: compare(a, b)[..., 1]]
    else:
        results = [compare, lambda a, b: ~compare(a, b)]
    if combine is None:
        return Operation(results[0], (code, code), "b1", results[1])
    first, second = (_combined(result, combine) for result in results)
    return Operation(first, (code, code, "b1"), "b1", second)


def _combined(compare: Callable, combine: Callable) -> Callable:
    return lambda a, b, c: combine(compare(a, b), c)


# What "true" is, by destination type.
_TRUE: dict[str, np.generic] = {
    "u16": np.uint16(0xFFFF),
    "s16": np.int16(-1),
    "u32": np.uint32(0xFFFFFFFF),
    "s32": np.int32(-1),
    "f32": np.float32(1),
    "f16": np.float16(1),
    "bf16": np.uint16(0x3F80),
}


def set_value(opcode: Opcode) -> Operation:
    """`set`: 1.0 or all ones where the comparison holds, else 0; of packed types in each half."""
    if len(opcode.types) != 2:
        raise opcode.unsupported()
    target, kind = opcode.types
    compare, code = _comparison(opcode, kind)
    combine = _combining(opcode)
    if kind.endswith("x2"):
        if target not in (kind, "u32", "s32"):
            raise opcode.unsupported(f"to .{target}")
        true: np.generic = {"f16x2": np.uint16(0x3C00), "bf16x2": np.uint16(0x3F80)}.get(target, np.uint16(0xFFFF))

        def function(a, b, *c):
            holds = compare(a, b)
            if combine is not None:
                holds = combine(holds, np.asarray(c[0])[..., None])
            return join(np.where(holds, true, np.uint16(0)))

        output = "u4"
    else:
        if target not in _TRUE:
            raise opcode.unsupported(f"to .{target}")
        true, output = _TRUE[target], CODES[target]
        zero = true.dtype.type(0)

        def function(a, b, *c):
            holds = compare(a, b)
            return np.where(combine(holds, c[0]) if combine is not None else holds, true, zero)

    return Operation(function, (code, code) if combine is None else (code, code, "b1"), output)


def select_by_sign(opcode: Opcode) -> Operation:
    """`slct`: a where c >= 0, otherwise b (also where c is NaN)."""
    if len(opcode.types) != 2 or opcode.types[1] not in ("s32", "f32"):
        raise opcode.unsupported()
    target, kind = opcode.types
    opcode.allow(*(("ftz",) if kind == "f32" else ()))
    code = CODES[target].replace("i", "u").replace("f", "u")
    function = (lambda a, b, c: np.where(flush(c) >= 0, a, b)) if opcode.has("ftz") else _select_by_sign
    return Operation(function, (code, code, CODES[kind]), code)


def _select_by_sign(a, b, c):
    return np.where(c >= 0, a, b)


def _is_subnormal(x: np.ndarray) -> np.ndarray:
    return (np.abs(x) < np.finfo(x.dtype).smallest_normal) & (x != 0)


_TESTS: dict[str, Callable] = {
    "finite": np.isfinite,
    "infinite": np.isinf,
    "number": lambda x: x == x,
    "notanumber": np.isnan,
    "normal": lambda x: np.isfinite(x) & ~_is_subnormal(x),
    "subnormal": _is_subnormal,
}


def test(opcode: Opcode) -> Operation:
    """`testp`. Zeros count as normal."""
    code = CODES[opcode.type]
    if code not in ("f4", "f8"):
        raise opcode.unsupported()
    opcode.allow(*_TESTS)
    return Operation(_TESTS[opcode.one_of(*_TESTS)], (code,), "b1")
