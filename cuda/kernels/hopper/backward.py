"""The gradients on Hopper: a thread block has 128 keys of a key/value head and goes through the queries that see them.

The first warpgroup fills the rings and makes dQ (:mod:`kernels.hopper.backward_query_products`). Two consumers have 64
keys each, as the rows of transposed products:

| product | A | B |
|---|---|---|
| S^T = K Q^T | float16 key | float16 query |
| dP^T = V dO^T | value | output gradient |
| dV += P^T dO | P^T in registers | columns of the output gradient |
| dK += dS^T Q | dS^T in registers | columns of the query |
| dQ = dS K, by the first warpgroup | dS of all 128 keys in shared memory | columns of the key |

Rows of key and value are in the order of :func:`kernels.hopper.key_order.key_of_row`, so that a thread has two
neighbouring keys; rows of query and output gradient are, so that it has four neighbouring queries of each 16.
Products of 8-bit floats keep 13 bits behind the leading one, so each tile's is added in float32.

While the scores of a tile become probabilities, dP is computed; while the gradients of scores become visible to the
first warpgroup, dV: the fence between waits for all products of its warp, so that a step of a consumer has one.
Registers are what there is least of, so that each product adds to its sums before the next operands are made.
"""

import cutlass
import cutlass.cute as cute
from cutlass.cute.arch import block_idx, grid_dim, thread_idx, warp_idx
from cutlass.experimental import cuda, primitives
from kernels import tile
from kernels.hopper import (
    backward_consumers,
    backward_memory,
    backward_producer,
    backward_queries,
    backward_query_products,
    backward_query_sums,
    backward_ring,
    epilogue,
    warpgroup,
)
from kernels.words import Float32, Uint32, view

Int32, Int64, Pointer, Constexpr = cutlass.Int32, cutlass.Int64, cutlass.Pointer, cutlass.Constexpr
TensorMap = cutlass.GridConstant[cuda.TensorMap]

THREADS = 128 * (backward_ring.CONSUMERS + 1)
_REGISTERS = {False: (24, 240), True: (72, 216)}  # of the first warpgroup, and of the consumers, by `with_query`


