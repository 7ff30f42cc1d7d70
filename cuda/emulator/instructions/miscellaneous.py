"""Fences, and what has little or no effect here."""

from __future__ import annotations

from ..errors import EmulationError
from ..ptx.syntax import Immediate, Instruction
from .access import address_value, lane_addresses
from .handler import Handler, Value, handles, unsupported

_MIN_REGISTERS, _MAX_REGISTERS = 24, 256


def _no_effect(warp, mask) -> None:
    return None


@handles("fence", "membar")
def fence(instruction: Instruction) -> Handler:
    """fence{.sem}.scope and membar.scope: they cover the relaxed accesses around them. Scopes are not told apart."""
    acquire, release = "release" not in instruction.parts, "acquire" not in instruction.parts
    known = ("sc", "acq_rel", "acquire", "release", "cta", "cluster", "gpu", "sys", "gl")
    if any(
        part not in known and part.split("::")[0] not in ("sync_restrict", "shared") for part in instruction.parts[1:]
    ):
        raise unsupported(instruction)

    def run(warp, mask) -> None:
        if warp.actor is not None:
            warp.machine.monitor.fence(warp.actor, acquire, release)

    return Handler(run)


@handles("fence.proxy", "membar.proxy")
def proxy_fence(instruction: Instruction) -> Handler:
    """fence.proxy.async: what the warp knows becomes visible to the asynchronous proxy, in every space.

    Aliases and tensor maps are constants of a launch, so that the fences for them have no effect.
    """
    kind = instruction.parts[2]
    if kind in ("alias", "tensormap::generic"):
        return Handler(_no_effect)
    if kind != "async":
        raise unsupported(instruction)

    def run(warp, mask) -> None:
        if warp.actor is not None:
            warp.machine.monitor.publish(warp.actor)

    return Handler(run)


@handles("fence.mbarrier_init")
def init_fence(instruction: Instruction) -> Handler:
    """fence.mbarrier_init.release.cluster: a relaxed arrival behind it releases the initialised barriers.

    The asynchronous proxy sees them from then on, too.
    """

    def run(warp, mask) -> None:
        if warp.actor is None:
            return
        known, published = warp.actor.fenced
        for event in warp.pending["initialised"]:
            known |= 1 << event
            published |= 1 << event
            warp.actor.published |= 1 << event
        warp.actor.fenced = known, published

    return Handler(run)


@handles("setmaxnreg")
def set_registers(instruction: Instruction) -> Handler:
    """setmaxnreg.{inc,dec}.sync.aligned.u32 count: needs the warp together, and has no other effect."""
    (count,) = instruction.operands
    if not isinstance(count, Immediate):
        raise unsupported(instruction, "the count must be an immediate")
    if not _MIN_REGISTERS <= count.value <= _MAX_REGISTERS or count.value % 8:
        raise EmulationError(f"{instruction.where}: {count.value} registers; a multiple of 8 from 24 to 256 is needed")
    return Handler(lambda warp, mask: warp.converged(mask), convergent=True)


@handles("griddepcontrol", "nanosleep", "prefetch", "prefetchu", "applypriority", "brkpt", "pmevent")
def without_effect(instruction: Instruction) -> Handler:
    """Timing, caches and debuggers. A grid's predecessors are over when it starts."""
    return Handler(_no_effect)


@handles("createpolicy")
def create_policy(instruction: Instruction) -> Handler:
    """createpolicy: a cache policy has no effect; 0 stands for all of them."""
    return Handler(lambda warp, mask: 0, outputs=[Value(instruction.operands[0], "b64")], uniform="always")


@handles("discard")
def discard(instruction: Instruction) -> Handler:
    """discard{.global}.L2 [address], 128: the bytes become undefined, so that reading them is a fault."""
    address, size = instruction.operands

    def run(warp, mask, address) -> None:
        for where in lane_addresses(address, mask).tolist():
            warp.machine.global_memory.discard(where, size.value, warp.actor, instruction)

    return Handler(run, inputs=[address_value(address)])


@handles("trap")
def trap(instruction: Instruction) -> Handler:
    """trap: the kernel gives up."""

    def run(warp, mask) -> None:
        raise EmulationError(f"{instruction.where}: {warp.name} executed trap")

    return Handler(run)
