"""The forward on Hopper: a producer warpgroup that fills the ring, and three warpgroups of 64 query rows each.

docs/hopper.md has the design.
"""

import cutlass
import cutlass.cute as cute
from cutlass.cute.arch import thread_idx, warp_idx
from cutlass.experimental import cuda, primitives
from kernels import code_maps, half_quotients, ring, shared, tile
from kernels.hopper import consumers, direct_p, items, online_softmax, producer, warpgroup
from kernels.words import Float32, Uint8, view

Int32, Pointer, Constexpr = cutlass.Int32, cutlass.Pointer, cutlass.Constexpr
TensorMap = cutlass.GridConstant[cuda.TensorMap]

_CONSUMERS = 3
_QUERY_ROWS = warpgroup.ROWS * _CONSUMERS
THREADS = 128 * (_CONSUMERS + 1)
_PRODUCER_REGISTERS, _CONSUMER_REGISTERS = 24, 160
_STAGES = 3


@cute.kernel
def forward(
    query_codes: Pointer,
    query_pages: Pointer,
    key_map: TensorMap,
    value_map: TensorMap,
    value_exponents: Pointer,
    output: Pointer,
    lse: Pointer,
    query_lengths: Pointer,
    key_lengths: Pointer,
    query_segments: Pointer,
    key_segments: Pointer,
    order: Pointer,
    key_offset: Pointer,
    counter: Pointer,
    num_queries: Int32,
    num_keys: Int32,
    query_heads: Int32,
    kv_heads: Int32,
    batches: Int32,
    num_items: Int32,
    section: Int32,
    window_left: Int32,
    window_right: Int32,
    log2_scale: Float32,
    block_offset: Float32,
    shift: Float32,
    margin: Float32,
    slope: Float32,
    intercept: Float32,
    constant: Float32,
    rescale_threshold: Float32,
    unit: Float32,
    head_size: Constexpr,
    code_map: Constexpr,
    anchor_keys: Constexpr,
) -> None:
    """Attention of all items that fall to this thread block.

    Args:
      query_codes: uint8 [B, N, T, head_size / 2].
      query_pages: uint8 [B, N, tiles, head_size / 64, 512].
      key_map: Of float16 [B K 128 tiles, head_size], from the expansion of the key.
      value_map: Of E5M2 or E4M3 [B K head_size, 128 tiles].
      value_exponents: int32 [B, K, tiles], from the expansion of the value; not read without a code map.
      output: bfloat16 [B, T, N, head_size].
      lse: float32 [B, N, T].
      query_lengths: int32 [B] or null.
      key_lengths: int32 [B] or null.
      query_segments: int32 [B, T] or null.
      key_segments: int32 [B, S] or null.
      order: int32 [S], the key in each slot, or null.
      key_offset: int32 [], position of key 0 minus that of query 0, or null.
      counter: int32 [], zero, see :func:`items.next_index`; null if every thread block has one item.
      num_queries: T.
      num_keys: S.
      query_heads: N.
      kv_heads: K.
      batches: B.
      num_items: Items there are, see :func:`work.item_of`.
      section: Likewise.
      window_left: A query sees keys at most so far behind it.
      window_right: And so far ahead of it.
      log2_scale: From a raw score to a base-2 log score.
      block_offset: See :class:`direct_p.Constants`, as for the next ones.
      shift: Likewise.
      margin: Likewise.
      slope: See :class:`code_maps.Constants`, as for the next ones.
      intercept: Likewise.
      constant: Likewise.
      rescale_threshold: See :class:`online_softmax.Constants`, as for the next one.
      unit: Likewise.
      head_size: 64 or 128.
      code_map: A :class:`code_maps.Map`, or None for E4M3 probabilities.
      anchor_keys: How many leading keys give the row reference; 0 for reference zero.
    """
    query_bytes = head_size // 64 * warpgroup.ROWS * warpgroup.SWIZZLE_BYTES
    query_memory = view(shared.words(_CONSUMERS * query_bytes // 4, 1024).data_ptr(), Uint8)
    key_bytes, value_bytes = head_size // 64 * tile.ROWS * warpgroup.SWIZZLE_BYTES, head_size * warpgroup.SWIZZLE_BYTES
    key_ring, value_ring = ring.allocate((_STAGES, key_bytes), (_STAGES, value_bytes))
    handover = items.allocate()
    thread, _, _ = thread_idx()
    warp = cute.arch.make_warp_uniform(warp_idx())
    if thread == 0:
        handover.initialize(4 * _CONSUMERS)
        key_ring.initialize(4 * _CONSUMERS)
        value_ring.initialize(4 * _CONSUMERS)
    primitives.fence_mbarrier_init()
    primitives.barrier_cta_sync(0)
    problem = items.Problem(
        num_queries,
        num_keys,
        (num_keys + tile.ROWS - 1) // tile.ROWS,
        query_heads,
        kv_heads,
        batches,
        num_items,
        section,
        query_lengths,
        key_lengths,
        order,
        key_offset,
        window_left,
        window_right,
    )

    if warp < 4:
        primitives.setmaxregister(_PRODUCER_REGISTERS, "decrease")
        if thread == 0:
            counter = view(counter, Int32)
            producer.produce(
                key_ring, value_ring, handover, key_map, value_map, counter, problem, _QUERY_ROWS, head_size
            )
    else:
        primitives.setmaxregister(_CONSUMER_REGISTERS, "increase")
        consumer = warp // 4 - 1
        mine = query_memory + consumer * query_bytes
        if cutlass.const_expr(code_map is None):
            constants = online_softmax.Constants(log2_scale, rescale_threshold, unit)
        else:
            map_constants = code_maps.Constants(log2_scale, slope, intercept, constant)
            constants = direct_p.Constants(
                log2_scale,
                block_offset,
                shift,
                margin,
                map_constants,
                code_map,
                anchor_keys,
                half_quotients.half_step_of(num_items),
            )
        arrays = consumers.Arrays(query_codes, query_pages, value_exponents, output, lse, query_segments, key_segments)
        consumers.consume(key_ring, value_ring, handover, mine, consumer, arrays, problem, constants, head_size)
