"""How an instruction that is more than arithmetic is described to the program generator.

A family of instructions registers one function for each opcode prefix:

    @handles("mbarrier.arrive")
    def arrive(instruction: Instruction) -> Handler:
        ...
        return Handler(run, inputs=[...], outputs=[...])

It is called once for each instruction of a program. `run(warp, mask, *inputs)` is called each time that the
instruction is executed, with one value for each input:

- `Value(operand, type)`: a Python int (bool for predicates) where the operand is the same in all lanes,
  otherwise a (32,) array of raw bits (uint16, uint32, uint64 or bool). `lane_value(x, lane)` reads either.
- `Rows(operands, type)`: an (n, 32) array, one row for each register.

`mask` is None when all 32 lanes run, otherwise a (32,) bool array. Lanes outside it must have no effect.

`run` returns None, one value for its only output, or a tuple with one value for each output: (32,) arrays,
or Python ints (bools) where the result is `uniform`; an (n, 32) array for `Rows`. Instead it may return a
`Wait` if the handler says `blocking` or `convergent`; the instruction is then run again when the wait is ready.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import UnsupportedInstructionError
from ..ptx.syntax import Instruction


@dataclass(frozen=True)
class Value:
    """One operand; `type` is a PTX type ("u32", "b64", "f32", "pred", ...). `offset` is added to an address."""

    operand: object
    type: str
    offset: int = 0


@dataclass(frozen=True)
class Rows:
    """Several registers as the rows of one array. SINK is allowed in outputs."""

    operands: tuple
    type: str = "b32"


@dataclass(frozen=True)
class Handler:
    """What an instruction reads, writes and does.

    Attributes:
      run: see the module.
      inputs: of `run`, in order.
      outputs: of `run`, in order.
      blocking: `run` may return a Wait.
      convergent: needs all lanes of the warp together; `run` may return a Wait while they are not.
      uniform: the outputs are the same in all lanes that run: "always", "never", "inputs" (when the inputs are), or
        "lane" (when the inputs but the first are); or a tuple with one of these for each output.
    """

    run: Callable[..., Any]
    inputs: Sequence[Value | Rows] = ()
    outputs: Sequence[Value | Rows] = ()
    blocking: bool = False
    convergent: bool = False
    uniform: str | tuple[str, ...] = "never"


_HANDLERS: dict[str, Callable[[Instruction], Handler]] = {}


def handles(*prefixes: str):
    """Register a function for opcodes that start with any of the dotted prefixes; the longest prefix wins."""

    def register(make: Callable[[Instruction], Handler]):
        for prefix in prefixes:
            _HANDLERS[prefix] = make
        return make

    return register


def handler_of(instruction: Instruction) -> Handler | None:
    """The handler of an instruction, or None when no family claims its opcode."""
    parts = instruction.parts
    for n in range(len(parts), 0, -1):
        make = _HANDLERS.get(".".join(parts[:n]))
        if make is not None:
            return make(instruction)
    return None


def unsupported(instruction: Instruction, why: str = "") -> UnsupportedInstructionError:
    """The error to raise for a form that is not known."""
    return UnsupportedInstructionError(
        f"{instruction.where}: {instruction.opcode} is not supported" + (f": {why}" if why else "")
    )


def lane_value(value, lane: int) -> int:
    """The value of one lane, as a Python int."""
    return value if isinstance(value, (int, bool)) else int(value[lane])


def lanes(mask) -> list[int]:
    """The lanes that run."""
    return list(range(32)) if mask is None else np.flatnonzero(mask).tolist()


def leader(mask) -> int:
    """The lowest lane that runs."""
    return 0 if mask is None else int(np.argmax(mask))


def per_lane(value, dtype) -> np.ndarray:
    """The value as a (32,) array."""
    return np.full(32, value, dtype) if isinstance(value, (int, bool)) else value
