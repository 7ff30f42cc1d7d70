"""tcgen05.ld, .ld.red and .st between registers and tensor memory, tcgen05.cp from shared memory, tcgen05.shift."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ..checks.races import Actor
from ..errors import MemoryFaultError
from ..machine.memory import CHUNK
from ..machine.tensor_memory import LANES, QUADRANT, TensorMemory, split_address
from ..machine.warp import Warp
from ..ptx.syntax import Address, Immediate, Instruction, Vector
from ..tensor_core.descriptors import located, tcgen05_matrix
from ..tensor_core.operands import k_major_chunks
from .handler import Handler, Rows, Value, handles, lane_value, leader, unsupported
from .tcgen05_issue import agent_of, group_ctas, group_size, issue, issuers

_ALL_LANES = slice(0, LANES)
_PENDING_LOADS, _PENDING_STORES = "tcgen05.ld", "tcgen05.st"

# ---- fragments ----


@lru_cache(maxsize=64)
def fragment(shape: str, repeats: int) -> tuple[np.ndarray, np.ndarray]:
    """Column and lane of each register of each thread, as two (registers, 32) arrays ("Matrix fragments for shape").

    For 16x32bx2 the columns are those of the thread's own half.
    """
    t = np.arange(32)
    if shape == "32x32b":
        columns, lanes, width = [t * 0], [t], 1
    elif shape == "16x32bx2":
        columns, lanes, width = [t * 0], [t % 16], 1
    elif shape == "16x64b":
        columns, lanes, width = [t >> 1 & 1], [t // 4 + 8 * (t & 1)], 2
    elif shape == "16x128b":
        columns, lanes, width = [t % 4] * 2, [t // 4, t // 4 + 8], 4
    else:
        pair = [2 * (t % 4), 2 * (t % 4) + 1]
        columns, lanes, width = pair * 2, [t // 4] * 2 + [t // 4 + 8] * 2, 8
    column = np.concatenate([np.array(columns) + width * i for i in range(repeats)])
    return column, np.tile(np.array(lanes), (repeats, 1))


_COLUMNS = {"32x32b": 1, "16x32bx2": 1, "16x64b": 2, "16x128b": 4, "16x256b": 8}
_REDUCED_SHAPES = {"32x32b", "16x32bx2"}
_REGISTERS = {"32x32b": 1, "16x32bx2": 1, "16x64b": 1, "16x128b": 2, "16x256b": 4}
_REPEATS = {1 << i for i in range(8)}
_MOST_REGISTERS = 128


@dataclass(frozen=True, slots=True)
class Access:
    """The part of tensor memory that a tcgen05.ld or .st moves, and how.

    Attributes:
      shape: such as "32x32b".
      repeats: of the shape along the columns.
      packed: a register holds the low halves of two neighbouring columns.
      split: columns from the first to the second half of 16x32bx2.
    """

    shape: str
    repeats: int
    packed: bool
    split: int

    @property
    def columns(self) -> int:
        """Columns of one box of tensor memory."""
        return _COLUMNS[self.shape] * self.repeats * (2 if self.packed else 1)

    @property
    def lanes(self) -> int:
        """Lanes of a box."""
        return 32 if self.shape == "32x32b" else 16

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where its boxes start, in columns."""
        return (0, self.split) if self.shape == "16x32bx2" else (0,)

    def registers(self, boxes: list[np.ndarray]) -> np.ndarray:
        """(columns, lanes) boxes of tensor memory to (registers, 32)."""
        if self.packed:
            boxes = [box[0::2] & np.uint32(0xFFFF) | box[1::2] << np.uint32(16) for box in boxes]
        if self.shape == "32x32b":
            return boxes[0]
        if self.shape == "16x32bx2":
            return np.concatenate(boxes, axis=1)
        return boxes[0][fragment(self.shape, self.repeats)]

    def boxes(self, registers: np.ndarray) -> list[np.ndarray]:
        """The reverse of `registers`, as copies."""
        if self.shape == "32x32b":
            boxes = [registers.copy()]
        elif self.shape == "16x32bx2":
            boxes = [registers[:, :16].copy(), registers[:, 16:].copy()]
        else:
            box = np.empty((_COLUMNS[self.shape] * self.repeats, 16), np.uint32)
            box[fragment(self.shape, self.repeats)] = registers
            boxes = [box]
        if not self.packed:
            return boxes
        halves = [np.stack([box & np.uint32(0xFFFF), box >> np.uint32(16)], axis=1) for box in boxes]
        return [pair.reshape(-1, pair.shape[-1]) for pair in halves]


