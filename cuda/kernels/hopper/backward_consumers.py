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

CONSUMERS = 2
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
      key_channels: Its half of the channels, of all keys of the block.
    """

    key_rows: backward_products.Operand
    value_rows: backward_products.Operand
    key_channels: backward_products.Operand


def _resident(memory: Memory, consumer: Int32, head_size: int) -> Resident:
    rows_of_key = memory.key + consumer * (warpgroup.ROWS * warpgroup.SWIZZLE_BYTES)
    rows_of_value = memory.value + consumer * (warpgroup.ROWS * head_size)
    half_of_columns = memory.key_columns + consumer * (head_size // 2 * tile.ROWS)
    return Resident(
        backward_products.operand(rows_of_key, warpgroup.SWIZZLE_BYTES, "f16", tile.ROWS),
        backward_products.operand(rows_of_value, head_size, "e4m3"),
        backward_products.operand(half_of_columns, tile.ROWS, "e4m3"),
    )


@cute.jit
def _scores(
    memory: Memory,
    at: ring.Place,
    resident: Resident,
    seen: View,
    query_tile: Int32,
    numbers: Numbers,
    head_size: Constexpr,
) -> tuple[list[Uint32], list[Uint32]]:
    """P and the gradients of the scores of a tile, as bytes."""
    queries, gradients = memory.query_ring, memory.gradient_ring
    ring.wait(queries.full(at.stage), at.parity)
    statistic = memory.statistics + at.stage * STATISTICS
    offsets = backward_scores.of_columns(statistic)
    query_rows = backward_products.operand(queries.stage(at.stage), warpgroup.SWIZZLE_BYTES, "f16", QUERIES)
    s = backward_products.of_shared(resident.key_rows, query_rows, QUERIES, 2 * head_size)
    ring.wait(gradients.full(at.stage), at.parity)
    gradient_rows = backward_products.operand(gradients.stage(at.stage), head_size, "e5m2")
    d_p = backward_products.of_shared(resident.value_rows, gradient_rows, QUERIES, head_size)
    s = warpgroup.wait(1, s)
    p = backward_scores.probabilities(s, offsets, numbers.log2_scale, numbers.lift)
    p_bytes = backward_scores.as_bytes(backward_scores.masked(p, seen, query_tile))
    row_statistics = backward_scores.of_columns(statistic + QUERIES)
    d_p = warpgroup.wait(0, d_p)
    steps.arrive(queries.empty(at.stage))
    steps.arrive(gradients.empty(at.stage))
    d_s = backward_scores.score_gradients(d_p, row_statistics, p_bytes, numbers.factor)
    return p_bytes, backward_scores.as_bytes(backward_scores.masked(d_s, seen, query_tile))


def _query_product(memory: Memory, resident: Resident, buffer: Int32, head_size: int) -> list[Float32]:
    """Starts the product for dQ from a buffer of dS."""
    scores = backward_products.operand(memory.scores + buffer * SCORE_BYTES, tile.ROWS, "e4m3")
    return backward_products.of_shared(scores, resident.key_channels, head_size // 2, tile.ROWS)


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
    columns_bytes = QUERIES * head_size
    query_tiles, queries = block.padded_queries // QUERIES, seen.queries
    columns_ring, scores, exchanged = memory.columns_ring, memory.scores, memory.exchanged
    resident = _resident(memory, warp // 4 - 1, head_size)
    d_key, d_value = ([Float32(0.0) for _ in range(head_size // 2)] for _ in range(2))
    at = ring.Place(Int32(0), Int32(0))
    step, old_tile = Int32(0), Int32(0)
    if cutlass.const_expr(with_query):
        backward_scores.clear(scores + SCORE_BYTES, thread_idx()[0] - 128)
        primitives.barrier_cta_sync(barrier_id=_BARRIER, thread_count=128 * CONSUMERS)
    ring.wait(memory.resident, Int32(0))
    for member in cutlass.range(block.group_heads):
        head = block.first_head + member
        for j in cutlass.range(queries.num_tiles):
            query_tile = queries.first_tile + j
            p, d_s = _scores(memory, at, resident, seen, query_tile, numbers, head_size)

            ring.wait(columns_ring.full(at.stage), at.parity)
            columns = columns_ring.stage(at.stage)
            product = backward_products.of_columns(p, columns, "e5m2", head_size)
            if cutlass.const_expr(with_query):
                buffer = step & 1
                ring.wait(exchanged + (buffer ^ 1), (step - 1) >> 1 & 1)
                backward_scores.store_by_query(scores + buffer * SCORE_BYTES, d_s, warp - 4)
            d_value = backward_products.sums(d_value, warpgroup.wait(0, product))
            if cutlass.const_expr(with_query):
                d_query = _query_product(memory, resident, buffer ^ 1, head_size)
            product = backward_products.of_columns(d_s, columns + columns_bytes, "e4m3", head_size)
            if cutlass.const_expr(with_query):
                backward_query_sums.wait_until_read(warp, head_size)
                d_query = warpgroup.wait(1, d_query)
                steps.arrive(exchanged + buffer)
                if step > 0:
                    backward_query_sums.add(query_sums, memory.query_sums, d_query, old_tile, warp, head_size)
            d_key = backward_products.sums(d_key, warpgroup.wait(0, product))
            steps.arrive(columns_ring.empty(at.stage))
            old_tile = head * query_tiles + query_tile
            at = ring.following(at, columns_ring.stages)
            step += 1
    if cutlass.const_expr(with_query):
        if step > 0:
            buffer = (step - 1) & 1
            ring.wait(exchanged + buffer, (step - 1) >> 1 & 1)
            d_query = _query_product(memory, resident, buffer, head_size)
            backward_query_sums.wait_until_read(warp, head_size)
            d_query = warpgroup.wait(0, d_query)
            backward_query_sums.add(query_sums, memory.query_sums, d_query, old_tile, warp, head_size)
            backward_query_sums.wait_until_read(warp, head_size)
    return d_key, d_value
