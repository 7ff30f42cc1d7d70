"""The warpgroups of the backward that compute: 64 keys each, as rows of transposed products, tile by tile of queries.

:mod:`kernels.hopper.backward` says which products these are, and in which order.
"""

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass.cute.arch import thread_idx
from cutlass.experimental import primitives
from kernels import ring, tile
from kernels.hopper import backward_products, backward_query_sums, backward_scores, warpgroup
from kernels.hopper import backward_ring as steps
from kernels.hopper.backward_memory import SCORE_BYTES, STATISTICS, Memory
from kernels.hopper.backward_producer import Place
from kernels.hopper.backward_queries import QUERIES, View
from kernels.words import Float32, Uint32

Int32, Pointer, Constexpr = cutlass.Int32, cutlass.Pointer, cutlass.Constexpr

_BARRIER = 1  # of the consumers, once


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
      key_channels: Its half of the channels, of all keys of the block; None if the query's gradient is made elsewhere.
    """

    key_rows: backward_products.Operand
    value_rows: backward_products.Operand
    key_channels: backward_products.Operand | None


def _resident(memory: Memory, consumer: Int32, head_size: int) -> Resident:
    rows_of_key = memory.key + consumer * (warpgroup.ROWS * warpgroup.SWIZZLE_BYTES)
    rows_of_value = memory.value + consumer * (warpgroup.ROWS * head_size)
    key_channels = None
    if memory.key_columns is not None:
        half_of_columns = memory.key_columns + consumer * (head_size // 2 * tile.ROWS)
        key_channels = backward_products.operand(half_of_columns, tile.ROWS, "e4m3")
    return Resident(
        backward_products.operand(rows_of_key, warpgroup.SWIZZLE_BYTES, "f16", tile.ROWS),
        backward_products.operand(rows_of_value, head_size, "e4m3"),
        key_channels,
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
      scores: dS of the keys of the block, or None.
    """

    query_rows: backward_products.Operand
    gradient_rows: backward_products.Operand
    query_columns: backward_products.Operand
    gradient_columns: backward_products.Operand
    scores: backward_products.Operand | None


