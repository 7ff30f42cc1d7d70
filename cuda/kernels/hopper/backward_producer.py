"""The thread of the backward that has the copy engine fill shared memory."""

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass.experimental import cuda, primitives
from kernels import ring, tile
from kernels.hopper import warpgroup
from kernels.hopper.backward_memory import PART, STATISTICS, Memory
from kernels.hopper.backward_queries import QUERIES
from kernels.words import Float32, view

Int32, Int64, Pointer, Constexpr = cutlass.Int32, cutlass.Int64, cutlass.Pointer, cutlass.Constexpr
TensorMap = cutlass.GridConstant[cuda.TensorMap]


@dataclasses.dataclass(frozen=True)
class Place:
    """Of a thread block in the arrays.

    Attributes:
      key_tile: Tile of keys.
      kv_index: Of batch entry and key/value head.
      first_head: Of batch entry and the first query head of the group.
      group_heads: Query heads of a group.
      padded_keys: Rows of a head of the padded arrays.
      padded_queries: Likewise.
    """

    key_tile: Int32
    kv_index: Int32
    first_head: Int32
    group_heads: Int32
    padded_keys: Int32
    padded_queries: Int32


@cute.jit
def _copy(target: Pointer, source: TensorMap, place: tuple[Int32, ...], barrier: Pointer) -> None:
    primitives.cp_async_bulk_tensor_shared_cta_global(target, source.get_ptr(), place, barrier)


@cute.jit
def load_keys(
    memory: Memory,
    place: Place,
    key_map: TensorMap,
    value_map: TensorMap,
    key_columns_map: TensorMap,
    head_size: Constexpr,
    with_columns: Constexpr,
) -> None:
    """Starts the copies of the resident operands; for the maps see :func:`kernels.hopper.backward.backward`."""
    row = place.kv_index * place.padded_keys + place.key_tile * tile.ROWS
    primitives.mbarrier_arrive_expect_tx(memory.resident, (4 if with_columns else 3) * tile.ROWS * head_size)
    for part in cutlass.range_constexpr(head_size // PART):
        target = memory.key + part * (tile.ROWS * warpgroup.SWIZZLE_BYTES)
        _copy(target, key_map, (Int32(part * PART), row), memory.resident)
    _copy(memory.value, value_map, (Int32(0), Int32(0), Int32(0), row // 16), memory.resident)
    if cutlass.const_expr(with_columns):
        columns = (place.key_tile * tile.ROWS, place.kv_index * head_size)
        _copy(memory.key_columns, key_columns_map, columns, memory.resident)


@cute.jit
def load_queries(
    memory: Memory,
    place: Place,
    first_tile: Int32,
    num_tiles: Int32,
    query_map: TensorMap,
    gradient_map: TensorMap,
    query_columns_map: TensorMap,
    gradient_columns_map: TensorMap,
    statistics: Pointer,
    head_size: Constexpr,
) -> None:
    """Fills the rings with the query tiles of all heads of the group."""
    rows_ring, columns_ring = memory.rows_ring, memory.columns_ring
    at = ring.Place(Int32(0), Int32(1))
    for member in cutlass.range(place.group_heads):
        for j in cutlass.range(num_tiles):
            head, query_tile = place.first_head + member, first_tile + j
            row = head * place.padded_queries + query_tile * QUERIES
            ring.wait(rows_ring.empty(at.stage), at.parity)
            full, rows = rows_ring.full(at.stage), rows_ring.stage(at.stage)
            primitives.mbarrier_arrive_expect_tx(full, rows_ring.bytes + 4 * STATISTICS)
            for part in cutlass.range_constexpr(head_size // PART):
                target = rows + part * (QUERIES * warpgroup.SWIZZLE_BYTES)
                _copy(target, query_map, (Int32(part * PART), row), full)
            primitives.cp_async_bulk_shared_cluster_global(
                memory.statistics + at.stage * STATISTICS,
                view(statistics, Float32) + Int64(row // QUERIES) * STATISTICS,
                full,
                4 * STATISTICS,
            )
            target = rows + 2 * QUERIES * head_size
            _copy(target, gradient_map, (Int32(0), Int32(0), Int32(0), row // 16), full)
            ring.wait(columns_ring.empty(at.stage), at.parity)
            full = columns_ring.full(at.stage)
            primitives.mbarrier_arrive_expect_tx(full, columns_ring.bytes)
            target, column = columns_ring.stage(at.stage), (query_tile * QUERIES, head * head_size)
            _copy(target, gradient_columns_map, column, full)
            _copy(target + columns_ring.bytes // 2, query_columns_map, column, full)
            at = ring.following(at, rows_ring.stages)
