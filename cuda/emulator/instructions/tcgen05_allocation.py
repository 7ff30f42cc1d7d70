"""tcgen05.alloc, .dealloc and .relinquish_alloc_permit; with cta_group::2 both CTAs of a pair take part at once."""

from __future__ import annotations

import numpy as np

from ..errors import MemoryFaultError
from ..machine.barriers import ThreadBarrier
from ..machine.tensor_memory import COLUMNS, TensorMemory, first_fit, split_address
from ..machine.wait import Wait
from ..machine.warp import Cta, Warp
from ..ptx.syntax import Instruction
from .access import address_value
from .handler import Handler, Value, handles, lane_value, leader
from .tcgen05_issue import group_ctas, group_size


class _Pair:
    """Collective allocations of two CTAs: where they meet, and what has been allocated for which CTA."""

    def __init__(self, ctas: list[Cta], monitor) -> None:
        ranks = f"CTA ranks {ctas[0].rank} and {ctas[1].rank}"
        self.barriers = {what: ThreadBarrier(f"{what} of {ranks}", monitor) for what in ("alloc", "dealloc")}
        self.memories = [cta.tensor for cta in ctas]
        self.requested = 0  # columns; 0 when nobody has asked
        self.granted: dict[int, int] = {}

    def request(self, columns: int, instruction: Instruction) -> None:
        if self.requested not in (0, columns):
            raise MemoryFaultError(f"{instruction.where}: allocates {columns} columns, the other CTA {self.requested}")
        self.requested = columns

    def grant(self) -> bool:
        """Allocate for both if there is room."""
        if self.granted:
            return True
        first = first_fit(self.memories, self.requested)
        if first is None:
            return False
        _take(self.memories, first, self.requested)
        self.granted = {memory.rank: first for memory in self.memories}
        return True

    def collect(self, rank: int) -> int:
        """The column granted to one of the CTAs."""
        first = self.granted.pop(rank)
        if not self.granted:
            self.requested = 0
        return first


def _pair(cta: Cta) -> _Pair:
    ctas = group_ctas(cta, 2)
    first = ctas[0].tensor
    if not isinstance(first.pair, _Pair):
        first.pair = _Pair(ctas, cta.machine.monitor)
    return first.pair


def _take(memories: list[TensorMemory], first: int, columns: int) -> None:
    for memory in memories:
        memory.allocate(first, columns)


def _meet(warp: Warp, barrier: ThreadBarrier, instruction: Instruction, orders: bool) -> Wait | None:
    """None when both CTAs have come to the barrier, which this group joins once; whether it `orders` their memory."""
    group = warp.group
    if group.token is None:
        group.token = barrier.generation
        barrier.arrive(1, 2, warp.actor, instruction)
        warp.machine.changed()
    generation = group.token
    if not generation.over:
        return Wait(lambda: generation.over, lambda: str(barrier))
    if orders and warp.machine.monitor is not None and warp.actor is not None:
        warp.machine.monitor.acquire(generation, warp.actor)
    return None


@handles("tcgen05.alloc")
def allocate(instruction: Instruction) -> Handler:
    """`tcgen05.alloc [address], columns`: writes the address of the columns to shared memory."""
    single = group_size(instruction) == 1

    def run(warp: Warp, mask, address, columns):
        wait = warp.converged(mask)
        if wait is not None:
            return wait
        lane = leader(mask)
        wanted = lane_value(columns, lane) & 0xFFFFFFFF
        if not 32 <= wanted <= COLUMNS or wanted & (wanted - 1):
            raise MemoryFaultError(f"{instruction.where}: {wanted} columns are no power of two from 32 to {COLUMNS}")
        first = _alone(warp, wanted) if single else _together(warp, wanted, instruction)
        if isinstance(first, Wait):
            return first
        cta, offset = warp.cta.shared_target(lane_value(address, lane), instruction)
        cta.shared.write(np.array([offset]), np.array([first], np.uint32), 4, warp.actor, instruction)
        return None

    inputs = [address_value(instruction.operands[0]), Value(instruction.operands[1], "u32")]
    return Handler(run, inputs=inputs, blocking=True, convergent=True)


def _alone(warp: Warp, columns: int) -> int | Wait:
    memory = warp.cta.tensor
    first = first_fit([memory], columns)
    if first is None:
        return Wait(
            lambda: first_fit([memory], columns) is not None, lambda: f"{columns} free columns of tensor memory"
        )
    memory.allocate(first, columns)
    return first


def _together(warp: Warp, columns: int, instruction: Instruction) -> int | Wait:
    pair = _pair(warp.cta)
    if warp.group.token is None:
        pair.request(columns, instruction)
    wait = _meet(warp, pair.barriers["alloc"], instruction, orders=True)
    if wait is not None:
        return wait
    if not pair.grant():
        return Wait(pair.grant, lambda: f"{columns} free columns of the tensor memory of two CTAs")
    warp.group.token = None
    return pair.collect(warp.cta.rank)


@handles("tcgen05.dealloc")
def deallocate(instruction: Instruction) -> Handler:
    """`tcgen05.dealloc address, columns`: the PTX ISA says of no order that it makes between two CTAs."""
    single = group_size(instruction) == 1

    def run(warp: Warp, mask, address, columns):
        wait = warp.converged(mask)
        if wait is not None:
            return wait
        if not single:
            wait = _meet(warp, _pair(warp.cta).barriers["dealloc"], instruction, orders=False)
            if wait is not None:
                return wait
            warp.group.token = None
        lane = leader(mask)
        _, first = split_address(lane_value(address, lane))
        warp.cta.tensor.deallocate(first, lane_value(columns, lane) & 0xFFFFFFFF, warp.actor, instruction)
        warp.machine.changed()
        return None

    inputs = [Value(operand, "u32") for operand in instruction.operands[:2]]
    return Handler(run, inputs=inputs, blocking=True, convergent=True)


@handles("tcgen05.relinquish_alloc_permit")
def relinquish(instruction: Instruction) -> Handler:
    """No effect: nobody waits for the permit."""
    group_size(instruction)
    return Handler(lambda warp, mask: None)