def _access(instruction: Instruction, registers: int, split: object, packing: str) -> Access:
    parts = instruction.parts
    shape = next((p for p in parts if p in _COLUMNS), None)
    repeats = next((int(p[1:]) for p in parts if p[0] == "x" and p[1:].isdigit()), None)
    if shape is None or repeats is None or any(p.endswith("pack::16b") and p != packing for p in parts):
        raise unsupported(instruction)
    if repeats not in _REPEATS or _REGISTERS[shape] * repeats > _MOST_REGISTERS:
        raise unsupported(instruction, f".x{repeats}")
    if (shape == "16x32bx2") != isinstance(split, Immediate):
        raise unsupported(instruction, "the half-split offset of .16x32bx2")
    if registers != _REGISTERS[shape] * repeats:
        raise unsupported(instruction, f"{registers} registers for {_REGISTERS[shape] * repeats}")
    return Access(shape, repeats, packing in parts, split.value if isinstance(split, Immediate) else 0)


def _registers(operand: object) -> tuple:
    return operand.items if isinstance(operand, Vector) else (operand,)


def _place(warp: Warp, mask, address, access: Access, instruction: Instruction) -> tuple[int, int]:
    """The first column and lane. A warp reaches its own lane quadrant, a shape of 16 lanes either half of it."""
    if not isinstance(address, int):
        here = address if mask is None else address[mask]
        if (here != here[0]).any():
            raise MemoryFaultError(f"{instruction.where}: the threads of the warp give different addresses")
    lane, column = split_address(lane_value(address, leader(mask)))
    own = QUADRANT * (warp.index % 4)
    if lane == own or (access.lanes == 16 and lane == own + 16):
        return column, lane
    if lane:
        raise MemoryFaultError(f"{instruction.where}: {warp.name} reaches lanes {own}..{own + 31}, not lane {lane}")
    warp.machine.report(
        "issue",
        f"{instruction.where}: the address names lane 0, {warp.name} reaches lanes {own}..{own + 31} and uses these",
    )
    return column, own


# ---- loads ----


@handles("tcgen05.ld")
def load(instruction: Instruction) -> Handler:
    """`tcgen05.ld registers {, reduced}, [address] {, split}`.

    The registers have their values at once. The read of tensor memory is an asynchronous operation that the warp has
    waited for at the next tcgen05.wait::ld.
    """
    operands = list(instruction.operands)
    at = next(i for i, operand in enumerate(operands) if isinstance(operand, Address))
    reduce = _reduction(instruction) if "red" in instruction.parts else None
    if at != (1 if reduce is None else 2):
        raise unsupported(instruction)
    destinations = _registers(operands[0])
    access = _access(instruction, len(destinations), operands[at + 1] if len(operands) > at + 1 else None, "pack::16b")
    columns, lanes, offsets = access.columns, access.lanes, access.offsets

    def run(warp: Warp, mask, address):
        if mask is not None:
            wait = warp.converged(mask)
            if wait is not None:
                return wait
        column, lane = _place(warp, mask, address, access, instruction)
        memory, actor, window = warp.cta.tensor, _load_actor(warp, instruction), slice(lane, lane + lanes)
        boxes = [memory.read(column + offset, columns, window, actor, instruction) for offset in offsets]
        values = access.registers(boxes)
        if values is boxes[0]:
            values = values.copy()
        return values if reduce is None else (values, reduce(values))

    outputs: list[Value | Rows] = [Rows(destinations)]
    if reduce is not None:
        outputs.append(Value(operands[1], "b32"))
    return Handler(run, inputs=[Value(operands[at], "u32")], outputs=outputs, convergent=True)


@dataclass(frozen=True, slots=True)
class PendingLoad:
    """A load that the warp has not waited for: who reads, and the index of its instruction."""

    actor: Actor
    index: int


def _load_actor(warp: Warp, instruction: Instruction) -> Actor | None:
    """Who reads."""
    monitor = warp.machine.monitor
    if monitor is None or warp.actor is None:
        return None
    actor = monitor.operation(warp.actor, f"tcgen05.ld of {warp.name}", agent=agent_of(warp, _PENDING_LOADS))
    warp.pending[_PENDING_LOADS].append(PendingLoad(actor, instruction.index))
    return actor


