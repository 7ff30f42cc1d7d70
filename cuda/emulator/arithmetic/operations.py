"""From the opcode of a register-to-register instruction to its meaning."""

from __future__ import annotations

import numpy as np

from . import approximate, bits, comparison, conversion, floating, half, integer
from .operation import Opcode, Operation

__all__ = ["Operation", "find"]


def find(parts: tuple[str, ...], immediates: tuple[int | None, ...] = ()) -> Operation | None:
    """The meaning of an opcode.

    Args:
      parts: the opcode split at its dots, such as ("fma", "rn", "ftz", "f32").
      immediates: one entry for each source operand, the raw value where it is a literal, otherwise None. `lop3` needs
        it for its table, `min.f32` and `max.f32` for the number of their operands; `prmt` is faster with it.

    Returns:
      The operation, or None if the instruction is no arithmetic between registers.

    Raises:
      UnsupportedInstructionError: a known instruction in a form that is not known.
    """
    make = _MAKERS.get(parts[0])
    if make is None:
        return None
    with np.errstate(all="ignore"):
        return make(Opcode.of(tuple(parts), tuple(immediates)))


def _kind(opcode: Opcode) -> str:
    """ "half", "float32", "float64", "mixed" or "integer"."""
    if not opcode.types:
        raise opcode.unsupported("no type")
    if len(opcode.types) == 2:
        return "mixed"
    kind = opcode.type
    if kind in half.TYPES:
        return "half"
    return {"f32": "float32", "f64": "float64"}.get(kind, "integer")


def _by_kind(**makers):
    """One maker for each kind of type."""

    def make(opcode: Opcode) -> Operation:
        maker = makers.get(_kind(opcode))
        if maker is None:
            raise opcode.unsupported()
        return maker(opcode)

    return make


def _divide(opcode: Opcode) -> Operation:
    if opcode.has("approx") or opcode.has("full"):
        return approximate.divide(opcode)
    return _DIVIDE(opcode)


def _root(opcode: Opcode) -> Operation:
    return approximate.function(opcode) if opcode.has("approx") else _ROOT(opcode)


_ADD = _by_kind(
    half=half.arithmetic,
    float32=floating.float32,
    float64=floating.float64,
    integer=integer.add_subtract,
    mixed=floating.mixed,
)
_MULTIPLY = _by_kind(half=half.arithmetic, float32=floating.float32, float64=floating.float64, integer=integer.multiply)
_FUSED = _by_kind(half=half.arithmetic, float32=floating.float32, float64=floating.float64, mixed=floating.mixed)
_MULTIPLY_ADD = _by_kind(float32=floating.float32, float64=floating.float64, integer=integer.multiply)
_DIVIDE = _by_kind(float32=floating.float32, float64=floating.float64, integer=integer.divide)
_ROOT = _by_kind(float32=floating.float32, float64=floating.float64)
_EXTREMUM = _by_kind(half=half.minmax, float32=floating.minmax, float64=floating.minmax, integer=integer.minmax)
_ABSOLUTE = _by_kind(half=half.absolute, float32=floating.absolute, float64=floating.absolute, integer=integer.absolute)
_NEGATE = _by_kind(half=half.negate, float32=floating.negate, float64=floating.negate, integer=integer.negate)

_MAKERS = {
    "add": _ADD,
    "sub": _ADD,
    "mul": _MULTIPLY,
    "mad": _MULTIPLY_ADD,
    "fma": _FUSED,
    "mul24": integer.multiply24,
    "mad24": integer.multiply24,
    "div": _divide,
    "rem": integer.divide,
    "min": _EXTREMUM,
    "max": _EXTREMUM,
    "abs": _ABSOLUTE,
    "neg": _NEGATE,
    "sad": integer.sum_of_differences,
    "dp4a": integer.dot_product,
    "dp2a": integer.dot_product,
    "and": bits.logic,
    "or": bits.logic,
    "xor": bits.logic,
    "not": bits.invert,
    "cnot": bits.logical_not,
    "lop3": bits.lookup3,
    "shl": bits.shift,
    "shr": bits.shift,
    "shf": bits.funnel_shift,
    "bfe": bits.extract_field,
    "bfi": bits.insert_field,
    "bfind": bits.find_leading,
    "brev": bits.reverse,
    "clz": bits.count_leading_zeros,
    "popc": bits.count_ones,
    "prmt": bits.permute,
    "rcp": _root,
    "sqrt": _root,
    "rsqrt": approximate.function,
    "ex2": approximate.function,
    "lg2": approximate.function,
    "sin": approximate.function,
    "cos": approximate.function,
    "tanh": approximate.function,
    "copysign": floating.copysign,
    "setp": comparison.set_predicate,
    "set": comparison.set_value,
    "slct": comparison.select_by_sign,
    "testp": comparison.test,
    "cvt": conversion.convert,
}
