"""Bulk copies and reductions of contiguous memory: cp.async.bulk and cp.reduce.async.bulk."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..errors import MemoryFaultError
from ..machine.memory import CHUNK
from ..ptx.syntax import Instruction
from . import reductions
from .bulk_completion import (
    SHARED_MASK,
    address_input,
    alike,
    check_alignment,
    check_own_cta,
    check_qualifiers,
    check_signalled,
    cluster_address,
    expect_operands,
    issue_grouped,
    issue_signalled,
    issuers,
    multicast_ctas,
    only,
    shared_address,
)
from .handler import Handler, Value, handles, lane_value, lanes, unsupported

if TYPE_CHECKING:
    from ..machine.warp import Cta, Warp

_SPACES = {"global", "shared::cta", "shared::cluster"}
_COPY = {"cp", "async", "bulk", "weak", "L2::cache_hint"} | _SPACES
_ALL_BYTES = (1 << CHUNK) - 1
_SIGNAL = "mbarrier::complete_tx::bytes"
_REDUCE = {"cp", "reduce", "async", "bulk", "L2::cache_hint", "noftz"} | _SPACES


@handles("cp.async.bulk")
def copy(instruction: Instruction) -> Handler:
    """cp.async.bulk in the direction that the opcode names."""
    direction = _direction(instruction)
    if direction in (("shared::cta", "global"), ("shared::cluster", "global")):
        return _load(instruction)
    if direction == ("shared::cluster", "shared::cta"):
        check_qualifiers(instruction, _COPY - {"L2::cache_hint"} | {_SIGNAL})
        return _to_cluster(instruction, None)
    if direction == ("global", "shared::cta"):
        return _store(instruction)
    raise unsupported(instruction, "the direction is not known")


@handles("cp.reduce.async.bulk")
def reduce(instruction: Instruction) -> Handler:
    """cp.reduce.async.bulk to global memory or to another CTA."""
    operation, kind = _operation(instruction)
    direction, known = _direction(instruction), _REDUCE | {operation, kind}
    if direction == ("shared::cluster", "shared::cta"):
        check_qualifiers(instruction, known | {_SIGNAL})
        return _to_cluster(instruction, _reduction(instruction, reductions.SHARED, operation, kind))
    if direction == ("global", "shared::cta"):
        check_qualifiers(instruction, known | {"bulk_group"})
        return _reduce_global(instruction, _reduction(instruction, reductions.GLOBAL, operation, kind))
    raise unsupported(instruction, "the direction is not known")


@handles("cp.async.bulk.prefetch")
def prefetch(instruction: Instruction) -> Handler:
    """cp.async.bulk.prefetch.L2: changes nothing but checks the alignment."""
    check_qualifiers(instruction, {"cp", "async", "bulk", "prefetch", "L2", "global", "L2::cache_hint"})
    source, size = instruction.operands[:2]

    def run(warp: Warp, mask: np.ndarray | None, source, size) -> None:
        for lane in lanes(mask):
            check_alignment(lane_value(source, lane), CHUNK, "the source", instruction)
            check_alignment(lane_value(size, lane), CHUNK, "the size", instruction)

    return Handler(run, [address_input(source, shared=False), Value(size, "u32")])


def _direction(instruction: Instruction) -> tuple[str, ...]:
    return tuple(part for part in instruction.parts if part in _SPACES)


def _operation(instruction: Instruction) -> tuple[str, str]:
    operation = next((part for part in instruction.parts if part in reductions.GLOBAL), "")
    return operation, instruction.parts[-1]


def _reduction(instruction: Instruction, valid: dict, operation: str, kind: str) -> reductions.Reduction:
    if kind not in valid.get(operation, ()):
        raise unsupported(instruction, f"there is no reduction {operation} of {kind} to this destination")
    if operation == "add" and kind in ("f16", "bf16") and "noftz" not in instruction.parts:
        raise unsupported(instruction, f"add.{kind} requires .noftz")
    return reductions.reduction(operation, kind)


def _checked_size(size, lane: int, instruction: Instruction) -> int:
    nbytes = lane_value(size, lane)
    check_alignment(nbytes, CHUNK, "the size", instruction)
    return nbytes


def _chunks(address_offset: int, nbytes: int) -> np.ndarray:
    first = address_offset // CHUNK
    return np.arange(first, first + nbytes // CHUNK)


def _load(instruction: Instruction) -> Handler:
    multicast = "multicast::cluster" in instruction.parts
    own = "shared::cta" in instruction.parts
    check_qualifiers(instruction, _COPY | {_SIGNAL} | (set() if own else {"multicast::cluster"}))
    expect_operands(instruction, 4 + multicast + ("L2::cache_hint" in instruction.parts))
    destination, source, size, barrier = instruction.operands[:4]
    inputs = [
        address_input(destination, shared=True),
        address_input(source, shared=False),
        Value(size, "u32"),
        address_input(barrier, shared=True),
    ]
    if multicast:
        inputs.append(Value(instruction.operands[4], "u16"))

    def run(warp: Warp, mask: np.ndarray | None, destination, source, size, barrier, ctas=None) -> None:
        for lane in issuers(warp, mask, instruction):
            address, nbytes = lane_value(source, lane), _checked_size(size, lane, instruction)
            check_alignment(address, CHUNK, "the source", instruction)
            first, offset = warp.cta.shared_target(shared_address(destination, lane), instruction)
            check_alignment(offset, CHUNK, "the destination", instruction)
            owner, at = warp.cta.shared_target(shared_address(barrier, lane), instruction)
            if own:
                check_own_cta(warp, first, "the destination", instruction)
            if ctas is None:
                check_signalled(owner, first, instruction)
            targets = [first] if ctas is None else multicast_ctas(warp, lane_value(ctas, lane), instruction)
            for cta in targets:
                move = _global_to_shared(warp, cta, address, offset, nbytes, instruction)
                issue_signalled(warp, instruction, move, cluster_address(cta, at), nbytes)

    return Handler(run, inputs)


def _global_to_shared(warp: Warp, cta: Cta, address: int, offset: int, nbytes: int, instruction: Instruction):
    def move(actor) -> None:
        if nbytes:
            values = warp.machine.global_memory.read_window(address, (nbytes,), (), actor, instruction)
            cta.shared.write_chunks(_chunks(offset, nbytes), values.reshape(-1, CHUNK), actor, instruction)

    return move


def _source(warp: Warp, source: int, nbytes: int, instruction: Instruction):
    """A function of the actor that reads the source in the executing CTA."""
    cta, offset = warp.cta.shared_target(source, instruction)
    check_own_cta(warp, cta, "the source", instruction)
    check_alignment(offset, CHUNK, "the source", instruction)
    chunks = _chunks(offset, nbytes)
    return lambda actor: cta.shared.read_chunks(chunks, actor, instruction) if nbytes else None


def _to_cluster(instruction: Instruction, function: reductions.Reduction | None) -> Handler:
    """Shared memory of the executing CTA to that of another."""
    expect_operands(instruction, 4)
    destination, source, size, barrier = instruction.operands

    def run(warp: Warp, mask: np.ndarray | None, destination, source, size, barrier) -> None:
        for lane in issuers(warp, mask, instruction):
            nbytes = _checked_size(size, lane, instruction)
            cta, offset = warp.cta.shared_target(shared_address(destination, lane), instruction)
            if cta is warp.cta:
                raise MemoryFaultError(f"{instruction.where}: the destination is in the executing CTA, not in another")
            check_alignment(offset, CHUNK, "the destination", instruction)
            signalled = shared_address(barrier, lane)
            check_signalled(warp.cta.shared_target(signalled, instruction)[0], cta, instruction)
            read = _source(warp, shared_address(source, lane), nbytes, instruction)
            move = _shared_to_shared(cta, read, _chunks(offset, nbytes), function, instruction)
            issue_signalled(warp, instruction, move, signalled, nbytes)

    inputs = [address_input(destination, shared=True), address_input(source, shared=True), Value(size, "u32")]
    return Handler(run, [*inputs, address_input(barrier, shared=True)])


def _shared_to_shared(
    cta: Cta, read, chunks: np.ndarray, function: reductions.Reduction | None, instruction: Instruction
):
    def move(actor) -> None:
        values = read(actor)
        if values is None:
            return
        if function is None:
            cta.shared.write_chunks(chunks, values, actor, instruction)
        else:
            cta.shared.update_chunks(chunks, lambda old: function(old, values), actor, instruction)

    return move


def _store(instruction: Instruction) -> Handler:
    masked, hinted = "cp_mask" in instruction.parts, "L2::cache_hint" in instruction.parts
    check_qualifiers(instruction, _COPY | {"bulk_group", "cp_mask"})
    expect_operands(instruction, 3 + masked + hinted)
    destination, source, size = instruction.operands[:3]
    inputs = [address_input(destination, shared=False), address_input(source, shared=True), Value(size, "u32")]
    if masked:
        inputs.append(Value(instruction.operands[-1], "u16"))

    def run(warp: Warp, mask: np.ndarray | None, *values) -> None:
        memory = warp.machine.global_memory
        for (address, source, nbytes, *kept), issuing in alike(issuers(warp, mask, instruction), *values).items():
            check_alignment(nbytes, CHUNK, "the size", instruction)
            check_alignment(address, CHUNK, "the destination", instruction)
            read = _source(warp, source & SHARED_MASK, nbytes, instruction)
            write = _shared_to_global(memory, address, kept[0] if kept else _ALL_BYTES, instruction)
            issue_grouped(warp, issuing, instruction, read, write)

    return Handler(run, inputs)


def _shared_to_global(memory, address: int, kept: int, instruction: Instruction):
    """A function that stores the bytes of each chunk whose bit is set in `kept`."""

    def write(values, actor) -> None:
        if values is None:
            return
        if kept == _ALL_BYTES:
            memory.write_window(address, (), values.reshape(-1), actor, instruction)
            return
        chosen = np.flatnonzero([kept >> i & 1 for i in range(CHUNK)])
        offsets = np.arange(len(values))[:, None] * CHUNK + chosen
        memory.write_bytes(address, offsets, values[:, chosen], actor, instruction)

    return write


def _reduce_global(instruction: Instruction, function: reductions.Reduction) -> Handler:
    expect_operands(instruction, 3 + ("L2::cache_hint" in instruction.parts))
    destination, source, size = instruction.operands[:3]

    def run(warp: Warp, mask: np.ndarray | None, destination, source, size) -> None:
        memory = warp.machine.global_memory
        for lane in issuers(warp, mask, instruction):
            nbytes, address = _checked_size(size, lane, instruction), lane_value(destination, lane)
            check_alignment(address, CHUNK, "the destination", instruction)
            read = _source(warp, shared_address(source, lane), nbytes, instruction)
            issue_grouped(warp, only(lane), instruction, read, _into_global(memory, address, function, instruction))

    inputs = [address_input(destination, shared=False), address_input(source, shared=True), Value(size, "u32")]
    return Handler(run, inputs)


def _into_global(memory, address: int, function: reductions.Reduction, instruction: Instruction):
    def write(values, actor) -> None:
        if values is not None:
            new = values.reshape(-1)
            memory.update_window(address, new.shape, (), lambda old: function(old, new), actor, instruction)

    return write
