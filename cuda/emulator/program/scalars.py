"""Operations on values that all lanes share, as Python expressions of ints."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

_INTEGER = re.compile(r"([subp])(8|16|32|64)|pred")
_SIGNED_ORDER = {"lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_UNSIGNED_ORDER = {**_SIGNED_ORDER, "lo": "<", "ls": "<=", "hi": ">", "hs": ">="}


def _signed(x: str, bits: int) -> str:
    return f"(({x} ^ {1 << bits - 1:#x}) - {1 << bits - 1:#x})"


def expression(key: tuple, sources: list[str]) -> str | None:
    """Python for an operation of ints, or None when it has to be done with an array of one element."""
    if key[0] in _OWN:
        return _OWN[key[0]](key, sources)
    kind = next((part for part in reversed(key) if isinstance(part, str)), None)
    match = _INTEGER.fullmatch(kind) if isinstance(kind, str) else None
    if match is None or match[2] == "8":
        return None
    bits = int(match[2] or 1)
    maker = _INTEGERS.get(key[0])
    return maker(key, sources, match[1] == "s", bits) if maker else None


def _masked(text: str, bits: int) -> str:
    return f"({text}) & {(1 << bits) - 1:#x}"


def _wide(key, x, signed: bool, bits: int, text: str) -> str:
    return _masked(text.format(*[_signed(v, bits) if signed and i < 2 else v for i, v in enumerate(x)]), 2 * bits)


def _mul(key, x, signed, bits):
    if "wide" in key:
        return _wide(key, x, signed, bits, "{0} * {1}")
    if "lo" in key:
        return _masked(f"{x[0]} * {x[1]}", bits)
    if "hi" in key and not signed:
        return f"{x[0]} * {x[1]} >> {bits}"
    return None


def _mad(key, x, signed, bits):
    if "wide" in key:
        return _wide(key, x, signed, bits, "{0} * {1} + {2}")
    return _masked(f"{x[0]} * {x[1]} + {x[2]}", bits) if "lo" in key else None


def _shl(key, x, signed, bits):
    if x[1].isdigit():
        return _masked(f"{x[0]} << {x[1]}", bits) if int(x[1]) < bits else "0"
    return f"{_masked(f'{x[0]} << {x[1]}', bits)} if {x[1]} < {bits} else 0"


def _shr(key, x, signed, bits):
    if signed:
        return _masked(f"{_signed(x[0], bits)} >> min({x[1]}, {bits - 1})", bits)
    return f"{x[0]} >> {x[1]}"


def _setp(key, x, signed, bits):
    if len(x) != 2 or key[-1] == "second":
        return None
    compare = key[1]
    if compare in ("eq", "ne"):
        return f"{x[0]} {'==' if compare == 'eq' else '!='} {x[1]}"
    if signed:
        return f"{_signed(x[0], bits)} {_SIGNED_ORDER[compare]} {_signed(x[1], bits)}"
    return f"{x[0]} {_UNSIGNED_ORDER[compare]} {x[1]}"


def _extreme(key, x, signed, bits):
    if len(x) != 2 or "relu" in key:
        return None
    if signed:
        return _masked(f"{key[0]}({_signed(x[0], bits)}, {_signed(x[1], bits)})", bits)
    return f"{key[0]}({x[0]}, {x[1]})"


def _div(key, x, signed, bits):
    if signed:
        return _masked(f"truncated_quotient({_signed(x[0], bits)}, {_signed(x[1], bits)})", bits)
    return f"{x[0]} // {x[1]} if {x[1]} else {(1 << bits) - 1:#x}"


def _cvt(key, x, signed, bits):
    strings = [part for part in key if isinstance(part, str)]
    to = _INTEGER.fullmatch(strings[-2])
    if to is None or to[2] is None or to[2] == "8" or "sat" in key:
        return None
    # The source may be wider than its type.
    source = f"({_masked(x[0], bits)})"
    return _masked(_signed(source, bits) if signed else source, int(to[2]))


_INTEGERS: dict[str, Callable] = {
    "add": lambda k, x, s, b: _masked(f"{x[0]} + {x[1]}", b) if "sat" not in k else None,
    "sub": lambda k, x, s, b: _masked(f"{x[0]} - {x[1]}", b) if "sat" not in k else None,
    "neg": lambda k, x, s, b: _masked(f"-{x[0]}", b),
    "and": lambda k, x, s, b: f"{x[0]} & {x[1]}",
    "or": lambda k, x, s, b: f"{x[0]} | {x[1]}",
    "xor": lambda k, x, s, b: f"{x[0]} ^ {x[1]}",
    "not": lambda k, x, s, b: f"not {x[0]}" if b == 1 else f"{x[0]} ^ {(1 << b) - 1:#x}",
    "mul": _mul,
    "mad": _mad,
    "shl": _shl,
    "shr": _shr,
    "setp": _setp,
    "min": _extreme,
    "max": _extreme,
    "div": _div,
    "cvt": _cvt,
}


def _unpack(key, x):
    _, _, width, part = key
    return _masked(f"{x[0]} >> {part * width}", width)


def _pack(key, x):
    _, _, width = key
    low = (1 << width) - 1
    return " | ".join(f"({v} & {low:#x}) << {i * width}" for i, v in enumerate(x))


_OWN: dict[str, Callable] = {
    "select": lambda k, x: f"{x[1]} if {x[0]} else {x[2]}",
    "join": lambda k, x: f"{x[0]} | {x[1]} << 32",
    "unpack": _unpack,
    "pack": _pack,
    "complement": lambda k, x: f"not {x[0]}",
}


def truncated_quotient(a: int, b: int) -> int:
    if b == 0:
        return -1
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def by_array(function: Callable, types: tuple[str, ...], result: str) -> Callable:
    """The operation of arrays as one of ints."""
    raw = [np.dtype("?" if t == "b1" else "u" + t[1]) for t in types]
    typed = [np.dtype("?" if t == "b1" else t) for t in types]
    # Registers may be wider than the type.
    masks = [1 if t == "b1" else (1 << 8 * int(t[1])) - 1 for t in types]
    bits = np.dtype("?" if result == "b1" else "u" + result[1])

    def scalar(*values):
        arrays = [np.array([v & m], r).view(t) for v, m, r, t in zip(values, masks, raw, typed, strict=True)]
        return np.asarray(function(*arrays)).view(bits)[0].item()

    return scalar
