"""The consumers of the backward: 64 keys each, as rows of transposed products, tile by tile of queries.

:mod:`kernels.hopper.backward` says which products these are, and in which order.
"""

import dataclasses

import cutlass
import cutlass.cute as cute
from kernels import ring, tile
from kernels.hopper import backward_products, backward_scores, warpgroup
from kernels.hopper import backward_ring as steps
from kernels.hopper.backward_memory import STATISTICS, Memory
from kernels.hopper.backward_producer import Place
from kernels.hopper.backward_queries import QUERIES, View
from kernels.words import Float32, Uint32

Int32, Pointer, Constexpr = cutlass.Int32, cutlass.Pointer, cutlass.Constexpr


@dataclasses.dataclass(frozen=True)
class Numbers:
    """See :func:`kernels.hopper.backward.backward`."""

    log2_scale: Float32
    lift: Float32
    factor: Float32


@dataclasses.dataclass(frozen=True)
class Resident:
    """Operands of a warpgroup that stay.

    Attributes:
      key_rows: Its keys.
      value_rows: Its values.
    """

    key_rows: backward_products.Operand
    value_rows: backward_products.Operand


def _resident(memory: Memory, consumer: Int32, head_size: int) -> Resident:
    rows_of_key = memory.key + consumer * (warpgroup.ROWS * warpgroup.SWIZZLE_BYTES)
    rows_of_value = memory.value + consumer * (warpgroup.ROWS * head_size)
    return Resident(
        backward_products.operand(rows_of_key, warpgroup.SWIZZLE_BYTES, "f16", tile.ROWS),
        backward_products.operand(rows_of_value, head_size, "e4m3"),
    )


@dataclasses.dataclass(frozen=True)
class Passing:
    """Operands that change from tile to tile: those in the first stages, of rings or buffers.

    Descriptors are made before the loop, since the tensor cores wait for them there.

    Attributes:
      query_rows: Queries.
      gradient_rows: Output gradient.
      query_columns: Channels of the query.
      gradient_columns: Channels of the output gradient.
    """

    query_rows: backward_products.Operand
    gradient_rows: backward_products.Operand
    query_columns: backward_products.Operand
    gradient_columns: backward_products.Operand


def _passing(memory: Memory, head_size: int) -> Passing:
    rows, columns, tile_bytes = memory.rows_ring.memory, memory.columns_ring.memory, QUERIES * head_size
    return Passing(
        backward_products.operand(rows, warpgroup.SWIZZLE_BYTES, "f16", QUERIES),
        backward_products.operand(rows + 2 * tile_bytes, head_size, "e5m2"),
        backward_products.operand(columns + tile_bytes, QUERIES, "e4m3"),
        backward_products.operand(columns, QUERIES, "e5m2"),
    )


@cute.jit
def _scores(
    memory: Memory,
    at: ring.Place,
    resident: Resident,
    passing: Passing,
    seen: View,
    query_tile: Int32,
    numbers: Numbers,
    head_size: Constexpr,
) -> tuple[list[Uint32], list[Uint32]]:
    """P and the gradients of the scores of a tile, as bytes."""
    rows = memory.rows_ring
    mask = backward_scores.mask_of(seen, query_tile)
    ring.wait(rows.full(at.stage), at.parity)
    statistic = memory.statistics + at.stage * STATISTICS
    offsets = backward_scores.of_columns(statistic)
    query_rows, gradient_rows = (x.moved(at.stage, rows.bytes) for x in (passing.query_rows, passing.gradient_rows))
    s = backward_products.of_shared(resident.key_rows, query_rows, QUERIES, 2 * head_size)
    d_p = backward_products.of_shared(resident.value_rows, gradient_rows, QUERIES, head_size)
    s = warpgroup.wait(1, s)
    p = backward_scores.probabilities(s, offsets, numbers.log2_scale, numbers.lift)
    p_bytes = backward_scores.as_bytes(backward_scores.masked(p, seen, query_tile, mask))
    row_statistics = backward_scores.of_columns(statistic + QUERIES)
    d_p = warpgroup.wait(0, d_p)
    steps.arrive(rows.empty(at.stage))
    d_s = backward_scores.score_gradients(d_p, row_statistics, p_bytes, numbers.factor)
    return p_bytes, backward_scores.as_bytes(backward_scores.masked(d_s, seen, query_tile, mask))


@cute.jit
def differentiate(
    memory: Memory,
    block: Place,
    seen: View,
    warp: Int32,
    numbers: Numbers,
    head_size: Constexpr,
) -> tuple[list[Float32], list[Float32]]:
    """Goes through the queries that see the keys of a warpgroup.

    Args:
      memory: Shared memory.
      block: Of the thread block in the arrays.
      seen: What the warpgroup's keys are seen by.
      warp: Index of the warp in the thread block.
      numbers: Factors.
      head_size: 64 or 128.

    Returns:
      Sums for dK and dV, as accumulators.
    """
    queries = seen.queries
    columns_ring, scores_ring = memory.columns_ring, memory.scores_ring
    resident, passing = _resident(memory, warp // 4 - 1, head_size), _passing(memory, head_size)
    d_key, d_value = ([Float32(0.0) for _ in range(head_size // 2)] for _ in range(2))
    at, to = ring.Place(Int32(0), Int32(0)), ring.Place(Int32(0), Int32(1))
    ring.wait(memory.resident, Int32(0))
    for _ in cutlass.range(block.group_heads):
        for j in cutlass.range(queries.num_tiles):
            p, d_s = _scores(memory, at, resident, passing, seen, queries.first_tile + j, numbers, head_size)

            if cutlass.const_expr(scores_ring is not None):
                ring.wait(scores_ring.empty(to.stage), to.parity)
                backward_scores.store_by_query(scores_ring.stage(to.stage), d_s, warp - 4)
            ring.wait(columns_ring.full(at.stage), at.parity)
            columns = passing.gradient_columns.moved(at.stage, columns_ring.bytes)
            product = backward_products.of_registers(p, columns, head_size)
            if cutlass.const_expr(scores_ring is not None):
                cute.arch.fence_view_async_shared()
                steps.arrive(scores_ring.full(to.stage))
                to = ring.following(to, scores_ring.stages)
            d_value = backward_products.sums(d_value, warpgroup.wait(0, product))
            columns = passing.query_columns.moved(at.stage, columns_ring.bytes)
            product = backward_products.of_registers(d_s, columns, head_size)
            d_key = backward_products.sums(d_key, warpgroup.wait(0, product))
            steps.arrive(columns_ring.empty(at.stage))
            at = ring.following(at, columns_ring.stages)
    return d_key, d_value
