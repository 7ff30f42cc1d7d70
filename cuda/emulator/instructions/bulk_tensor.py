"""Copies and reductions of tiles of tensor maps (TMA): cp.async.bulk.tensor and cp.reduce.async.bulk.tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from ..errors import BarrierFaultError, DescriptorFaultError
from ..machine.tensor_copy import (
    SHARED_ALIGNMENT,
    load_tile,
    read_source,
    reduce_destination,
    write_destination,
)
from ..ptx.syntax import Address, Instruction
from ..tensor_map import TensorMap
from . import reductions
from .bulk_completion import (
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
from .handler import Handler, Value, handles, lane_value, lanes, leader, unsupported

if TYPE_CHECKING:
    from ..machine.warp import Cta, Warp

_DIMENSIONS = {f"{n}d" for n in range(1, 6)}
_COMMON = {"cp", "async", "bulk", "tensor", "tile", "L2::cache_hint", "global"} | _DIMENSIONS
_LOAD = _COMMON | {"shared::cta", "shared::cluster", "mbarrier::complete_tx::bytes", "cta_group::1", "cta_group::2"}
_LOAD |= {"multicast::cluster", "tile::gather4"}
_STORE = _COMMON | {"shared::cta", "bulk_group", "tile::scatter4"}
_ROWS = 4  # of tile::gather4 and tile::scatter4


@handles("cp.async.bulk.tensor")
def copy(instruction: Instruction) -> Handler:
    """cp.async.bulk.tensor in the direction that the opcode names."""
    return _store(instruction) if "bulk_group" in instruction.parts else _load(instruction)


@handles("cp.reduce.async.bulk.tensor")
def reduce(instruction: Instruction) -> Handler:
    """cp.reduce.async.bulk.tensor."""
    operation = next((part for part in instruction.parts if part in reductions.TENSOR), None)
    if operation is None:
        raise unsupported(instruction, "the reduction is not known")
    check_qualifiers(instruction, _STORE - {"tile::scatter4"} | {"reduce", operation})
    return _to_global(instruction, lambda tensor: _tensor_reduction(tensor, operation, instruction))


@handles("cp.async.bulk.prefetch.tensor")
def prefetch(instruction: Instruction) -> Handler:
    """cp.async.bulk.prefetch.tensor: changes nothing but checks the map and the coordinates."""
    check_qualifiers(instruction, _COMMON | {"prefetch", "L2", "tile::gather4"})
    rank, at = _coordinates(instruction, instruction.operands[0])

    def run(warp: Warp, mask: np.ndarray | None, tensor_map, *coordinates) -> None:
        for lane in lanes(mask):
            _tensor(warp, tensor_map, lane, rank, instruction)

    return Handler(run, [address_input(instruction.operands[0], shared=False), *at])


@handles("prefetch.tensormap", "prefetch.param.tensormap", "prefetch.const.tensormap")
def prefetch_map(instruction: Instruction) -> Handler:
    """prefetch.tensormap: changes nothing."""
    return Handler(lambda warp, mask: None)


@handles("tensormap.replace", "tensormap.cp_fenceproxy", "fence.proxy.tensormap", "fence.proxy.tensormap::generic")
def modify_map(instruction: Instruction) -> Handler:
    """Tensor maps that the kernel changes."""
    raise unsupported(
        instruction, "tensor maps are objects of the launch, not the 128 bytes that a kernel could change"
    )


def _coordinates(instruction: Instruction, operand: Address) -> tuple[int, list[Value]]:
    """The rank that the opcode names, and the coordinates as inputs."""
    rank = next((int(part[0]) for part in instruction.parts if part in _DIMENSIONS), 0)
    by_rows = {"tile::gather4", "tile::scatter4"} & set(instruction.parts)
    if by_rows and rank != 2:
        raise unsupported(instruction, "four rows are those of a tensor map of rank 2")
    count = 1 + _ROWS if by_rows else rank
    if len(operand.coordinates) != count or count == 0:
        raise unsupported(instruction, f"{count} coordinates are expected, not {len(operand.coordinates)}")
    return rank, [Value(c, "b32") for c in operand.coordinates]


def _tensor(warp: Warp, tensor_map, lane: int, rank: int, instruction: Instruction) -> TensorMap:
    tensor = warp.machine.tensor_map(lane_value(tensor_map, lane))
    if tensor.rank != rank:
        raise DescriptorFaultError(f"{instruction.where}: the tensor map has rank {tensor.rank}")
    return tensor


def _at(coordinates, lane: int) -> list[int]:
    """The coordinates of one lane, as signed numbers."""
    return [((lane_value(c, lane) & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000 for c in coordinates]


def _tiles(tensor: TensorMap, at: list[int], by_rows: bool, instruction: Instruction) -> list[tuple[list[int], int]]:
    """The coordinates of the boxes of one instruction, and where each is in shared memory behind the first."""
    if not by_rows:
        return [(at, 0)]
    if tensor.counts[1] != 1:
        raise DescriptorFaultError(
            f"{instruction.where}: boxDim[1] must be 1 for four single rows, not {tensor.counts[1]}"
        )
    pitch = max(tensor.element.shared_bytes(tensor.counts[0]), tensor.swizzle.span)
    return [([at[0], row], i * pitch) for i, row in enumerate(at[1:])]


def _load(instruction: Instruction) -> Handler:
    parts = instruction.parts
    check_qualifiers(instruction, _LOAD)
    multicast, pair, own = "multicast::cluster" in parts, "cta_group::2" in parts, "shared::cta" in parts
    expect_operands(instruction, 3 + multicast + ("L2::cache_hint" in parts))
    destination, source, barrier = instruction.operands[:3]
    rank, coordinates = _coordinates(instruction, source)
    by_rows = "tile::gather4" in parts
    inputs = [
        address_input(destination, shared=True),
        address_input(source, shared=False),
        address_input(barrier, shared=True),
        *coordinates,
    ]
    if multicast:
        inputs.append(Value(instruction.operands[3], "u16"))

    def run(warp: Warp, mask: np.ndarray | None, destination, source, barrier, *rest) -> None:
        for lane in issuers(warp, mask, instruction):
            tensor = _tensor(warp, source, lane, rank, instruction)
            tiles = _tiles(tensor, _at(rest[: len(coordinates)], lane), by_rows, instruction)
            first, offset = warp.cta.shared_target(shared_address(destination, lane), instruction)
            check_alignment(offset, SHARED_ALIGNMENT, "the destination", instruction)
            owner, at = warp.cta.shared_target(shared_address(barrier, lane), instruction)
            if own:
                check_own_cta(warp, first, "the destination", instruction)
                check_own_cta(warp, owner, "the mbarrier", instruction)
            ctas = multicast_ctas(warp, lane_value(rest[-1], lane), instruction) if multicast else None
            for cta, signalled in _targets(first, owner, ctas, pair, warp, instruction):
                move = _loading(warp, tensor, tiles, cta, offset, instruction)
                nbytes = tensor.tile_bytes * len(tiles)
                issue_signalled(warp, instruction, move, cluster_address(signalled, at), nbytes)

    return Handler(run, inputs)


def _targets(
    first: Cta, owner: Cta, ctas: list[Cta] | None, pair: bool, warp: Warp, instruction: Instruction
) -> list[tuple[Cta, Cta]]:
    """Each destination CTA with the CTA whose mbarrier is signalled for it.

    With cta_group::2 the mbarrier may be that of the other CTA of the pair; a multicast signals, for each destination,
    the CTA of its pair that has the parity of the mbarrier's.
    """
    if ctas is not None:
        return [(cta, warp.cta.cluster[cta.rank & ~1 | owner.rank & 1] if pair else cta) for cta in ctas]
    if not pair:
        check_signalled(owner, first, instruction)
    elif owner.rank >> 1 != first.rank >> 1:
        raise BarrierFaultError(
            f"{instruction.where}: the mbarrier is in CTA rank {owner.rank}, no peer of the destination's {first.rank}"
        )
    return [(first, owner)]


def _loading(warp: Warp, tensor: TensorMap, tiles, cta: Cta, offset: int, instruction: Instruction):
    def move(actor) -> None:
        for at, behind in tiles:
            load_tile(tensor, at, warp.machine.global_memory, cta.shared, offset + behind, actor, instruction)

    return move


def _store(instruction: Instruction) -> Handler:
    check_qualifiers(instruction, _STORE)
    return _to_global(instruction, None)


def _to_global(instruction: Instruction, reduction_of: Callable[[TensorMap], reductions.Reduction] | None) -> Handler:
    """A store, or a reduction by the function for the tensor map's element type.

    A store that several lanes issue alike is done once: repeating it would change nothing.
    """
    expect_operands(instruction, 2 + ("L2::cache_hint" in instruction.parts))
    destination, source = instruction.operands[:2]
    rank, inputs = _coordinates(instruction, destination)
    by_rows = "tile::scatter4" in instruction.parts

    def run(warp: Warp, mask: np.ndarray | None, tensor_map, source, *coordinates) -> None:
        issuing = issuers(warp, mask, instruction)
        if reduction_of is None:
            masks = [*alike(issuing, tensor_map, source, *coordinates).values()]
        else:
            masks = [only(lane) for lane in issuing]
        for lanes_alike in masks:
            lane = leader(lanes_alike)
            tensor = _tensor(warp, tensor_map, lane, rank, instruction)
            at = _at(coordinates, lane)
            if min(at) < 0:
                # It clips as a load does, but the PTX ISA excludes it.
                warp.machine.report(
                    "issue", f"{instruction.where} stores from negative coordinates, which is not allowed"
                )
            tiles = _tiles(tensor, at, by_rows, instruction)
            cta, offset = warp.cta.shared_target(shared_address(source, lane), instruction)
            check_own_cta(warp, cta, "the source", instruction)
            check_alignment(offset, SHARED_ALIGNMENT, "the source", instruction)
            function = None if reduction_of is None else reduction_of(tensor)
            read, write = _storing(warp, tensor, tiles, cta, offset, function, instruction)
            issue_grouped(warp, lanes_alike, instruction, read, write)

    return Handler(run, [address_input(destination, shared=False), address_input(source, shared=True), *inputs])


def _storing(warp: Warp, tensor: TensorMap, tiles, cta: Cta, offset: int, function, instruction: Instruction):
    """The two steps of a store."""

    def read(actor) -> list[np.ndarray | None]:
        return [read_source(tensor, at, cta.shared, offset + behind, actor, instruction) for at, behind in tiles]

    def write(values: list[np.ndarray | None], actor) -> None:
        memory = warp.machine.global_memory
        for (at, _), tile in zip(tiles, values, strict=True):
            if function is None:
                write_destination(tensor, at, tile, memory, actor, instruction)
            else:
                reduce_destination(tensor, at, tile, function, memory, actor, instruction)

    return read, write


def _tensor_reduction(tensor: TensorMap, operation: str, instruction: Instruction) -> reductions.Reduction:
    kind = tensor.element.name
    if kind not in reductions.TENSOR[operation]:
        raise DescriptorFaultError(f"{instruction.where}: a tensor map of {kind} cannot be reduced by {operation}")
    return reductions.reduction(operation, kind)