def _head_and_tile(block: Int32, blocks: Int32, num_keys: Int32, section: Int32) -> tuple[Int32, Int32]:
    """What a thread block has: a key/value head, among those of all batch entries, and a tile of keys.

    Heads come in sections, one after another, in each the first tiles of all heads first: if attention is causal, most
    queries see them.
    """
    key_tiles = (num_keys + tile.ROWS - 1) // tile.ROWS
    first_head, within = block // (section * key_tiles) * section, block % (section * key_tiles)
    heads = cutlass.min(section, blocks // key_tiles - first_head)
    return first_head + within % heads, within // heads


@cute.kernel
def backward(
    query_map: TensorMap,
    key_map: TensorMap,
    value_map: TensorMap,
    gradient_map: TensorMap,
    query_columns_map: TensorMap,
    gradient_columns_map: TensorMap,
    key_columns_map: TensorMap,
    statistics: Pointer,
    gradient_scale: Pointer,
    query_sums: Pointer,
    key_gradient: Pointer,
    value_gradient: Pointer,
    query_lengths: Pointer,
    key_lengths: Pointer,
    query_segments: Pointer,
    key_segments: Pointer,
    key_offset: Pointer,
    num_queries: Int32,
    num_keys: Int32,
    query_heads: Int32,
    kv_heads: Int32,
    section: Int32,
    window_left: Int32,
    window_right: Int32,
    log2_scale: Float32,
    lift: Float32,
    factor: Float32,
    unit: Float32,
    head_size: Constexpr,
    with_query: Constexpr,
) -> None:
    """Gradients of 128 keys, and their share of the gradient of the query.

    Args:
      query_map: Of float16 [B N T', head_size], from :mod:`kernels.hopper.backward_prepare`.
      key_map: Of float16 [B K S', head_size], from :mod:`kernels.hopper.expand_key`.
      value_map: Of E4M3 [B K S' / 16, 2, 8, head_size], where entry [_, h, g] is row 2 g + h.
      gradient_map: Of E5M2 [B N T' / 16, 2, 8, head_size], likewise.
      query_columns_map: Of E4M3 [B N head_size, T'].
      gradient_columns_map: Of E5M2 [B N head_size, T'].
      key_columns_map: Of E4M3 [B K head_size, S'].
      statistics: float32 [B, N, T' / 64, 2, 64], from :mod:`kernels.hopper.backward_prepare`.
      gradient_scale: float32 [B, K].
      query_sums: float32 [B, N, T', head_size], see :mod:`kernels.hopper.backward_query_sums`; read only
        ``with_query``, like ``key_columns_map``.
      key_gradient: bfloat16 [B, S, K, head_size].
      value_gradient: bfloat16 [B, S, K, head_size].
      query_lengths: int32 [B] or null.
      key_lengths: int32 [B] or null.
      query_segments: int32 [B, T] or null.
      key_segments: int32 [B, S] or null.
      key_offset: int32 [], position of key 0 minus that of query 0, or null.
      num_queries: T.
      num_keys: S.
      query_heads: N.
      kv_heads: K.
      section: Key/value heads, of those of all batch entries, whose thread blocks come together.
      window_left: A query sees keys at most so far behind it.
      window_right: And so far ahead of it.
      log2_scale: From a raw score to a base-2 log score.
      lift: Octaves by which P is lifted.
      factor: Softmax scale without the factors of the gradients' operands.
      unit: Factor of the gradients without their scale.
      head_size: 64 or 128.
      with_query: Whether to add to the query's gradient; otherwise :mod:`kernels.hopper.backward_query` makes it.
    """
    memory = backward_memory.allocate(head_size, with_query)
    thread, _, _ = thread_idx()
    warp = cute.arch.make_warp_uniform(warp_idx())
    if thread == 0:
        memory.initialize(head_size)
    primitives.fence_mbarrier_init()
    primitives.barrier_cta_sync(0)

    (block, _, _), (blocks, _, _) = block_idx(), grid_dim()
    kv_index, key_tile = _head_and_tile(block, blocks, num_keys, section)
    batch, kv_head, group_heads = kv_index // kv_heads, kv_index % kv_heads, query_heads // kv_heads
    first_head = kv_index * group_heads
    padded_keys, padded_queries = ((rows + tile.ROWS - 1) // tile.ROWS * tile.ROWS for rows in (num_keys, num_queries))
    queries = backward_queries.range_of(
        key_tile * tile.ROWS,
        batch,
        num_queries,
        num_keys,
        query_lengths,
        key_lengths,
        key_offset,
        window_left,
        window_right,
    )
    place = backward_producer.Place(key_tile, kv_index, first_head, group_heads, padded_keys, padded_queries)

    own_registers, consumer_registers = _REGISTERS[with_query]
    if warp < 4:
        primitives.setmaxregister(own_registers, "decrease")
        sources = backward_producer.Sources(
            query_map, gradient_map, query_columns_map, gradient_columns_map, statistics
        )
        if thread == 0:
            backward_producer.load_keys(memory, place, key_map, value_map, key_columns_map, head_size, with_query)
        if cutlass.const_expr(with_query):
            sums = view(query_sums, Float32)
            backward_query_products.feed_and_multiply(memory, place, queries, sources, sums, head_size)
        else:
            if thread == 0:
                backward_producer.load_queries(memory, place, queries, sources, head_size)
    else:
        primitives.setmaxregister(consumer_registers, "increase")
        first_key = key_tile * tile.ROWS + (warp // 4 - 1) * warpgroup.ROWS
        seen = backward_queries.View(
            queries,
            first_key,
            window_left,
            window_right,
            query_segments,
            key_segments,
            batch,
            num_queries,
            num_keys,
        )
        numbers = backward_consumers.Numbers(log2_scale, lift, factor)
        d_key, d_value = backward_consumers.differentiate(memory, place, seen, warp, numbers, head_size)
        true_unit = unit * backward_query_sums.inverse_scale(gradient_scale, Int64(kv_index))
        for gradient, sums in ((key_gradient, d_key), (value_gradient, d_value)):
            epilogue.store_output(
                view(gradient, Uint32), sums, [true_unit] * 2, seen.keys, num_keys, kv_heads, kv_head, batch, head_size
            )
