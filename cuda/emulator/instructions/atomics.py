"""atom and red, applied lane by lane in the order of the lanes.

Each element of a vector is an atomic operation of its own.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..ptx.syntax import SINK, Instruction, Vector
from .access import UINT, Form, acquire, address_value, form_of, lane_addresses, parts_of, read, release, write
from .handler import Handler, Value, handles, unsupported

_BITWISE = {"b32", "b64", "u32", "u64", "s32", "s64"}
_OPERATIONS = {
    "add": {"u32", "s32", "u64", "f32", "f64", "f16", "bf16", "f16x2", "bf16x2"},
    "min": {"u32", "s32", "u64", "s64"},
    "max": {"u32", "s32", "u64", "s64"},
    "and": _BITWISE,
    "or": _BITWISE,
    "xor": _BITWISE,
    "inc": {"u32"},
    "dec": {"u32"},
    "exch": {"b32", "b64", "u32", "u64", "s32", "s64", "f32", "f64"},
    "cas": {"b16", "b32", "b64", "u32", "u64", "s32", "s64"},
}
_VECTORS = {"f32", "f16", "bf16", "f16x2", "bf16x2"}

_NAN_F32 = np.uint32(0x7FFFFFFF)
_NAN_16 = np.uint16(0x7FFF)
_ONE = {size: dtype(1) for size, dtype in UINT.items()}

# An operation of arrays of raw bits: `old, operands -> new`.
Operation = Callable[..., np.ndarray]


def _add_f32(old: np.ndarray, b: np.ndarray) -> np.ndarray:
    total = old.view(np.float32) + b.view(np.float32)
    return np.where(np.isnan(total), _NAN_F32, total.view(np.uint32))


def _flushed(bits: np.ndarray) -> np.ndarray:
    return np.where(bits & np.uint32(0x7F800000), bits, bits & np.uint32(0x80000000))


def _add_f32_flushing(old: np.ndarray, b: np.ndarray) -> np.ndarray:
    return _flushed(_add_f32(_flushed(old), _flushed(b)))


def _add_f64(old: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (old.view(np.float64) + b.view(np.float64)).view(np.uint64)


def _add_f16(old: np.ndarray, b: np.ndarray) -> np.ndarray:
    total = old.view(np.float16) + b.view(np.float16)
    return np.where(np.isnan(total), _NAN_16, total.view(np.uint16))


def _add_bf16(old: np.ndarray, b: np.ndarray) -> np.ndarray:
    # One rounding: the sum in float32 has more than twice the digits of bfloat16 and two to spare.
    total = _wide(old) + _wide(b)
    bits = total.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(total), _NAN_16, rounded.astype(np.uint16))


def _wide(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _halves(add: Operation) -> Operation:
    return lambda old, b: add(old.view(np.uint16), b.view(np.uint16)).view(np.uint32)


_FLOAT_ADDITIONS: dict[str, Operation] = {
    "f32": _add_f32,
    "f64": _add_f64,
    "f16": _add_f16,
    "bf16": _add_bf16,
    "f16x2": _halves(_add_f16),
    "bf16x2": _halves(_add_bf16),
}


def _swapped(old: np.ndarray, compare: np.ndarray, new: np.ndarray) -> np.ndarray:
    return np.where(old == compare, new, old)


def _integer_operation(name: str, element: str, size: int) -> Operation:
    one, typed = _ONE[size], f"{'i' if element[0] == 's' else 'u'}{size}"
    operations: dict[str, Operation] = {
        "add": lambda old, b: old + b,
        "min": lambda old, b: np.minimum(old.view(typed), b.view(typed)).view(old.dtype),
        "max": lambda old, b: np.maximum(old.view(typed), b.view(typed)).view(old.dtype),
        "and": lambda old, b: old & b,
        "or": lambda old, b: old | b,
        "xor": lambda old, b: old ^ b,
        "inc": lambda old, b: np.where(old >= b, old - old, old + one),
        "dec": lambda old, b: np.where((old == 0) | (old > b), b, old - one),
        "exch": lambda old, b: b,
        "cas": _swapped,
    }
    return operations[name]


def _parse(instruction: Instruction) -> tuple[str, Form]:
    form = form_of(instruction, "relaxed")
    operations = [part for part in form.rest if part in _OPERATIONS]
    if len(operations) != 1 or set(form.rest) - {operations[0], "noftz"}:
        raise unsupported(instruction)
    if form.type not in _OPERATIONS[operations[0]] or (form.count > 1 and form.type not in _VECTORS):
        raise unsupported(instruction, f"{operations[0]} of {form.type}")
    if form.space == "param":
        raise unsupported(instruction)
    return operations[0], form


def _operation(name: str, form: Form) -> tuple[Operation, Operation]:
    """In global and in shared memory; float32 sums in global memory flush subnormals."""
    if name == "add" and form.type in _FLOAT_ADDITIONS:
        function = _FLOAT_ADDITIONS[form.type]
        return (_add_f32_flushing if form.type == "f32" else function), function
    function = _integer_operation(name, form.type, form.size)
    return function, function


def reduction(instruction: Instruction, name: str, form: Form) -> Operation:
    """A reduction in shared memory."""
    if name in ("exch", "cas") or form.type not in _OPERATIONS.get(name, ()):
        raise unsupported(instruction, f"{name} of {form.type}")
    return _operation(name, form)[1]


def _turns(where: np.ndarray) -> list[slice | np.ndarray]:
    """Lanes, by the places that they name, such that each turn names no place twice and lanes keep their order."""
    count = np.bincount(where)
    if count.max() == 1:
        return [slice(None)]
    order = np.argsort(where, kind="stable")
    first = np.cumsum(count) - count
    turn = np.empty(len(where), np.int64)
    turn[order] = np.arange(len(where)) - first[where[order]]
    return [np.flatnonzero(turn == i) for i in range(int(count.max()))]


@handles("atom", "red")
def atomic(instruction: Instruction) -> Handler:
    """atom destination, [address], b{, c} and red [address], b."""
    name, form = _parse(instruction)
    returns = instruction.parts[0] == "atom"
    target, address, *sources = instruction.operands if returns else (SINK, *instruction.operands)
    sources = sources[: 2 if name == "cas" else 1]
    rows = [s.items if isinstance(s, Vector) else (s,) for s in sources]
    targets = target.items if isinstance(target, Vector) else (target,) * form.count
    if any(len(r) != form.count for r in rows) or len(targets) != form.count:
        raise unsupported(instruction, "operands that do not fit the vector")
    in_global, in_shared = _operation(name, form)
    kept = [i for i, t in enumerate(targets) if t != SINK]
    dtype = UINT[form.size]

    def apply(warp, addresses: np.ndarray, operands: list[np.ndarray]) -> np.ndarray:
        """The (count, n) old values; `operands` are (count, n), too."""
        old = np.empty((form.count, len(addresses)), dtype)
        for memory, chosen, positions in parts_of(warp, form.space, addresses, instruction):
            function = in_global if memory is warp.machine.global_memory else in_shared
            unique, where = np.unique(positions, return_inverse=True)
            cells = read(memory, unique, form, warp, instruction)
            acquire(memory, unique, form, warp, instruction)
            lanes_here = np.arange(len(addresses))[chosen]
            for turn in _turns(where):
                lane, place = lanes_here[turn], where[turn]
                before = np.ascontiguousarray(cells[:, place])
                old[:, lane] = before
                cells[:, place] = function(before, *(np.ascontiguousarray(o[:, lane]) for o in operands))
            write(memory, unique, cells, form, warp, instruction)
            release(memory, unique, form, warp, replace=False)
        warp.machine.changed()
        return old

    def run(warp, mask, address, *values):
        some = slice(None) if mask is None else mask
        table = np.empty((len(values), 32), dtype)
        for row, value in zip(table, values, strict=True):
            row[:] = value
        operands = [table[i : i + form.count, some] for i in range(0, len(values), form.count)]
        addresses = lane_addresses(address, mask)
        old = apply(warp, np.broadcast_to(addresses, operands[0].shape[1]), operands)
        results = np.zeros((form.count, 32), dtype)
        results[:, some] = old
        return results[kept[0]] if len(kept) == 1 else tuple(results[kept]) or None

    return Handler(
        run,
        inputs=[address_value(address), *(Value(item, form.type) for row in rows for item in row)],
        outputs=[Value(targets[i], form.type) for i in kept],
    )
