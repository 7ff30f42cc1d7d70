"""The forward on Hopper: a producer warpgroup that fills the ring, and three warpgroups of 64 query rows each.

docs/hopper.md has the design.
"""

from types import ModuleType

import cutlass
import cutlass.cute as cute
from cutlass.cute.arch import block_idx, thread_idx, warp_idx
from cutlass.experimental import cuda, primitives
from kernels import code_maps, half_quotients, ring, shared, tile, work
from kernels.hopper import direct_p, epilogue, items, online_softmax, query_tile, visibility, warpgroup
from kernels.instructions import fused
from kernels.words import Float32, Uint8, Uint32, view, when

Int32, Int64, Boolean, Pointer, Constexpr = (
    cutlass.Int32,
    cutlass.Int64,
    cutlass.Boolean,
    cutlass.Pointer,
    cutlass.Constexpr,
)
TensorMap = cutlass.GridConstant[cuda.TensorMap]

_CONSUMERS = 3
_QUERY_ROWS = warpgroup.ROWS * _CONSUMERS
THREADS = 128 * (_CONSUMERS + 1)
_PRODUCER_REGISTERS, _CONSUMER_REGISTERS = 24, 160
_STAGES = 3
_QUERY_BARRIER = 1  # and the next two: the query rows of a consumer are there, or are no longer read


def _first_row_of(job: items.Job, consumer: Int32, num_queries: Int32) -> Int32:
    """The first row of a warpgroup, or one behind the last if the item has no rows for it."""
    row = job.item.first_row + consumer * warpgroup.ROWS
    return when(row < 0, num_queries, row)


