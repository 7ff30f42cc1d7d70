"""How bulk copies are issued and complete: on mbarriers, or in bulk groups in the two steps of reading and writing."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import BarrierFaultError, MemoryFaultError
from ..machine.memory import RANK_SHIFT
from ..ptx.syntax import Address, Instruction, Register
from .async_groups import commit_handler, groups_of, wait_handler
from .handler import Handler, Value, handles, lane_value, lanes, unsupported

if TYPE_CHECKING:
    from ..machine.warp import Cta, Warp

_READS, _WRITES = "bulk groups being read", "bulk groups"
SHARED_MASK = 0xFFFFFFFF


def address_input(operand: Address, shared: bool) -> Value:
    """An address as an input of a handler. Shared addresses may be held in 64-bit registers, too."""
    wide = not shared or (isinstance(operand.base, Register) and operand.base.kind == "b64")
    return Value(operand.base, "b64" if wide else "b32", operand.offset)


def shared_address(value: Any, lane: int) -> int:
    """The shared address of one lane."""
    return lane_value(value, lane) & SHARED_MASK


def cluster_address(cta: Cta, offset: int) -> int:
    """The shared::cluster address of a byte offset in a CTA."""
    return cta.rank << RANK_SHIFT | offset


def alike(issuing: list[int], *values: Any) -> dict[tuple[int, ...], np.ndarray]:
    """The lanes that issue an instruction with the same operands, as masks by the operands."""
    masks: dict[tuple[int, ...], np.ndarray] = {}
    for lane in issuing:
        key = tuple(lane_value(value, lane) for value in values)
        masks.setdefault(key, np.zeros(32, bool))[lane] = True
    return masks


def only(lane: int) -> np.ndarray:
    """The mask of one lane."""
    mask = np.zeros(32, bool)
    mask[lane] = True
    return mask


def check_qualifiers(instruction: Instruction, known: set[str]) -> None:
    """Reject an opcode with a qualifier that is not among the known ones."""
    unknown = [part for part in instruction.parts if part not in known]
    if unknown:
        raise unsupported(instruction, f"the qualifier .{unknown[0]} is not modelled")


def expect_operands(instruction: Instruction, count: int) -> None:
    """Reject an instruction with another number of operands."""
    if len(instruction.operands) != count:
        raise unsupported(instruction, f"{count} operands are expected, not {len(instruction.operands)}")


def issuers(warp: Warp, mask: np.ndarray | None, instruction: Instruction) -> list[int]:
    """The lanes that issue a single-thread instruction; more than one is reported."""
    issuing = lanes(mask)
    if len(issuing) > 1:
        warp.machine.report("issue", f"{instruction.where} is issued by {len(issuing)} threads of a warp at once")
    return issuing


def check_alignment(address: int, alignment: int, what: str, instruction: Instruction) -> None:
    """Fault if an address is not aligned."""
    if address % alignment:
        raise MemoryFaultError(f"{instruction.where}: {what} {address:#x} is no multiple of {alignment} bytes")


def check_own_cta(warp: Warp, cta: Cta, what: str, instruction: Instruction) -> None:
    """Fault if a shared::cta address is that of another CTA."""
    if cta is not warp.cta:
        raise MemoryFaultError(
            f"{instruction.where}: {what} is in CTA rank {cta.rank}; shared::cta is that of rank {warp.cta.rank}"
        )


def multicast_ctas(warp: Warp, mask: int, instruction: Instruction) -> list[Cta]:
    """The destination CTAs of a multicast."""
    if mask >> len(warp.cta.cluster):
        raise MemoryFaultError(f"{instruction.where}: the CTA mask {mask:#x} names CTAs outside of the cluster")
    return [cta for cta in warp.cta.cluster if mask >> cta.rank & 1]


def check_signalled(owner: Cta, destination: Cta, instruction: Instruction) -> None:
    """Fault if the mbarrier is not in the CTA of the destination."""
    if owner is not destination:
        raise BarrierFaultError(
            f"{instruction.where}: the mbarrier is in CTA rank {owner.rank}, the destination in rank {destination.rank}"
        )


def issue_signalled(
    warp: Warp, instruction: Instruction, copy: Callable[[Any], None], barrier: int, nbytes: int
) -> None:
    """Issue `copy(actor)`, which completes `nbytes` of the mbarrier at a shared address."""
    machine = warp.machine
    warp.cta.mbarrier(barrier, warp.actor, instruction)

    def effect(operation) -> None:
        copy(operation.actor)
        signalled = warp.cta.mbarrier(barrier, operation.actor, instruction, True)
        try:
            signalled.complete(nbytes, operation.actor)
        except BarrierFaultError as e:
            raise BarrierFaultError(f"{instruction.where}: {e}") from None
        machine.changed()

    machine.issue(warp, "tma", instruction, effect)


def issue_grouped(
    warp: Warp,
    mask: np.ndarray | None,
    instruction: Instruction,
    read: Callable[[Any], Any],
    write: Callable[[Any, Any], None],
) -> None:
    """Issue `write(read(actor), actor)` in the bulk groups of the lanes of a mask.

    The source is read some time before the destination is written, and `wait_group.read` waits for that only.
    """
    machine, steps = warp.machine, _Steps()

    def read_source(operation) -> None:
        if not steps.was_read:
            steps.value, steps.was_read = read(reading.actor), True
            machine.changed()

    def write_destination(operation) -> None:
        read_source(operation)
        write(steps.value, operation.actor)
        steps.value, steps.was_written = None, True
        machine.changed()

    reading = machine.issue(warp, "tma", instruction, read_source)
    writing = machine.issue(warp, "tma", instruction, write_destination)
    groups_of(warp, _READS).add(mask, lambda: steps.was_read, reading.actor, instruction)
    groups_of(warp, _WRITES).add(mask, lambda: steps.was_written, writing.actor, instruction)


class _Steps:
    """How far a store has come."""

    __slots__ = ("value", "was_read", "was_written")

    def __init__(self) -> None:
        self.value, self.was_read, self.was_written = None, False, False


@handles("cp.async.bulk.commit_group")
def commit_group(instruction: Instruction) -> Handler:
    """cp.async.bulk.commit_group."""
    return commit_handler(_READS, _WRITES)


@handles("cp.async.bulk.wait_group")
def wait_group(instruction: Instruction) -> Handler:
    """cp.async.bulk.wait_group{.read} N."""
    keep = instruction.operands[0].value
    if instruction.parts[-1] == "read":
        return wait_handler((_READS,), keep)
    return wait_handler((_WRITES, _READS), keep)
