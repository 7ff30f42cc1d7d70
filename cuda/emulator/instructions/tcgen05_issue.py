"""What the tcgen05 instructions have in common: who issues them, for which CTAs, in which stream."""

from __future__ import annotations

from ..machine.warp import Cta, Warp
from ..ptx.syntax import Instruction
from .handler import lanes, unsupported


def group_size(instruction: Instruction) -> int:
    """1 or 2, from cta_group."""
    for size in (1, 2):
        if f"cta_group::{size}" in instruction.parts:
            return size
    raise unsupported(instruction, "it has no cta_group")


def group_ctas(cta: Cta, size: int) -> list[Cta]:
    """The CTAs of the group, in order of rank."""
    if size == 1:
        return [cta]
    first = cta.rank & ~1
    return cta.cluster[first : first + 2]


def issuers(warp: Warp, mask, instruction: Instruction) -> list[int]:
    """The lanes that issue an instruction that one thread should issue."""
    issuing = lanes(mask)
    if len(issuing) > 1:
        warp.machine.report(
            "issue", f"{len(issuing)} threads of a warp issue {instruction.where}, which is for one thread"
        )
    return issuing


def issue(warp: Warp, instruction: Instruction, effect) -> None:
    """Put an operation in the ordered tensor core stream of the warp."""
    warp.machine.issue(warp, "tensor", instruction, effect, stream=("tensor", warp.cta.index, warp.index))


def agent_of(warp: Warp, engine: str) -> tuple:
    """The one object that stands for a warp's operations of a kind in race checking, which compares by identity."""
    kept = warp.pending[f"{engine} agent"]
    if not kept:
        kept.append((engine, warp.cta.index, warp.index))
    return kept[0]
