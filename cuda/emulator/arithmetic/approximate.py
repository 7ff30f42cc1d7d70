"""The approximate functions, here the correctly rounded value wherever binary64 settles it.

BOUNDS gives, for each, how far the hardware may be from that by the PTX ISA.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from . import half
from .formats import bfloat16_to_float32
from .operation import Opcode, Operation
from .rounding import after, before, float32_to_odd_bits, flush


@dataclass(frozen=True)
class Bound:
    """How far the hardware may be from the true value (PTX ISA, notes on the instruction).

    Attributes:
      amount: the largest error.
      kind: "relative" or "absolute", from the exact value, or "ulp": how many values of the type from the correctly
        rounded one (so the ISA for `ex2`, and CUDA's mathematical functions; for `div` and `rcp` it says "ulp" alone).
      low, high: magnitudes of the operand for which it is promised; for `div`, of the divisor. The first one holds.
    """

    amount: float
    kind: str
    low: float = 0.0
    high: float = float("inf")


BOUNDS: dict[str, tuple[Bound, ...]] = {
    "ex2.approx.f32": (Bound(2.0, "ulp"),),
    "lg2.approx.f32": (Bound(2.0**-22, "absolute", 0.5, 2.0), Bound(2.0**-22, "relative")),
    "rcp.approx.f32": (Bound(1.0, "ulp"),),
    "rsqrt.approx.f32": (Bound(2.0**-22.9, "relative"),),
    "sqrt.approx.f32": (Bound(2.0**-23, "relative"),),
    "sin.approx.f32": (Bound(2.0**-20.5, "absolute", 0.0, float(np.pi)),),
    "cos.approx.f32": (Bound(2.0**-20.5, "absolute", 0.0, float(np.pi)),),
    "tanh.approx.f32": (Bound(2.0**-11, "relative"),),
    "div.approx.f32": (Bound(2.0, "ulp", 2.0**-126, 2.0**126),),
    "div.full.f32": (Bound(2.0, "ulp"),),
    "ex2.approx.f16": (Bound(2.0**-9.9, "relative"),),
    "ex2.approx.bf16": (Bound(2.0**-7, "relative"),),
    "tanh.approx.f16": (Bound(2.0**-10.987, "absolute"),),
    # The ISA says 2**-8; an H200 is 1.014 times as far off at 0.746.
    "tanh.approx.bf16": (Bound(1.02 * 2.0**-8, "absolute"),),
}


def _through_float64(function: Callable) -> Callable:
    return lambda x: function(x.astype("f8")).astype("f4")


def _ex2_ftz(x: np.ndarray) -> np.ndarray:
    """Flushing the operand changes nothing; the result is subnormal below -126."""
    return np.exp2(x.astype("f8")).astype("f4") * (x >= -126)


def _divide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """`div.approx`: a divisor beyond 2**126 has the reciprocal 0."""
    return np.where((np.abs(b) > 2.0**126) & np.isfinite(b), a * np.copysign(np.float32(0), b), a / b)


FUNCTIONS: dict[str, Callable] = {
    "ex2": np.exp2,
    "lg2": np.log2,
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
    "rcp": np.reciprocal,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: np.reciprocal(np.sqrt(x)),
}


def function(opcode: Opcode) -> Operation:
    """`ex2`, `lg2`, `sin`, `cos`, `tanh`, `rcp`, `sqrt`, `rsqrt`, all `.approx`."""
    opcode.one_of("approx")
    if opcode.type == "f32":
        opcode.allow("approx", *(() if opcode.name == "tanh" else ("ftz",)))
        if opcode.has("ftz") and opcode.name == "ex2":
            return Operation(_ex2_ftz, ("f4",), "f4")
        result = np.sqrt if opcode.name == "sqrt" else _through_float64(FUNCTIONS[opcode.name])
        if opcode.has("ftz"):
            result = after(before(result, flush, 1), flush)
        return Operation(result, ("f4",), "f4")
    if opcode.type not in half.TYPES or opcode.name not in ("ex2", "tanh"):
        raise opcode.unsupported()
    return _of_half(opcode)


def _of_half(opcode: Opcode) -> Operation:
    brain = opcode.type.startswith("bf16")
    opcode.allow("approx", *(("ftz",) if opcode.name == "ex2" and brain else ()))
    function = FUNCTIONS[opcode.name]
    if not brain:
        return half.operation(lambda x: half.to_float16(function(x.astype("f8"))), opcode.type, 1)
    if opcode.name == "ex2":
        opcode.one_of("ftz")
        return half.operation(half.of_float32(_ex2_ftz, brain, 1), opcode.type, 1)

    def rounded(x):
        return half.bits_to_bfloat16(float32_to_odd_bits(function(bfloat16_to_float32(x).astype("f8"))))

    return half.operation(rounded, opcode.type, 1)


def divide(opcode: Opcode) -> Operation:
    """`div.approx` and `div.full`."""
    opcode.allow("approx", "full", "ftz")
    if opcode.type != "f32":
        raise opcode.unsupported()
    result = _divide if opcode.one_of("approx", "full") == "approx" else np.divide
    if opcode.has("ftz"):
        result = after(before(result, flush, 2), flush)
    return Operation(result, ("f4", "f4"), "f4")
