"""ldmatrix, stmatrix and mma.sync."""

from __future__ import annotations

import re

import numpy as np

from ..errors import MemoryFaultError
from ..machine.memory import OFFSET_MASK, RANK_SHIFT, SharedMemory
from ..machine.warp import Warp
from ..ptx.syntax import Instruction, Vector
from ..tensor_core.formats import ACCUMULATORS, WIDTH, decode
from ..tensor_core.fragments import a_rows, accumulator_registers, accumulators, b_rows
from ..tensor_core.products import multiply, to_accumulator
from .access import address_value
from .handler import Handler, Rows, Value, handles, per_lane, unsupported

# ---- 8x8 matrices of 16 bits ----


def _matrices(instruction: Instruction) -> tuple[int, bool]:
    """How many matrices, and whether they are transposed."""
    parts = instruction.parts
    count = next((int(p[1:]) for p in parts if p in ("x1", "x2", "x4")), None)
    if count is None or "m8n8" not in parts or parts[-1] != "b16":
        raise unsupported(instruction)
    return count, "trans" in parts


def _row_words(warp: Warp, addresses, count: int, instruction: Instruction) -> tuple[SharedMemory, np.ndarray]:
    """The shared memory and the offsets (rows * 2) of the 8-byte words of the rows that the first lanes address."""
    rows = per_lane(addresses, np.uint64)[: 8 * count].astype(np.int64)
    cta, _ = warp.cta.shared_target(int(rows[0]), instruction)
    if (rows >> RANK_SHIFT != cta.rank).any() or (rows & 15).any():
        raise MemoryFaultError(f"{instruction.where}: rows of matrices in several CTAs or not aligned to 16 bytes")
    return cta.shared, ((rows & OFFSET_MASK)[:, None] + np.array([0, 8])).reshape(-1)


def _registers(operand: object) -> tuple:
    return operand.items if isinstance(operand, Vector) else (operand,)


@handles("ldmatrix")
def load(instruction: Instruction) -> Handler:
    """`ldmatrix registers, [row address]`: lanes 8 i to 8 i + 7 address the rows of matrix i."""
    count, transposed = _matrices(instruction)
    destinations = _registers(instruction.operands[0])
    if len(destinations) != count:
        raise unsupported(instruction, f"{len(destinations)} registers")

    def run(warp: Warp, mask, addresses):
        wait = warp.converged(mask)
        if wait is not None:
            return wait
        shared, words = _row_words(warp, addresses, count, instruction)
        data = shared.read(words, 8, warp.actor, instruction)
        elements = data.view(np.uint16).reshape(count, 8, 8)
        if transposed:
            elements = elements.transpose(0, 2, 1)
        return np.ascontiguousarray(elements).view(np.uint32).reshape(count, 32)

    inputs = [address_value(instruction.operands[1])]
    return Handler(run, inputs=inputs, outputs=[Rows(destinations)], convergent=True)


@handles("stmatrix")
def store(instruction: Instruction) -> Handler:
    """`stmatrix [row address], registers`: the reverse of ldmatrix."""
    count, transposed = _matrices(instruction)
    sources = _registers(instruction.operands[1])
    if len(sources) != count:
        raise unsupported(instruction, f"{len(sources)} registers")

    def run(warp: Warp, mask, addresses, values):
        wait = warp.converged(mask)
        if wait is not None:
            return wait
        shared, words = _row_words(warp, addresses, count, instruction)
        elements = np.ascontiguousarray(values).view(np.uint16).reshape(count, 8, 8)
        if transposed:
            elements = np.ascontiguousarray(elements.transpose(0, 2, 1))
        shared.write(words, elements.reshape(-1).view(np.uint64), 8, warp.actor, instruction)
        return None

    inputs: list[Value | Rows] = [address_value(instruction.operands[0]), Rows(sources)]
    return Handler(run, inputs=inputs, convergent=True)


# ---- mma.sync ----

_SHAPE = re.compile(r"m16n8k(\d+)")


@handles("mma.sync")
def multiply_accumulate(instruction: Instruction) -> Handler:
    """`mma.sync.aligned.m16n8k.row.col.d.a.b.c d, a, b, c` of dense matrices."""
    saturate = "satfinite" in instruction.parts
    parts = [p for p in instruction.parts if p not in ("sync", "aligned", "satfinite")]
    shape = _SHAPE.fullmatch(parts[1])
    if shape is None or len(parts) != 8 or parts[2:4] != ["row", "col"]:
        raise unsupported(instruction)
    kind, a_type, b_type, c_type = parts[4:]
    if kind != c_type or kind not in ACCUMULATORS.get(a_type, ()) or kind not in ACCUMULATORS.get(b_type, ()):
        raise unsupported(instruction, "the types")
    operands = [_registers(operand) for operand in instruction.operands]
    words = int(shape[1]) * WIDTH[a_type] // 128
    counts = [2 if kind == "f16" else 4, 2 * words, words]
    if words not in (1, 2) or WIDTH[a_type] != WIDTH[b_type] or [len(o) for o in operands] != [*counts, counts[0]]:
        raise unsupported(instruction, "the shape")

    def run(warp: Warp, mask, a, b, c):
        wait = warp.converged(mask)
        if wait is not None:
            return wait
        product = multiply(decode(a_rows(a), a_type), decode(b_rows(b), b_type))
        return accumulator_registers(to_accumulator(product, accumulators(c, kind), kind, saturate), kind)

    return Handler(run, inputs=[Rows(o) for o in operands[1:]], outputs=[Rows(operands[0])], convergent=True)
