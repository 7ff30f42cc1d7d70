"""The forward on Blackwell: two tiles of 128 query rows at a time, and a warp or warpgroup for each part of the work.

docs/blackwell.md has the design.
"""

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass.cute.arch import block_idx, grid_dim, thread_idx, warp_idx
from cutlass.experimental import cuda, primitives
from kernels import code_maps
from kernels.blackwell import correction, direct_p, issuer, memory, online_softmax, producer, schedule, softmax
from kernels.blackwell.tensor_memory import COLUMNS
from kernels.words import Float32

Int32, Pointer, Constexpr = cutlass.Int32, cutlass.Pointer, cutlass.Constexpr
TensorMap = cutlass.GridConstant[cuda.TensorMap]

THREADS = 512
# Warps 0 to 3 and 4 to 7 are the softmax of a stage each, 8 to 11 the correction; then these, and two that idle.
_CORRECTION, _OTHERS = 8, 12
_ISSUER, _PRODUCER = 12, 13
_SOFTMAX_REGISTERS, _CORRECTION_REGISTERS, _OTHER_REGISTERS = 192, 80, 48
assert 2 * _SOFTMAX_REGISTERS + _CORRECTION_REGISTERS + _OTHER_REGISTERS <= 65536 // 128


@cute.kernel
def forward(
    query_map: TensorMap,
    query_pages: Pointer,
    key_map: TensorMap,
    key_pages: Pointer,
    value_map: TensorMap,
    value_pages: Pointer,
    output: Pointer,
    lse: Pointer,
    query_lengths: Pointer,
    key_lengths: Pointer,
    query_segments: Pointer,
    key_segments: Pointer,
    order: Pointer,
    key_offset: Pointer,
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
    maxima_from_loads: Constexpr,
) -> None:
    """Attention of all items that fall to this thread block.

    Args:
      query_map: Of uint8 [B N T, head_size / 2].
      query_pages: uint8 [B, N, query tiles, head_size / 64, 512].
      key_map: Of uint8 [B K 128 tiles, head_size / 2], keys in the order of the slots.
      key_pages: uint8 [B, K, tiles, head_size / 64, 512], likewise.
      value_map: Of uint8 [B K head_size, 64 tiles]; without a code map E4M3 [B K head_size, 128 tiles].
      value_pages: uint8 [B, K, tiles, 512]; not read without a code map.
      output: bfloat16 [B, T, N, head_size].
      lse: float32 [B, N, T].
      query_lengths: int32 [B] or null.
      key_lengths: int32 [B] or null.
      query_segments: int32 [B, T] or null.
      key_segments: int32 [B, S] or null.
      order: int32 [S], the key in each slot, or null.
      key_offset: int32 [], position of key 0 minus that of query 0, or null.
      num_queries: T.
      num_keys: S.
      query_heads: N.
      kv_heads: K.
      batches: B.
      num_items: Items there are, see :func:`kernels.work.item_of`.
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
      maxima_from_loads: Whether loads of scores give the maximum of each block, which compute capability 10.0 lacks.
    """
    is_direct = code_map is not None
    shared_memory = memory.allocate(memory.sizes_of(head_size, is_direct))
    thread, _, _ = thread_idx()
    warp = cute.arch.make_warp_uniform(warp_idx())
    if thread == 0:
        shared_memory.initialize()
    if warp == _ISSUER:
        primitives.tcgen05_alloc(shared_memory.tensor_address, COLUMNS)
        primitives.tcgen05_relinquish_alloc_permit()
    primitives.fence_mbarrier_init()
    primitives.tcgen05_fence("before_thread_sync")
    primitives.barrier_cta_sync(0)
    primitives.tcgen05_fence("after_thread_sync")
    tensor = shared_memory.tensor_address.load()
    index, _, _ = block_idx()
    step, _, _ = grid_dim()
    plan = schedule.Schedule(
        query_lengths,
        key_lengths,
        order,
        key_offset,
        num_queries,
        num_keys,
        query_heads,
        kv_heads,
        batches,
        section,
        window_left,
        window_right,
    )
    if warp < _CORRECTION:
        primitives.setmaxregister(_SOFTMAX_REGISTERS, "increase")
        job = (plan, shared_memory, tensor, warp // 4, warp % 4, query_segments, key_segments, lse)
        items = (index, step, num_items)
        if cutlass.const_expr(not is_direct):
            softmax.run(*job, *items, online_softmax.Constants(log2_scale, rescale_threshold, unit), maxima_from_loads)
        else:
            numbers = code_maps.Constants(log2_scale, slope, intercept, constant)
            direct = (log2_scale, block_offset, shift, margin, numbers)
            if cutlass.const_expr(code_map.odd_tiles):
                if warp < 4:
                    even = dataclasses.replace(code_map, mixed=False)
                    softmax.run(*job, *items, direct_p.Constants(*direct, even, anchor_keys), maxima_from_loads)
                else:
                    softmax.run(*job, *items, direct_p.Constants(*direct, code_map, anchor_keys), maxima_from_loads)
            else:
                softmax.run(*job, *items, direct_p.Constants(*direct, code_map, anchor_keys), maxima_from_loads)
    elif warp < _OTHERS:
        primitives.setmaxregister(_CORRECTION_REGISTERS, "decrease")
        correction.run(plan, shared_memory, tensor, warp % 4, output, index, step, num_items, head_size, not is_direct)
    else:
        primitives.setmaxregister(_OTHER_REGISTERS, "decrease")
        if warp == _ISSUER:
            issuer.run(plan, shared_memory, tensor, index, step, num_items, head_size, not is_direct)
        elif thread == 32 * _PRODUCER:
            producer.run(
                plan,
                shared_memory,
                query_map.get_ptr(),
                query_pages,
                key_map.get_ptr(),
                key_pages,
                value_map.get_ptr(),
                value_pages,
                index,
                step,
                num_items,
            )
    primitives.tcgen05_fence("before_thread_sync")
    primitives.barrier_cta_sync(0)
    if warp == _ISSUER:
        primitives.tcgen05_dealloc(primitives.make_tmem_ptr(tensor, Int32), COLUMNS)
