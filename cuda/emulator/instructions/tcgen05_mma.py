"""tcgen05.mma: D = A B (+ D) with D in tensor memory, A in shared or tensor memory, B in shared memory.

Which lanes hold which rows is the PTX ISA's "Data Path Layout Organization":

| M, CTAs | lanes of D, and of A in tensor memory |
|---|---|
| 128, 1 and 256, 2 | row r of the CTA in lane r |
| 64, 1 | row r in lane r // 16 * 32 + r % 16, plus 16 if the address says so |
| 128, 2 | row r of the CTA's 64 in lane r for the first half of N, and in lane 64 + r for the second half |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np

from ..errors import DescriptorFaultError
from ..machine.engines import Operation
from ..machine.tensor_memory import LANES, QUADRANT, split_address
from ..machine.warp import Cta, Warp
from ..ptx.syntax import Address, Immediate, Instruction, Vector
from ..tensor_core.descriptors import (
    BLOCK_SCALED,
    KINDS,
    InstructionDescriptor,
    instruction_descriptor,
    located,
    tcgen05_matrix,
)
from ..tensor_core.operands import SharedOperand, shared_operand, tensor_memory_operand
from ..tensor_core.products import multiply, to_accumulator
from ..tensor_core.scales import ScaleFactors, scale_factors
from .handler import Handler, Value, handles, lane_value, unsupported
from .tcgen05_issue import group_ctas, group_size, issue, issuers

_BLOCKS = {"scale_vec::1X": 32, "scale_vec::2X": 32, "scale_vec::4X": 16, "block32": 32, "block16": 16}
_DEFAULT_BLOCK = {"mxf8f6f4": 32, "mxf4": 32}
_SCALE_VECTORS = {"mxf8f6f4": ("scale_vec::1X", "block32"), "mxf4": ("scale_vec::2X", "block32")}


@dataclass(frozen=True, slots=True)
class Form:
    """What the opcode says.

    Attributes:
      kind: such as "mxf4nvf4".
      ctas: 1 or 2.
      block: elements of K that share a scale factor, or 0.
      tensor_memory_a: A is in tensor memory.
      shift: the rows of A move down afterwards.
      scale: of the old accumulators.
    """

    kind: str
    ctas: int
    block: int
    tensor_memory_a: bool
    shift: bool
    scale: float


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of D that one product gives.

    Attributes:
      lanes: slice or indices, of D.
      a_lanes: of A in tensor memory.
      columns: of B, a slice of N.
      quadrants: of the lanes.
    """

    lanes: slice | np.ndarray
    a_lanes: slice | np.ndarray
    columns: slice
    quadrants: range


@dataclass(frozen=True, slots=True)
class Multiplication:
    """One tcgen05.mma in flight, with all that it read from registers."""

    form: Form
    descriptor: InstructionDescriptor
    d_column: int
    parts: tuple[Part, ...]
    a: SharedOperand | None
    a_column: int
    b: SharedOperand
    scales: tuple[ScaleFactors, ScaleFactors] | None
    accumulate: bool
    disabled: tuple[np.ndarray, ...] | None


@dataclass(frozen=True, slots=True)
class Product:
    """A tcgen05.mma that has taken effect, or the part of one that one CTA and one half of N make up.

    Attributes:
      cta: index of the CTA in the grid.
      kind: such as "mxf4nvf4".
      column: first column of D.
      accumulates: whether D was added to.
      a: (rows, K) float64, the elements of A without their scale factors.
      a_scales: (rows, factors) float64, or None.
      d: (columns, rows) uint32, D afterwards.
    """

    cta: tuple[int, int, int]
    kind: str
    column: int
    accumulates: bool
    a: np.ndarray
    a_scales: np.ndarray | None
    d: np.ndarray


def _form(instruction: Instruction) -> Form:
    parts = instruction.parts
    kind = next((p[6:] for p in parts if p.startswith("kind::")), "")
    if kind not in KINDS or {"sp", "ws"} & set(parts):
        raise unsupported(instruction)
    vector = next((p for p in parts if p in _BLOCKS), None)
    scaled = kind in BLOCK_SCALED
    if scaled != ("block_scale" in parts) or (vector is not None and vector not in _SCALE_VECTORS.get(kind, _BLOCKS)):
        raise unsupported(instruction, "the kind does not have these scale factors")
    if kind == "mxf4nvf4" and vector in (None, "scale_vec::1X"):
        raise unsupported(instruction, "the kind needs .block16 or .block32")
    block = (_BLOCKS[vector] if vector else _DEFAULT_BLOCK[kind]) if scaled else 0
    tensor_memory_a = isinstance(instruction.operands[1], Address)
    if "ashift" in parts and (not tensor_memory_a or scaled):
        raise unsupported(instruction, ".ashift without A in tensor memory")
    last = instruction.operands[-1]
    scale = 1.0
    if isinstance(last, Immediate) and len(instruction.operands) > 5:
        if kind not in ("f16", "tf32") or not 0 <= last.value <= 15:
            raise unsupported(instruction, "the scale of the accumulators")
        scale = 2.0**-last.value
    return Form(kind, group_size(instruction), block, tensor_memory_a, "ashift" in parts, scale)


