"""The element-wise reductions of bulk copies, on bytes (PTX ISA, cp.reduce.async.bulk)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Reduction = Callable[[np.ndarray, np.ndarray], np.ndarray]

_INTEGERS = {"u32": np.uint32, "s32": np.int32, "u64": np.uint64, "s64": np.int64, "b32": np.uint32, "b64": np.uint64}
_HALVES = ("f16", "bf16")
_HALF_NAN = 0x7FFF
_FLOAT_NAN = 0x7FFFFFFF
_INFINITY = {"f16": 0x7C00, "bf16": 0x7F80}

# Valid combinations by destination.
_BITWISE = ("and", "or", "xor")
GLOBAL = {
    "add": ("u32", "s32", "u64", "f32", "f64", "f16", "bf16"),
    **dict.fromkeys(("min", "max"), ("u32", "s32", "u64", "s64", "f16", "bf16")),
    **dict.fromkeys(("inc", "dec"), ("u32",)),
    **dict.fromkeys(_BITWISE, ("b32", "b64")),
}
SHARED = {
    "add": ("u32", "s32", "u64"),
    **dict.fromkeys(("min", "max"), ("u32", "s32")),
    **dict.fromkeys(("inc", "dec"), ("u32",)),
    **dict.fromkeys(_BITWISE, ("b32",)),
}
# By the element type of a tensor map; f32_ftz flushes subnormal inputs and results.
TENSOR = {
    "add": ("u32", "s32", "u64", "f32", "f32_ftz", "f16", "bf16"),
    **dict.fromkeys(("min", "max"), ("u32", "s32", "u64", "s64", "f16", "bf16")),
    **dict.fromkeys(("inc", "dec"), ("u32",)),
    **dict.fromkeys(_BITWISE, ("u32", "s32", "u64", "s64")),
}


def reduction(operation: str, kind: str) -> Reduction:
    """`function(old, new)` of contiguous uint8 arrays of one shape, for a valid operation and element type."""
    compute = _function(operation, kind)
    dtype = (
        _INTEGERS.get(kind)
        or {2: np.uint16, 4: np.uint32, 8: np.uint64}[2 if kind in _HALVES else 8 if kind == "f64" else 4]
    )

    def function(old: np.ndarray, new: np.ndarray) -> np.ndarray:
        result = compute(old.view(dtype), np.ascontiguousarray(new).view(dtype))
        return np.ascontiguousarray(result, dtype).view(np.uint8)

    return function


def _function(operation: str, kind: str) -> Reduction:
    """The operation on raw bits."""
    if operation in _BITWISE:
        return {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[operation]
    if operation == "inc":
        return lambda old, new: np.where(old >= new, 0, old + np.uint32(1))
    if operation == "dec":
        return lambda old, new: np.where((old == 0) | (old > new), new, old - np.uint32(1))
    if kind in _HALVES:
        return _add_halves(kind) if operation == "add" else _extremum(operation, kind)
    if kind in _INTEGERS:
        return {"add": np.add, "min": np.minimum, "max": np.maximum}[operation]
    if kind == "f64":
        return lambda old, new: (old.view(np.float64) + new.view(np.float64)).view(np.uint64)
    return _add_floats(flush=kind == "f32_ftz")


def _add_floats(flush: bool) -> Reduction:
    def add(old: np.ndarray, new: np.ndarray) -> np.ndarray:
        if flush:
            old, new = _flushed(old), _flushed(new)
        with np.errstate(over="ignore", invalid="ignore"):
            bits = (old.view(np.float32) + new.view(np.float32)).view(np.uint32)
        bits = np.where((bits & 0x7FFFFFFF) > 0x7F800000, np.uint32(_FLOAT_NAN), bits)
        return _flushed(bits) if flush else bits

    return add


def _flushed(bits: np.ndarray) -> np.ndarray:
    return np.where(bits & 0x7F800000 == 0, bits & 0x80000000, bits).astype(np.uint32)


def _add_halves(kind: str) -> Reduction:
    """Sums of 16-bit floats through float32, whose second rounding is innocuous (24 >= 2 * 11 + 2 bits)."""

    def add(old: np.ndarray, new: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore", invalid="ignore"):
            if kind == "f16":
                bits = (
                    (old.view(np.float16).astype(np.float32) + new.view(np.float16)).astype(np.float16).view(np.uint16)
                )
            else:
                total = (_wide(old) + _wide(new)).view(np.uint32)
                bits = (total + 0x7FFF + (total >> 16 & 1) >> 16).astype(np.uint16)
                bits = np.where((total & 0x7FFFFFFF) > 0x7F800000, np.uint16(_HALF_NAN), bits)
        return np.where(bits & 0x7FFF > _INFINITY[kind], np.uint16(_HALF_NAN), bits)

    return add


def _wide(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _extremum(operation: str, kind: str) -> Reduction:
    """min and max of 16-bit floats: -0 is below +0, and a number wins over NaN."""

    def key(bits: np.ndarray) -> np.ndarray:
        signed = bits.view(np.int16)
        return np.where(signed < 0, signed ^ 0x7FFF, signed)

    def choose(old: np.ndarray, new: np.ndarray) -> np.ndarray:
        nan = [bits & 0x7FFF > _INFINITY[kind] for bits in (old, new)]
        first = key(old) <= key(new) if operation == "min" else key(old) >= key(new)
        picked = np.where((first | nan[1]) & ~nan[0], old, new)
        return np.where(nan[0] & nan[1], np.uint16(_HALF_NAN), picked)

    return choose