def _passing(memory: Memory, head_size: int) -> Passing:
    rows, columns, tile_bytes = memory.rows_ring.memory, memory.columns_ring.memory, QUERIES * head_size
    return Passing(
        backward_products.operand(rows, warpgroup.SWIZZLE_BYTES, "f16", QUERIES),
        backward_products.operand(rows + 2 * tile_bytes, head_size, "e5m2"),
        backward_products.operand(columns + tile_bytes, QUERIES, "e4m3"),
        backward_products.operand(columns, QUERIES, "e5m2"),
        None if memory.scores is None else backward_products.operand(memory.scores, tile.ROWS, "e4m3"),
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
    ring.wait(rows.full(at.stage), at.parity)
    statistic = memory.statistics + at.stage * STATISTICS
    offsets = backward_scores.of_columns(statistic)
    query_rows, gradient_rows = (x.moved(at.stage, rows.bytes) for x in (passing.query_rows, passing.gradient_rows))
    s = backward_products.of_shared(resident.key_rows, query_rows, QUERIES, 2 * head_size)
    d_p = backward_products.of_shared(resident.value_rows, gradient_rows, QUERIES, head_size)
    s = warpgroup.wait(1, s)
    p = backward_scores.probabilities(s, offsets, numbers.log2_scale, numbers.lift)
    p_bytes = backward_scores.as_bytes(backward_scores.masked(p, seen, query_tile))
    row_statistics = backward_scores.of_columns(statistic + QUERIES)
    d_p = warpgroup.wait(0, d_p)
    steps.arrive(rows.empty(at.stage))
    d_s = backward_scores.score_gradients(d_p, row_statistics, p_bytes, numbers.factor)
    return p_bytes, backward_scores.as_bytes(backward_scores.masked(d_s, seen, query_tile))


def _query_product(resident: Resident, passing: Passing, buffer: Int32, head_size: int) -> list[Float32]:
    """Starts the product for dQ from a buffer of dS."""
    scores = passing.scores.moved(buffer, SCORE_BYTES)
    return backward_products.of_shared(scores, resident.key_channels, head_size // 2, tile.ROWS)


@cute.jit
def _add_last_query_product(
    memory: Memory,
    resident: Resident,
    passing: Passing,
    query_sums: Pointer,
    steps_done: Int32,
    query_tile: Int32,
    warp: Int32,
    head_size: Constexpr,
) -> None:
    """dQ of the last tile, and what is still to be handed over."""
    buffer = (steps_done - 1) & 1
    ring.wait(memory.exchanged + buffer, (steps_done - 1) >> 1 & 1)
    d_query = warpgroup.wait(0, _query_product(resident, passing, buffer, head_size))
    backward_query_sums.add(query_sums, memory.sums_ring, steps_done - 1, d_query, query_tile, warp, head_size)
    cute.arch.fence_view_async_shared()
    if steps_done > 1:
        backward_query_sums.hand_over(memory.sums_ring, steps_done - 2, warp)
    backward_query_sums.hand_over(memory.sums_ring, steps_done - 1, warp)


@cute.jit
def differentiate(
    memory: Memory,
    block: Place,
    seen: View,
    query_sums: Pointer,
    warp: Int32,
    numbers: Numbers,
    head_size: Constexpr,
    with_query: Constexpr,
) -> tuple[list[Float32], list[Float32]]:
    """Goes through the queries that see the keys of a warpgroup.

    Args:
      memory: Shared memory.
      block: Of the thread block in the arrays.
      seen: What the warpgroup's keys are seen by.
      query_sums: See :func:`kernels.hopper.backward.backward`, like the rest.
      warp: Index of the warp in the thread block.
      numbers: Factors.
      head_size: 64 or 128.
      with_query: Whether to add to the query's gradient.

    Returns:
      Sums for dK and dV, as accumulators.
    """
    query_tiles, queries = block.padded_queries // QUERIES, seen.queries
    columns_ring, scores, exchanged = memory.columns_ring, memory.scores, memory.exchanged
    resident, passing = _resident(memory, warp // 4 - 1, head_size), _passing(memory, head_size)
    d_key, d_value = ([Float32(0.0) for _ in range(head_size // 2)] for _ in range(2))
    at = ring.Place(Int32(0), Int32(0))
    step, old_tile = Int32(0), Int32(0)
    if cutlass.const_expr(with_query):
        backward_scores.clear(scores + SCORE_BYTES, thread_idx()[0] - 128)
        primitives.barrier_cta_sync(barrier_id=_BARRIER, thread_count=128 * steps.CONSUMERS)
    ring.wait(memory.resident, Int32(0))
    for member in cutlass.range(block.group_heads):
        head = block.first_head + member
        for j in cutlass.range(queries.num_tiles):
            query_tile = queries.first_tile + j
            p, d_s = _scores(memory, at, resident, passing, seen, query_tile, numbers, head_size)

            ring.wait(columns_ring.full(at.stage), at.parity)
            columns = passing.gradient_columns.moved(at.stage, columns_ring.bytes)
            product = backward_products.of_registers(p, columns, head_size)
            if cutlass.const_expr(with_query):
                buffer = step & 1
                ring.wait(exchanged + (buffer ^ 1), (step - 1) >> 1 & 1)
                backward_scores.store_by_query(scores + buffer * SCORE_BYTES, d_s, warp - 4)
                if step > 1:
                    backward_query_sums.hand_over(memory.sums_ring, step - 2, warp)
            d_value = backward_products.sums(d_value, warpgroup.wait(0, product))
            if cutlass.const_expr(with_query):
                d_query = _query_product(resident, passing, buffer ^ 1, head_size)
            columns = passing.query_columns.moved(at.stage, columns_ring.bytes)
            product = backward_products.of_registers(d_s, columns, head_size)
            if cutlass.const_expr(with_query):
                d_query = warpgroup.wait(1, d_query)
                steps.arrive(exchanged + buffer)
                if step > 0:
                    backward_query_sums.add(query_sums, memory.sums_ring, step - 1, d_query, old_tile, warp, head_size)
            d_key = backward_products.sums(d_key, warpgroup.wait(0, product))
            steps.arrive(columns_ring.empty(at.stage))
            old_tile = head * query_tiles + query_tile
            at = ring.following(at, columns_ring.stages)
            step += 1
    if cutlass.const_expr(with_query):
        if step > 0:
            _add_last_query_product(memory, resident, passing, query_sums, step, old_tile, warp, head_size)
    return d_key, d_value
