"""Instructions that only mutants have: `altered.<how>.<opcode>` in place of an opcode."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..instructions.handler import Handler, handler_of, handles, unsupported
from ..ptx.syntax import Instruction

_PREFIX = "altered"


def altered(instruction: Instruction, how: str) -> Instruction:
    """The instruction as a mutant has it.

    Args:
      instruction: of the kernel.
      how: "nothing": it has no effect; "passed": a wait that is over at once; "flipped": a wait for the other parity;
        "everyone": an elect.sync that elects all lanes.
    """
    return replace(instruction, opcode=f"{_PREFIX}.{how}.{instruction.opcode}")


def _original(instruction: Instruction) -> Handler:
    original = replace(instruction, opcode=".".join(instruction.parts[2:]))
    handler = handler_of(original)
    if handler is None:
        raise unsupported(original)
    return handler


@handles(f"{_PREFIX}.nothing")
def nothing(instruction: Instruction) -> Handler:
    return Handler(lambda warp, mask: None)


@handles(f"{_PREFIX}.passed")
def passed(instruction: Instruction) -> Handler:
    return Handler(lambda warp, mask: True, outputs=_original(instruction).outputs, uniform="always")


@handles(f"{_PREFIX}.flipped")
def flipped(instruction: Instruction) -> Handler:
    original = _original(instruction)
    return replace(original, run=lambda warp, mask, address, parity: original.run(warp, mask, address, parity ^ 1))


@handles(f"{_PREFIX}.everyone")
def everyone(instruction: Instruction) -> Handler:
    original = _original(instruction)
    kinds = [output.type for output in original.outputs]

    def run(warp, mask, members):
        leader = 0 if isinstance(members, int) else np.zeros(32, np.uint32)
        results = tuple(np.ones(32, bool) if kind == "pred" else leader for kind in kinds)
        return results if len(results) > 1 else results[0]

    return Handler(run, original.inputs, original.outputs, uniform=original.uniform)
