"""wgmma.mma_async and its groups.

Each warp of a warpgroup computes its own 16 of the 64 rows. The accumulators have their values at once; the reads of
shared memory are operations of an ordered stream of the warp. The instruction belongs to the whole warpgroup, so that
wgmma.wait_group in one warp waits for the groups of all four.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..checks.races import Actor
from ..machine.wait import Wait
from ..machine.warp import Warp
from ..ptx.syntax import Immediate, Instruction, Vector
from ..tensor_core.adders import wgmma_adder
from ..tensor_core.descriptors import located, wgmma_matrix
from ..tensor_core.formats import ACCUMULATORS, WIDTH, decode
from ..tensor_core.fragments import a_rows, accumulator_registers, accumulators
from ..tensor_core.operands import shared_operand
from ..tensor_core.products import multiply, to_accumulator
from .handler import Handler, Rows, Value, handles, lane_value, leader, unsupported

_SHAPE = re.compile(r"m64n(\d+)k(\d+)")
_K_BYTES = 32
_ROWS = 16  # of a warp


class _Stream:
    """What a warp has issued.

    Attributes:
      agent: stands for the stream in race checking.
      last: the actor of the newest operation, which knows all before it.
      groups: of each group committed, the actor of its last operation.
    """

    __slots__ = ("agent", "groups", "last")

    def __init__(self, agent: tuple) -> None:
        self.agent = agent
        self.last: Actor | None = None
        self.groups: list[Actor | None] = []


def _stream(warp: Warp) -> _Stream:
    kept = warp.pending["wgmma"]
    if not kept:
        kept.append(_Stream(("wgmma", warp.cta.index, warp.index)))
    return kept[0]


@dataclass(frozen=True, slots=True)
class Form:
    """What the opcode and the immediate operands say.

    Attributes:
      n: columns.
      accumulator: "f32", "f16" or "s32".
      a, b: formats.
      negative: the product is negated.
      a_transposed, b_transposed: M or N is contiguous in shared memory.
      saturate: integer accumulators saturate.
    """

    n: int
    accumulator: str
    a: str
    b: str
    negative: bool
    a_transposed: bool
    b_transposed: bool
    saturate: bool


def _form(instruction: Instruction) -> Form:
    parts = [p for p in instruction.parts if p not in ("sync", "aligned", "satfinite")]
    if len(parts) != 6 or (shape := _SHAPE.fullmatch(parts[2])) is None:
        raise unsupported(instruction)
    n, k, (accumulator, a, b) = int(shape[1]), int(shape[2]), parts[3:]
    if accumulator not in ACCUMULATORS.get(a, ()) or ACCUMULATORS[a] != ACCUMULATORS.get(b):
        raise unsupported(instruction, "the types")
    if not 8 <= n <= 256 or n % 8 or k * WIDTH[a] != 8 * _K_BYTES or WIDTH[a] != WIDTH[b]:
        raise unsupported(instruction, "the shape")
    immediates = instruction.operands[4:]
    if not all(isinstance(i, Immediate) for i in immediates):
        raise unsupported(instruction, "scales and transpositions are immediates")
    values = [i.value for i in immediates]
    scales, transpositions = values[:2], values[2:]
    if any(s not in (1, -1) for s in scales) or (transpositions and WIDTH[a] != 16):
        raise unsupported(instruction, "the immediates")
    a_in_registers = isinstance(instruction.operands[1], Vector)
    expected = 0 if WIDTH[a] != 16 else 1 if a_in_registers else 2
    if len(transpositions) != expected:
        raise unsupported(instruction, f"{len(transpositions)} transpositions")
    return Form(
        n=n,
        accumulator=accumulator,
        a=a,
        b=b,
        negative=scales.count(-1) == 1,
        a_transposed=len(transpositions) == 2 and bool(transpositions[0]),
        b_transposed=bool(transpositions and transpositions[-1]),
        saturate="satfinite" in instruction.parts,
    )


@handles("wgmma.mma_async")
def multiply_accumulate(instruction: Instruction) -> Handler:
    """`wgmma.mma_async d, a, b, scale-d {, scale-a, scale-b {, transpose-a}, transpose-b}`."""
    form = _form(instruction)
    d, a, b, accumulate = instruction.operands[:4]
    a_in_registers = isinstance(a, Vector)
    if len(d.items) != form.n // (4 if form.accumulator == "f16" else 2):
        raise unsupported(instruction, f"{len(d.items)} accumulators")
    add = _sums(form)

    def run(warp: Warp, mask, old, a, b, accumulate):
        wait = warp.converged(mask)
        if wait is not None:
            return wait
        lane, access = leader(mask), (_operation(warp), instruction)
        with located(instruction):
            if a_in_registers:
                a_values = decode(a_rows(a), form.a)
            else:
                a_values = _a_operand(form, warp, lane_value(a, lane)).read(warp.cta.shared, *access)
            b_operand = shared_operand(wgmma_matrix(lane_value(b, lane)), form.b, form.n, _K_BYTES, form.b_transposed)
        before = accumulators(old, form.accumulator) if lane_value(accumulate, lane) else None
        words = add(a_values, b_operand.read(warp.cta.shared, *access), before)
        return accumulator_registers(words, form.accumulator)

    inputs = [
        Rows(d.items),
        Rows(a.items) if a_in_registers else Value(a, "u64"),
        Value(b, "u64"),
        Value(accumulate, "pred"),
    ]
    return Handler(run, inputs=inputs, outputs=[Rows(d.items)], convergent=True)


def _sums(form: Form) -> Callable[[np.ndarray, np.ndarray, np.ndarray | None], np.ndarray]:
    """From the values of A and B and the old accumulators, or None, to the new ones, as words."""
    if form.accumulator == "s32":
        return lambda a, b, old: to_accumulator(multiply(a, b), old, "s32", form.saturate)
    add = wgmma_adder(form.a, form.b, form.accumulator).add
    return (lambda a, b, old: add(-a, b, old)) if form.negative else add


def _a_operand(form: Form, warp: Warp, bits: int):
    first = _ROWS * (warp.index % 4)
    return shared_operand(
        wgmma_matrix(bits), form.a, 64, _K_BYTES, form.a_transposed, window=slice(first, first + _ROWS)
    )


def _operation(warp: Warp):
    """Who reads shared memory: the next operation of the warp's stream."""
    monitor = warp.machine.monitor
    if monitor is None or warp.actor is None:
        return None
    stream = _stream(warp)
    stream.last = monitor.operation(warp.actor, f"wgmma of {warp.name}", stream.agent, after=stream.last)
    return stream.last