@handles("tcgen05.mma")
def multiply_accumulate(instruction: Instruction) -> Handler:
    """`tcgen05.mma [d], a, b, descriptor {, [a scales], [b scales]} {, {disabled lanes}}, accumulate {, scale}`."""
    form, operands = _form(instruction), list(instruction.operands)
    a_type = "u32" if form.tensor_memory_a else "u64"
    kinds = ["u32", a_type, "u64", "u32"] + (["u32", "u32"] if form.block else [])
    inputs = [Value(operand, kind) for operand, kind in zip(operands, kinds, strict=False)]
    rest = operands[len(kinds) :]
    masks = rest.pop(0).items if isinstance(rest[0], Vector) else ()
    if masks and len(masks) != 4 * form.ctas:
        raise unsupported(instruction, f"{len(masks)} words of disabled lanes")
    inputs += [Value(rest[0], "pred"), *(Value(word, "u32") for word in masks)]

    def run(warp: Warp, mask, *values):
        products = warp.machine.products
        for lane in issuers(warp, mask, instruction):
            with located(instruction):
                job = _prepare(form, tuple(lane_value(v, lane) for v in values))
            ctas = group_ctas(warp.cta, form.ctas)
            issue(warp, instruction, lambda o, job=job, ctas=ctas: _execute(job, ctas, o, products))

    return Handler(run, inputs=inputs)


@lru_cache(maxsize=1024)
def _prepare(form: Form, values: tuple[int, ...]) -> Multiplication:
    """Check and understand the operands of one tcgen05.mma."""
    d, a, b, bits = values[:4]
    scales, rest = (values[4:6], values[6:]) if form.block else ((), values[4:])
    descriptor = instruction_descriptor(bits & 0xFFFFFFFF, form.kind, form.ctas)
    _check(form, descriptor)
    rows = descriptor.m // form.ctas
    operand = partial(shared_operand, k_bytes=descriptor.k_bytes, packed=descriptor.packed)
    operand_a, a_lane, a_column = None, 0, 0
    if form.tensor_memory_a:
        a_lane, a_column = split_address(a)
    else:
        operand_a = operand(tcgen05_matrix(a), descriptor.a, rows, transposed=descriptor.a_transposed)
    columns = descriptor.n // form.ctas
    operand_b = operand(tcgen05_matrix(b), descriptor.b, columns, transposed=descriptor.b_transposed)
    d_lane, d_column = split_address(d)
    accumulate, *words = rest
    return Multiplication(
        form=form,
        descriptor=descriptor,
        d_column=d_column,
        parts=_parts(descriptor, form.ctas, d_lane, a_lane),
        a=operand_a,
        a_column=a_column,
        b=operand_b,
        scales=_scales(form, descriptor, scales),
        accumulate=bool(accumulate),
        disabled=_disabled(words, form.ctas),
    )


def _check(form: Form, d: InstructionDescriptor) -> None:
    if form.tensor_memory_a and d.a_transposed:
        raise DescriptorFaultError("A in tensor memory cannot be transposed")
    if form.tensor_memory_a and d.k == 96:
        raise DescriptorFaultError("A in tensor memory with K=96 is not supported")
    if form.shift and d.m // form.ctas != LANES:
        raise DescriptorFaultError(f".ashift with M={d.m}")
    if form.kind == "mxf4nvf4" and form.block == 32 and d.scale != "ue8m0":
        raise DescriptorFaultError("scale factors of 32 elements are ue8m0")


def _scales(
    form: Form, d: InstructionDescriptor, addresses: tuple[int, ...]
) -> tuple[ScaleFactors, ScaleFactors] | None:
    """The scale factors of A and of B."""
    if not form.block:
        return None
    a, b = addresses
    factors = d.k // form.block
    return scale_factors(a, factors, d.a_scale_id, d.scale), scale_factors(b, factors, d.b_scale_id, d.scale)


def _disabled(words: list[int], ctas: int) -> tuple[np.ndarray, ...] | None:
    """For each CTA, the lanes of D that keep their values."""
    if not any(words):
        return None
    bits = np.array(words, np.uint32).view(np.uint8)
    return tuple(np.unpackbits(bits, bitorder="little").astype(bool).reshape(ctas, LANES))