def finish_loads(warp: Warp, index: int | None = None) -> None:
    """All loads have been done (tcgen05.wait::ld), or those of one instruction, whose registers are used."""
    pending = warp.pending[_PENDING_LOADS]
    for load in pending:
        if index is None or load.index == index:
            warp.join(load.actor)
    pending[:] = [load for load in pending if index is not None and load.index != index]


def _reduction(instruction: Instruction):
    """(registers, 32) to (32,): the least or greatest value of each thread, as bits."""
    parts, kind = instruction.parts, instruction.parts[-1]
    modifiers = set(parts[3:-1]) - {"sync", "aligned"}
    operations, signs = modifiers & {"min", "max"}, modifiers & {"abs", "NaN"}
    shapes = modifiers & _REDUCED_SHAPES
    counts = modifiers - operations - signs - shapes
    if any(len(found) != 1 for found in (operations, shapes, counts)) or "x1" in counts:
        raise unsupported(instruction)
    largest = "max" in operations
    if kind in ("u32", "s32") and not signs:
        typed = np.uint32 if kind == "u32" else np.int32
        best = np.maximum if largest else np.minimum
        return lambda values: best.reduce(values.view(typed), axis=0).view(np.uint32)
    if kind != "f32":
        raise unsupported(instruction)
    return lambda values: _extreme(values, largest, "abs" in signs, "NaN" in signs)


def _extreme(bits: np.ndarray, largest: bool, absolute: bool, propagate: bool) -> np.ndarray:
    """Of float32 bits; -0 is less than +0, and NaN counts only if it is propagated or alone."""
    if absolute:
        bits = bits & np.uint32(0x7FFFFFFF)
    nan = bits & np.uint32(0x7FFFFFFF) > np.uint32(0x7F800000)
    signed = bits.view(np.int32)
    order = signed ^ (signed >> 31 & 0x7FFFFFFF)
    worst = np.int32(-(1 << 31) if largest else (1 << 31) - 1)
    order = np.where(nan, worst, order)
    best = order.max(axis=0) if largest else order.min(axis=0)
    result = (best ^ (best >> 31 & 0x7FFFFFFF)).view(np.uint32)
    return np.where(nan.any(axis=0) if propagate else nan.all(axis=0), np.uint32(0x7FFFFFFF), result)


# ---- stores ----


@dataclass(frozen=True, slots=True)
class PendingStore:
    """A tcgen05.st that has not taken effect."""

    memory: TensorMemory
    column: int
    lanes: slice
    values: np.ndarray
    actor: Actor | None
    instruction: Instruction


@handles("tcgen05.st")
def store(instruction: Instruction) -> Handler:
    """`tcgen05.st [address] {, split}, registers`: takes effect at the next tcgen05.wait::st, as late as it may."""
    address, *rest = instruction.operands
    split = rest.pop(0) if len(rest) > 1 else None
    sources = _registers(rest[0])
    access = _access(instruction, len(sources), split, "unpack::16b")

    def run(warp: Warp, mask, where, values):
        wait = warp.converged(mask)
        if wait is not None:
            return wait
        if mask is not None:
            raise MemoryFaultError(f"{instruction.where}: some threads of {warp.name} have exited")
        column, lane = _place(warp, mask, where, access, instruction)
        actor, pending = _store_actor(warp), warp.pending[_PENDING_STORES]
        window, memory = slice(lane, lane + access.lanes), warp.cta.tensor
        for offset, box in zip(access.offsets, access.boxes(values), strict=True):
            pending.append(PendingStore(memory, column + offset, window, box, actor, instruction))
        return None

    return Handler(run, inputs=[Value(address, "u32"), Rows(sources)], convergent=True)


def _store_actor(warp: Warp) -> Actor | None:
    """Who writes; the stores of a warp are in order among themselves."""
    monitor = warp.machine.monitor
    if monitor is None or warp.actor is None:
        return None
    pending = warp.pending[_PENDING_STORES]
    previous = pending[-1].actor if pending else None
    return monitor.operation(warp.actor, f"tcgen05.st of {warp.name}", agent_of(warp, _PENDING_STORES), after=previous)


def finish_stores(warp: Warp) -> None:
    """tcgen05.wait::st, or the end of the warp."""
    pending = warp.pending[_PENDING_STORES]
    for item in pending:
        item.memory.write(item.column, item.values, item.lanes, item.actor, item.instruction)
        warp.join(item.actor)
    pending.clear()