@handles("wgmma.fence")
def fence(instruction: Instruction) -> Handler:
    """No effect: it orders registers, which the check of the text covers."""
    return Handler(lambda warp, mask: warp.converged(mask), convergent=True)


@handles("wgmma.commit_group")
def commit_group(instruction: Instruction) -> Handler:
    """The operations since the last one become a group."""

    def run(warp: Warp, mask):
        wait = warp.converged(mask)
        if wait is not None:
            return wait
        stream = _stream(warp)
        stream.groups.append(stream.last)
        warp.machine.changed()
        return None

    return Handler(run, convergent=True)


@handles("wgmma.wait_group")
def wait_group(instruction: Instruction) -> Handler:
    """`wgmma.wait_group n`: all but the n newest groups are done, in all warps of the warpgroup."""
    keep = instruction.operands[0].value

    def run(warp: Warp, mask):
        wait = warp.converged(mask)
        if wait is not None:
            return wait
        done = len(_stream(warp).groups) - keep
        if done <= 0:
            return None
        first = warp.index // 4 * 4
        streams = [_stream(other) for other in warp.cta.warps[first : first + 4]]
        if any(len(stream.groups) < done for stream in streams):
            return Wait(
                lambda: all(len(s.groups) >= done for s in streams), lambda: "wgmma of the rest of its warpgroup"
            )
        for stream in streams:
            warp.join(stream.groups[done - 1])
        return None

    return Handler(run, blocking=True, convergent=True)
