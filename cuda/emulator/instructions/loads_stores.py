"""ld and st: by lanes, through the generic proxy. Caching hints have no effect."""

from __future__ import annotations

import numpy as np

from ..errors import MemoryFaultError
from ..machine.memory import PARAMETER_BASE, GlobalMemory
from ..ptx.syntax import SINK, Address, Instruction, Register, Symbol, Vector
from .access import (
    UINT,
    Form,
    acquire,
    address_value,
    form_of,
    lane_addresses,
    parts_of,
    quick_read,
    quick_write,
    read,
    release,
    write,
)
from .handler import Handler, Rows, Value, handles, unsupported

_CACHING = {"nc", "ca", "cg", "cs", "lu", "cv", "wb", "wt"}
_BITS = {"b16": 16, "b32": 32, "b64": 64}


def _form(instruction: Instruction) -> Form:
    form = form_of(instruction, "weak")
    unknown = set(form.rest) - _CACHING
    if unknown:
        raise unsupported(instruction, "the modifier " + ", ".join(sorted(unknown)))
    return form


def _operands(form: Form, operand, instruction: Instruction) -> tuple:
    items = operand.items if isinstance(operand, Vector) else (operand,)
    if len(items) != form.count:
        raise unsupported(instruction, f"{len(items)} registers for {form.count} elements")
    return items


@handles("ld")
def load(instruction: Instruction) -> Handler:
    """ld{.sem}{.scope}{.space}{.hints}{.vec}.type destination, [address].

    A value narrower than its register is extended, by its sign if the type is signed.
    """
    form = _form(instruction)
    target, address = instruction.operands[:2]
    items = _operands(form, target, instruction)
    kept = [i for i, item in enumerate(items) if item != SINK]
    widths = [_BITS[items[i].kind] // 8 for i in kept]
    signed, constant = form.type[0] == "s", "nc" in form.rest

    def extended(row: np.ndarray, width: int) -> np.ndarray:
        if width <= form.size:
            return row
        return row.view(f"i{form.size}").astype(f"i{width}").view(UINT[width]) if signed else row.astype(UINT[width])

    def by_parts(warp, addresses: np.ndarray) -> np.ndarray:
        rows = np.empty((form.count, len(addresses)), UINT[form.size])
        for memory, chosen, positions in parts_of(warp, form.space, addresses, instruction):
            rows[:, chosen] = read(memory, positions, form, warp, instruction)
            acquire(memory, positions, form, warp, instruction)
        return rows

    def run_parameter(warp, mask, address):
        start = address - PARAMETER_BASE
        data = warp.machine.parameter_bytes[start : start + form.size * form.count]
        if len(data) < form.size * form.count or start % (form.size * form.count):
            raise MemoryFaultError(f"{instruction.where}: misaligned, or behind the parameters")
        rows = data.view(UINT[form.size]).reshape(-1, 1)
        values = [int(extended(rows[i], width)[0]) for i, width in zip(kept, widths, strict=True)]
        return values[0] if len(values) == 1 else tuple(values) or None

    def run(warp, mask, address):
        addresses = lane_addresses(address, mask)
        rows = quick_read(warp, addresses, form, instruction)
        rows = by_parts(warp, addresses) if rows is None else rows.reshape(1, -1) if form.count == 1 else rows.T.copy()
        if constant and warp.actor is not None:
            for memory, _, positions in parts_of(warp, "global", addresses, instruction):
                assert isinstance(memory, GlobalMemory)
                memory.check_constant(positions, form.size * form.count, warp.actor, instruction)
        values: list = [extended(rows[i], width) for i, width in zip(kept, widths, strict=True)]
        if isinstance(address, int):
            values = [int(v[0]) for v in values]
        elif mask is not None:
            values = [_spread(v, mask) for v in values]
        return values[0] if len(values) == 1 else tuple(values) or None

    by_name = isinstance(address.base, Symbol)
    return Handler(
        run_parameter if form.space == "param" and by_name else run,
        inputs=[address_value(address)],
        outputs=[Value(items[i], form.type) for i in kept],
        uniform="always" if by_name else "inputs",
    )


def _spread(values: np.ndarray, mask: np.ndarray) -> np.ndarray:
    full = np.zeros(32, values.dtype)
    full[mask] = values
    return full


@handles("st")
def store(instruction: Instruction) -> Handler:
    """st{.sem}{.scope}{.space}{.hints}{.vec}.type [address], source."""
    form = _form(instruction)
    address, source = instruction.operands[:2]
    if not isinstance(address, Address) or form.space == "param":
        raise unsupported(instruction)
    items = _operands(form, source, instruction)
    same_kind = all(isinstance(i, Register) for i in items) and len({i.kind for i in items}) == 1
    inputs: list[Value | Rows] = [address_value(address)]
    if form.count > 1 and same_kind:
        inputs.append(Rows(items, items[0].kind))
    else:
        inputs += [Value(i, form.type) for i in items]

    def run(warp, mask, address, *values):
        rows = values[0] if form.count > 1 and same_kind else _rows(values)
        rows = (rows if mask is None else rows[:, mask]).astype(UINT[form.size], copy=False)
        if isinstance(address, int):
            if warp.actor is not None and not form.strong and (rows != rows[:, -1:]).any():
                warp.machine.monitor.lanes_collide(warp.actor, instruction)
            rows = rows[:, -1:]
        addresses = lane_addresses(address, mask)
        if quick_write(warp, addresses, rows, form, instruction):
            return
        for memory, chosen, positions in parts_of(warp, form.space, addresses, instruction):
            write(memory, positions, rows[:, chosen], form, warp, instruction)
            release(memory, positions, form, warp, replace=True)
        if form.strong:
            warp.machine.changed()

    def _rows(values) -> np.ndarray:
        rows = np.empty((form.count, 32), np.uint64)
        for row, value in zip(rows, values, strict=True):
            row[:] = value
        return rows

    return Handler(run, inputs=inputs)
