"""The thread of the backward that has the copy engine fill shared memory.

It is one of a warpgroup of its own, or of that for dQ (:mod:`kernels.hopper.backward_query_products`).
"""

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass.experimental import cuda, primitives
from kernels import ring, tile
from kernels.hopper import warpgroup
from kernels.hopper.backward_memory import PART, STATISTICS, Memory
from kernels.hopper.backward_queries import QUERIES, Range
from kernels.words import Float32, view, when

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


@dataclasses.dataclass(frozen=True)
class Sources:
    """What tiles of queries are copied from; see :func:`kernels.hopper.backward.backward`."""

    query_map: TensorMap
    gradient_map: TensorMap
    query_columns_map: TensorMap
    gradient_columns_map: TensorMap
    statistics: Pointer


@dataclasses.dataclass(frozen=True)
class QueryTile:
    """A tile of queries.

    Attributes:
      head: Batch entry and query head.
      index: Of the tile in the head.
      count: Tiles before it, of those that a thread block goes through.
    """

    head: Int32
    index: Int32
    count: Int32


def first_tile(place: Place, queries: Range) -> QueryTile:
    """The first one of a thread block."""
    return QueryTile(place.first_head, queries.first_tile, Int32(0))


def following(before: QueryTile, queries: Range) -> QueryTile:
    """The next one: of the same head, or the first one of the next."""
    ends = before.index == queries.first_tile + queries.num_tiles - 1
    index = when(ends, queries.first_tile, before.index + 1)
    return QueryTile(when(ends, before.head + 1, before.head), index, before.count + 1)


def load_rows(
    memory: Memory, query_tile: QueryTile, place: Place, at: ring.Place, sources: Sources, head_size: int
) -> None:
    """Starts the copies of the rows of a tile, where its stage has been read."""
    rows_ring, row = memory.rows_ring, query_tile.head * place.padded_queries + query_tile.index * QUERIES
    ring.wait(rows_ring.empty(at.stage), at.parity)
    full, rows = rows_ring.full(at.stage), rows_ring.stage(at.stage)
    primitives.mbarrier_arrive_expect_tx(full, rows_ring.bytes + 4 * STATISTICS)
    for part in range(head_size // PART):
        target = rows + part * (QUERIES * warpgroup.SWIZZLE_BYTES)
        _copy(target, sources.query_map, (Int32(part * PART), row), full)
    primitives.cp_async_bulk_shared_cluster_global(
        memory.statistics + at.stage * STATISTICS,
        view(sources.statistics, Float32) + Int64(row // QUERIES) * STATISTICS,
        full,
        4 * STATISTICS,
    )
    target = rows + 2 * QUERIES * head_size
    _copy(target, sources.gradient_map, (Int32(0), Int32(0), Int32(0), row // 16), full)


def load_columns(memory: Memory, query_tile: QueryTile, at: ring.Place, sources: Sources, head_size: int) -> None:
    """Starts the copies of the columns of a tile, where their stage has been read."""
    columns_ring = memory.columns_ring
    ring.wait(columns_ring.empty(at.stage), at.parity)
    full = columns_ring.full(at.stage)
    primitives.mbarrier_arrive_expect_tx(full, columns_ring.bytes)
    target, column = columns_ring.stage(at.stage), (query_tile.index * QUERIES, query_tile.head * head_size)
    _copy(target, sources.gradient_columns_map, column, full)
    _copy(target + columns_ring.bytes // 2, sources.query_columns_map, column, full)


@cute.jit
def load_queries(memory: Memory, place: Place, queries: Range, sources: Sources, head_size: Constexpr) -> None:
    """Fills the rings with the query tiles of all heads of the group."""
    at, query_tile = ring.Place(Int32(0), Int32(1)), first_tile(place, queries)
    for _ in cutlass.range(place.group_heads * queries.num_tiles, unroll=1):
        load_rows(memory, query_tile, place, at, sources, head_size)
        load_columns(memory, query_tile, at, sources, head_size)
        at, query_tile = ring.following(at, memory.rows_ring.stages), following(query_tile, queries)
