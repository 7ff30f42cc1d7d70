"""tcgen05.commit, tcgen05.wait and tcgen05.fence."""

from __future__ import annotations

from ..machine.memory import OFFSET_MASK, RANK_SHIFT
from ..machine.warp import Warp
from ..ptx.syntax import Instruction
from .access import address_value
from .handler import Handler, Value, handles, lane_value, unsupported
from .tcgen05_data import finish_loads, finish_stores
from .tcgen05_issue import group_size, issue, issuers


@handles("tcgen05.commit")
def commit(instruction: Instruction) -> Handler:
    """`tcgen05.commit [mbarrier] {, mask}`: one arrival, by the stream, when all before it have taken effect.

    With a mask the arrival is at the same offset in each CTA of the cluster that the mask names.
    """
    group_size(instruction)
    if "mbarrier::arrive::one" not in instruction.parts:
        raise unsupported(instruction, "only .mbarrier::arrive::one is known")
    multicast = "multicast::cluster" in instruction.parts

    def run(warp: Warp, mask, address, ctas=None):
        for lane in issuers(warp, mask, instruction):
            first = lane_value(address, lane)
            targets = [first]
            if multicast:
                chosen = lane_value(ctas, lane)
                targets = [rank << RANK_SHIFT | first & OFFSET_MASK for rank in range(16) if chosen >> rank & 1]
            issue(warp, instruction, lambda operation, targets=targets: _arrive(warp, targets, operation, instruction))

    inputs = [address_value(instruction.operands[0])]
    if multicast:
        inputs.append(Value(instruction.operands[1], "u16"))
    return Handler(run, inputs=inputs)


def _arrive(warp: Warp, targets: list[int], operation, instruction: Instruction) -> None:
    for target in targets:
        warp.cta.mbarrier(target, operation.actor, instruction, True).arrive(1, operation.actor)
    warp.machine.changed()


@handles("tcgen05.wait::ld", "tcgen05.wait::st")
def wait(instruction: Instruction) -> Handler:
    """The warp's loads have been done, or its stores take effect."""
    finish = finish_loads if instruction.parts[1] == "wait::ld" else finish_stores

    def run(warp: Warp, mask):
        waiting = warp.converged(mask)
        if waiting is not None:
            return waiting
        finish(warp)
        return None

    return Handler(run, convergent=True)


@handles("tcgen05.fence::before_thread_sync", "tcgen05.fence::after_thread_sync")
def fence(instruction: Instruction) -> Handler:
    """No effect: they order for the compiler what barriers order for the threads."""
    return Handler(lambda warp, mask: None)
