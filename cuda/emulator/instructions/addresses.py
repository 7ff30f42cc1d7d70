"""Conversions and questions of addresses. Shared addresses are generic addresses as they are."""

from __future__ import annotations

import numpy as np

from ..machine.memory import OFFSET_MASK, PARAMETER_BASE, RANK_SHIFT
from ..ptx.syntax import Instruction
from .access import SHARED_WINDOW
from .handler import Handler, Value, handles, unsupported


@handles("cvta")
def convert(instruction: Instruction) -> Handler:
    """cvta{.to}.space.size destination, source: the identity, as every space is a part of the generic one."""
    if "local" in instruction.parts or "const" in instruction.parts:
        raise unsupported(instruction, "the local and constant spaces")
    destination, source = instruction.operands
    kind = instruction.parts[-1]
    wide = np.uint64 if kind == "u64" else np.uint32

    def run(warp, mask, source):
        return source if isinstance(source, int) else source.astype(wide, copy=False)

    return Handler(run, inputs=[Value(source, kind)], outputs=[Value(destination, kind)], uniform="inputs")


@handles("mapa")
def map_to_rank(instruction: Instruction) -> Handler:
    """mapa{.shared::cluster}.type destination, address, rank: the same place in another CTA of the cluster."""
    destination, address, rank = instruction.operands
    kind = instruction.parts[-1]

    def run(warp, mask, address, rank):
        if isinstance(address, int) and isinstance(rank, int):
            return address & OFFSET_MASK | rank << RANK_SHIFT
        wide = np.dtype("u8" if kind == "u64" else "u4").type
        return np.broadcast_to(
            np.asarray(address, wide) & wide(OFFSET_MASK) | np.asarray(rank, wide) << wide(RANK_SHIFT), 32
        )

    return Handler(run, [Value(address, kind), Value(rank, "u32")], [Value(destination, kind)], uniform="inputs")


@handles("getctarank")
def rank_of(instruction: Instruction) -> Handler:
    """getctarank{.shared::cluster}.type rank, address."""
    rank, address = instruction.operands
    kind = instruction.parts[-1]

    def run(warp, mask, address):
        return address >> RANK_SHIFT if isinstance(address, int) else (address >> RANK_SHIFT).astype(np.uint32)

    return Handler(run, [Value(address, kind)], [Value(rank, "u32")], uniform="inputs")


@handles("isspacep")
def is_in_space(instruction: Instruction) -> Handler:
    """isspacep.space predicate, generic address."""
    predicate, address = instruction.operands
    space = instruction.parts[1]
    if space not in ("global", "shared", "shared::cta", "shared::cluster", "param", "param::entry", "const", "local"):
        raise unsupported(instruction)

    def run(warp, mask, address):
        if space in ("const", "local"):
            return False if isinstance(address, int) else np.zeros(32, bool)
        shared = address < SHARED_WINDOW
        if space == "shared::cluster":
            return shared
        if space in ("shared", "shared::cta"):
            return shared & (address >> RANK_SHIFT == warp.cta.rank)
        if space == "global":
            return (address >= SHARED_WINDOW) & (address < PARAMETER_BASE)
        return address >= PARAMETER_BASE

    return Handler(run, [Value(address, "u64")], [Value(predicate, "pred")], uniform="inputs")