def _load(
    keys: ring.Ring,
    values: ring.Ring,
    place: ring.Place,
    key_map: TensorMap,
    value_map: TensorMap,
    kv_index: Int32,
    key_tile: Int32,
    key_tiles: Int32,
    head_size: int,
) -> None:
    """Starts the copies of a tile of keys and of values, each when its stage is empty."""
    row = (kv_index * key_tiles + key_tile) * tile.ROWS
    ring.wait(keys.empty(place.stage), place.parity)
    full = keys.full(place.stage)
    primitives.mbarrier_arrive_expect_tx(full, keys.bytes)
    for part in range(head_size // 64):
        target = keys.stage(place.stage) + part * (tile.ROWS * warpgroup.SWIZZLE_BYTES)
        primitives.cp_async_bulk_tensor_shared_cta_global(target, key_map.get_ptr(), (Int32(part * 64), row), full)
    ring.wait(values.empty(place.stage), place.parity)
    full = values.full(place.stage)
    primitives.mbarrier_arrive_expect_tx(full, values.bytes)
    column = (key_tile * tile.ROWS, kv_index * head_size)
    primitives.cp_async_bulk_tensor_shared_cta_global(values.stage(place.stage), value_map.get_ptr(), column, full)


@cute.jit
def _release(of: ring.Ring, place: ring.Place) -> None:
    """Tells the producer that this warp has read a stage."""
    with cute.arch.elect_one():
        primitives.mbarrier_arrive(of.empty(place.stage))


@cute.jit
def _skip(keys: ring.Ring, values: ring.Ring, place: ring.Place) -> ring.Place:
    """Leaves out a tile that no row of the warpgroup sees."""
    for of in (keys, values):
        ring.wait(of.full(place.stage), place.parity)
        _release(of, place)
    return ring.following(place, _STAGES)


@cute.jit
def _of_batch(segments: Pointer, batch: Int32, length: Int32) -> Pointer:
    """Start of a batch entry's segments, or null."""
    if segments.toint() != 0:
        segments = view(segments, Int32) + Int64(batch) * length
    return segments


def _scores(query: Int32, keys: ring.Ring, place: ring.Place, head_size: int) -> list[Float32]:
    """Starts the product of the query rows and a tile of keys, when the tile is there."""
    ring.wait(keys.full(place.stage), place.parity)
    key = warpgroup.descriptor(keys.stage(place.stage).toint(Int32))
    return warpgroup.product_of_shared(query, key, tile.ROWS, head_size, warpgroup.ROWS, tile.ROWS)


def _outputs(p: list[Uint32], values: ring.Ring, place: ring.Place, head_size: int, kind: str) -> list[Float32]:
    """Starts the product of probabilities and a tile of values, when the tile is there."""
    ring.wait(values.full(place.stage), place.parity)
    value = warpgroup.descriptor(values.stage(place.stage).toint(Int32))
    return warpgroup.product_of_registers(p, value, head_size, kind, kind)


def _softmax(code_map: code_maps.Map | None) -> ModuleType:
    """Where the functions of a softmax are."""
    return online_softmax if code_map is None else direct_p


def _probabilities(
    scores: list[Float32],
    accumulators: list[Float32],
    state: online_softmax.Rows | direct_p.Rows,
    key_tile: Int32,
    is_first: Boolean,
    value_exponents: Pointer,
    first_exponent: Int32,
    constants: online_softmax.Constants | direct_p.Constants,
) -> tuple[list[Uint32], list[Float32], list[Float32], online_softmax.Rows | direct_p.Rows]:
    """The A operand of the second product, factors, the accumulators to add to, and the new state."""
    if isinstance(constants, online_softmax.Constants):
        p, factors, state = online_softmax.step(scores, state, constants)
        return p, factors, accumulators, state
    value_exponent = work.int_at(value_exponents, first_exponent + key_tile)
    return direct_p.step(scores, accumulators, state, key_tile, is_first, value_exponent, constants)


def _accumulated(
    old: list[Float32], new: list[Float32], factors: list[Float32], code_map: code_maps.Map | None
) -> list[Float32]:
    """Adds a tile's product: online softmax rescales what was there, Direct-P the product.

    The tensor core adds 8-bit products with 13 fraction bits, its accumulators included, so they take one tile only.
    """
    pairs = enumerate(zip(old, new, strict=True))
    if code_map is None:
        return [fused(before, factors[i // 2 % 2], added) for i, (before, added) in pairs]
    return [fused(added, factors[i // 2 % 2], before) for i, (before, added) in pairs]


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
    key_tiles = (num_keys + tile.ROWS - 1) // tile.ROWS

    if warp < 4:
        primitives.setmaxregister(_PRODUCER_REGISTERS, "decrease")
        if thread == 0:
            place, item_place = (ring.Place(Int32(0), Int32(1)) for _ in range(2))
            index, _, _ = block_idx()
            counter = view(counter, Int32)
            while index < num_items:
                item = work.item_of(index, _QUERY_ROWS, warpgroup.ROWS, num_queries, query_heads, batches, section)
                job = items.job_of(
                    item,
                    _QUERY_ROWS,
                    num_queries,
                    num_keys,
                    query_heads,
                    kv_heads,
                    query_lengths,
                    key_lengths,
                    order,
                    key_offset,
                    window_left,
                    window_right,
                )
                item_place = items.give(handover, item_place, job)
                for j in cutlass.range(job.keys.num_tiles):
                    key_tile = job.keys.first_tile + j
                    _load(key_ring, value_ring, place, key_map, value_map, job.kv_index, key_tile, key_tiles, head_size)
                    place = ring.following(place, _STAGES)
                index = items.next_index(counter, num_items)
            items.give(handover, item_place, items.end())
    else:
        primitives.setmaxregister(_CONSUMER_REGISTERS, "increase")
        consumer = warp // 4 - 1
        query_memory = query_memory + consumer * query_bytes
        a = warpgroup.descriptor(query_memory.toint(Int32))
        place = ring.Place(Int32(0), Int32(0))
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
        item_place = ring.Place(Int32(0), Int32(0))
        job = items.take(handover, item_place)
        while items.is_item(job):
            head_index = Int64(job.item.batch) * query_heads + job.item.head
            first_row = _first_row_of(job, consumer, num_queries)
            primitives.barrier_cta_sync(barrier_id=_QUERY_BARRIER + consumer, thread_count=128)
            query_tile.load(
                view(query_codes, Uint32),
                view(query_pages, Uint32),
                query_memory,
                head_index,
                first_row,
                num_queries,
                head_size,
            )
            primitives.barrier_cta_sync(barrier_id=_QUERY_BARRIER + consumer, thread_count=128)
            seen = visibility.with_whole_tiles(
                visibility.View(
                    job.keys,
                    first_row,
                    window_left,
                    window_right,
                    _of_batch(query_segments, job.item.batch, num_queries),
                    _of_batch(key_segments, job.item.batch, num_keys),
                    order,
                    num_queries,
                    num_keys,
                    [Int32(0), Int32(0)],
                )
            )
            first_tile, end_tile = visibility.tiles_seen(seen, job.row_limit)
            first_exponent = job.kv_index * key_tiles
            o = [Float32(0.0) for _ in range(head_size // 2)]
            state = _softmax(code_map).before_any_tile()
            for _ in cutlass.range(first_tile - job.keys.first_tile):
                place = _skip(key_ring, value_ring, place)
            for key_tile in cutlass.range(first_tile, end_tile):
                s = warpgroup.wait(0, _scores(a, key_ring, place, head_size))
                _release(key_ring, place)
                s = visibility.masked(s, seen, key_tile, _softmax(code_map).KEY_ORDER)
                is_first = key_tile == first_tile
                p, factors, o, state = _probabilities(
                    s, o, state, key_tile, is_first, value_exponents, first_exponent, constants
                )
                t = warpgroup.wait(0, _outputs(p, value_ring, place, head_size, _softmax(code_map).P_KIND))
                _release(value_ring, place)
                o = _accumulated(o, t, factors, code_map)
                place = ring.following(place, _STAGES)
            for _ in cutlass.range(job.keys.first_tile + job.keys.num_tiles - end_tile):
                place = _skip(key_ring, value_ring, place)
            rows = seen.rows()
            totals = [epilogue.sum_over_four(total) for total in state.total]
            sees = [
                (row < job.row_limit) & (segment > 0) for row, segment in zip(rows, seen.segments(rows), strict=True)
            ]
            factors, logs = _softmax(code_map).normalize(state, totals, sees, constants)
            epilogue.store_output(
                view(output, Uint32),
                o,
                factors,
                rows,
                num_queries,
                query_heads,
                job.item.head,
                job.item.batch,
                head_size,
            )
            for row in cutlass.range_constexpr(2):
                epilogue.store_lse(view(lse, Float32), logs[row], rows[row], num_queries, head_index)
            item_place = ring.following(item_place, items.STAGES)
            job = items.take(handover, item_place)