def _parts(d: InstructionDescriptor, ctas: int, d_lane: int, a_lane: int) -> tuple[Part, ...]:
    everything, all_lanes = slice(None), slice(0, LANES)
    if d.m == 64:
        if d_lane not in (0, 16) or a_lane not in (0, 16):
            raise DescriptorFaultError(
                f"M=64 with D at lane {d_lane} and A at lane {a_lane}; they start at lane 0 or 16"
            )
        row = np.arange(64)
        lanes = row // 16 * QUADRANT + row % 16
        return (Part(lanes + d_lane, lanes + a_lane, everything, range(4)),)
    if d_lane or a_lane:
        raise DescriptorFaultError(f"M={d.m} with D at lane {d_lane} and A at lane {a_lane}; they start at lane 0")
    if d.m // ctas == LANES:
        return (Part(all_lanes, all_lanes, everything, range(4)),)
    low, high, half = slice(0, 64), slice(64, LANES), d.n // 2
    return Part(low, low, slice(0, half), range(2)), Part(high, high, slice(half, d.n), range(2, 4))


def _execute(
    job: Multiplication, ctas: list[Cta], operation: Operation, products: Callable[[Product], None] | None
) -> None:
    """Read the operands and update D in each CTA, and show the product to who wants to see it."""
    access = (operation.actor, operation.instruction)
    b_parts = [job.b.read(cta.shared, *access) for cta in ctas]
    b = b_parts[0] if len(b_parts) == 1 else np.concatenate(b_parts)
    for number, cta in enumerate(ctas):
        shared_a = job.a.read(cta.shared, *access) if job.a is not None else None
        for part in job.parts:
            a = shared_a if shared_a is not None else _a_in_tensor_memory(job, cta, part, access)
            a_scales = _scales_of_a(job, job.scales[0], cta, access) if job.scales is not None else None
            product = _product(job, cta, part, a, a_scales, b, access)
            _update(job, cta, part, product, job.disabled[number] if job.disabled else None, access)
            if products is not None:
                d = cta.tensor.data[job.d_column : job.d_column + len(product), part.lanes].copy()
                products(Product(cta.index, job.form.kind, job.d_column, job.accumulate, a, a_scales, d))
        if job.form.shift:
            _shift(job, cta, access)


def _a_columns(d: InstructionDescriptor) -> int:
    return d.k_bytes // 4


def _a_in_tensor_memory(job: Multiplication, cta: Cta, part: Part, access) -> np.ndarray:
    words = cta.tensor.read(job.a_column, _a_columns(job.descriptor), part.a_lanes, *access)
    return tensor_memory_operand(words, job.descriptor.a, job.descriptor.packed)


def _product(job: Multiplication, cta: Cta, part: Part, a: np.ndarray, a_scales, b: np.ndarray, access) -> np.ndarray:
    """(columns, lanes) float64 of one part of D."""
    b = b[part.columns]
    if job.scales is not None:
        b_scales = job.scales[1].read_copies(cta.tensor, len(b), part.quadrants, *access)
        a = a * np.repeat(a_scales, job.form.block, axis=1)
        b = b * np.repeat(b_scales, job.form.block, axis=1)
    return multiply(a, b, job.descriptor.negative)


def _scales_of_a(job: Multiplication, scales: ScaleFactors, cta: Cta, access) -> np.ndarray:
    """(rows, factors): the rows of a lane quadrant read the copy there."""
    if len(job.parts) == 2:
        return scales.read_copies(cta.tensor, 64, range(4), *access)
    return scales.read_own(cta.tensor, *access)


def _update(job: Multiplication, cta: Cta, part: Part, product: np.ndarray, disabled, access) -> None:
    """Add a product to D, in the lanes that are not disabled."""
    lanes = part.lanes
    if disabled is not None:
        of_part = np.arange(LANES)[lanes]
        keep = ~disabled[of_part]
        lanes, product = of_part[keep], product[:, keep]
        if not lanes.size:
            return
    d = job.descriptor
    old = cta.tensor.read(job.d_column, len(product), lanes, *access) if job.accumulate else None
    words = to_accumulator(product, old, d.accumulator, d.saturate, job.form.scale)
    cta.tensor.write(job.d_column, words, lanes, *access)


def _shift(job: Multiplication, cta: Cta, access) -> None:
    """Each lane of A but the last of its quadrant takes what the next one holds."""
    words = cta.tensor.read(job.a_column, _a_columns(job.descriptor), slice(0, LANES), *access)
    moved = words.reshape(len(words), -1, QUADRANT).copy()
    moved[:, :, :-1] = moved[:, :, 1:].copy()
    cta.tensor.write(job.a_column, moved.reshape(len(words), LANES), slice(0, LANES), *access)