# ---- copies from shared memory ----

_QUADRANTS_OF_HALF = {"warpx2::02_13": ((0, 2), (1, 3)), "warpx2::01_23": ((0, 1), (2, 3))}
# Rows and bytes of a row.
_COPY_SHAPES = {
    "128x256b": (128, 32), "4x256b": (4, 32), "128x128b": (128, 16), "64x128b": (64, 16), "32x128b": (32, 16),
}  # fmt: skip


@handles("tcgen05.cp")
def copy(instruction: Instruction) -> Handler:
    """`tcgen05.cp [address], descriptor`; with cta_group::2 in each CTA from its own shared memory."""
    size, parts = group_size(instruction), instruction.parts
    shape = next((p for p in parts if p in _COPY_SHAPES), "")
    multicast = next((p for p in parts if p.startswith("warpx")), "")
    expected = {"64x128b": tuple(_QUADRANTS_OF_HALF), "32x128b": ("warpx4",)}.get(shape, ("",))
    if not shape or multicast not in expected or any(p.startswith("b8x16") for p in parts):
        raise unsupported(instruction)
    rows, nbytes = _COPY_SHAPES[shape]

    def effect(ctas, operation, column, lane, chunks):
        for cta in ctas:
            raw = cta.shared.read_chunks(chunks, operation.actor, instruction)
            words = np.ascontiguousarray(raw).view(np.uint32).reshape(rows, nbytes // 4).T
            for lanes, part in _copy_targets(shape, multicast, lane):
                cta.tensor.write(column, words[:, part], lanes, operation.actor, instruction)

    def run(warp: Warp, mask, address, descriptor):
        for each in issuers(warp, mask, instruction):
            lane, column = split_address(lane_value(address, each))
            if lane and (shape != "4x256b" or lane >= QUADRANT):
                raise MemoryFaultError(f"{instruction.where}: the copy cannot start at lane {lane}")
            with located(instruction):
                chunks = k_major_chunks(tcgen05_matrix(lane_value(descriptor, each)), rows, nbytes // CHUNK)
            ctas = group_ctas(warp.cta, size)
            issue(warp, instruction, lambda o, a=(column, lane, chunks), ctas=ctas: effect(ctas, o, *a))

    inputs = [Value(instruction.operands[0], "u32"), Value(instruction.operands[1], "u64")]
    return Handler(run, inputs=inputs)


def _copy_targets(shape: str, multicast: str, lane: int) -> list[tuple[slice | np.ndarray, slice]]:
    """The lanes that are written and the rows that go there."""
    everything = slice(None)
    if multicast == "warpx4":
        return [(_quadrant(q), everything) for q in range(4)]
    if multicast:
        halves = enumerate(_QUADRANTS_OF_HALF[multicast])
        return [(_quadrant(q), slice(32 * h, 32 * h + 32)) for h, quadrants in halves for q in quadrants]
    if shape == "4x256b":
        # One row for the same lane of each quadrant.
        return [(lane + QUADRANT * np.arange(4), everything)]
    return [(_ALL_LANES, everything)]


def _quadrant(number: int) -> slice:
    return slice(QUADRANT * number, QUADRANT * number + QUADRANT)


@handles("tcgen05.shift")
def shift(instruction: Instruction) -> Handler:
    """`tcgen05.shift.down [address]`: in 32 lanes of 8 columns, a lane takes what the next one holds."""
    size = group_size(instruction)
    if "down" not in instruction.parts:
        raise unsupported(instruction)

    def effect(ctas, operation, column, lane):
        for cta in ctas:
            words = cta.tensor.read(column, 8, slice(lane, lane + QUADRANT), operation.actor, instruction)
            moved = words[:, 1:].copy()
            cta.tensor.write(column, moved, slice(lane, lane + QUADRANT - 1), operation.actor, instruction)

    def run(warp: Warp, mask, address):
        for each in issuers(warp, mask, instruction):
            lane, column = split_address(lane_value(address, each))
            if lane % QUADRANT or lane >= LANES:
                raise MemoryFaultError(f"{instruction.where}: lane {lane} does not start a quadrant")
            ctas = group_ctas(warp.cta, size)
            issue(warp, instruction, lambda o, a=(column, lane), ctas=ctas: effect(ctas, o, *a))

    return Handler(run, inputs=[Value(instruction.operands[0], "u32")])
