"""The gradient of the query in a fixed order: a thread block has 128 query rows and goes through the keys they see.

:mod:`kernels.hopper.backward` without its share of the query's gradient does the rest. Scores and their gradients are
computed a second time here, so that no sum depends on the order in which thread blocks run.

| product | A | B |
|---|---|---|
| S = Q K^T | float16 query, resident | float16 key |
| dP = dO V^T | output gradient, resident | value |
| dQ += dS K | dS in registers | columns of the key |

Rows are in the order of :func:`kernels.hopper.key_order.key_of_row`. dQ of a tile is computed one step later; see
:mod:`kernels.hopper.backward`.
"""

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass.cute.arch import block_idx, grid_dim, thread_idx, warp_idx
from cutlass.experimental import cuda, primitives
from kernels import ring, shared, tile
from kernels.hopper import (
    backward_keys,
    backward_products,
    backward_query_sums,
    backward_scores,
    epilogue,
    warpgroup,
)
from kernels.hopper import backward_ring as steps
from kernels.hopper.backward_keys import KEYS
from kernels.hopper.backward_memory import PART
from kernels.hopper.backward_queries import GROUPS, QUERIES
from kernels.words import Float32, Uint8, Uint32, as_float, load_if, view, when
from kernels.work import Range

Int32, Int64, Boolean, Pointer, Constexpr = (
    cutlass.Int32,
    cutlass.Int64,
    cutlass.Boolean,
    cutlass.Pointer,
    cutlass.Constexpr,
)
TensorMap = cutlass.GridConstant[cuda.TensorMap]

THREADS = 128 * (steps.CONSUMERS + 1)
_PRODUCER_REGISTERS, _CONSUMER_REGISTERS = 24, 240
_STAGES = 3


@cute.jit
def _copy(target: Pointer, source: TensorMap, place: tuple[Int32, ...], barrier: Pointer) -> None:
    primitives.cp_async_bulk_tensor_shared_cta_global(target, source.get_ptr(), place, barrier)


@dataclasses.dataclass(frozen=True)
class Memory:
    """Shared memory.

    Attributes:
      query: 128 rows, a part for each 64 channels.
      gradient: 128 rows of the output gradient.
      keys: Ring of 64 keys.
      values: Ring of 64 values.
      columns: Ring of the columns of 64 keys.
      resident: Barrier, which completes when query and output gradient are there.
    """

    query: Pointer
    gradient: Pointer
    keys: ring.Ring
    values: ring.Ring
    columns: ring.Ring
    resident: Pointer


@dataclasses.dataclass(frozen=True)
class Rows:
    """What a thread knows of its two rows, and factors.

    Attributes:
      offsets: What is added to the base-2 log scores, minus infinity for a row that does not contribute.
      statistics: The row statistics, times the factor.
      log2_scale: See :func:`backward_query`, like the next two.
      lift: Likewise.
      factor: Likewise.
    """

    offsets: list[Float32]
    statistics: list[Float32]
    log2_scale: Float32
    lift: Float32
    factor: Float32


def _allocate(head_size: int) -> Memory:
    tile_bytes = KEYS * head_size
    query, gradient = (
        view(shared.words(size // 4, 1024).data_ptr(), Uint8) for size in (4 * tile_bytes, 2 * tile_bytes)
    )
    rings = ring.allocate(*((_STAGES, size) for size in (2 * tile_bytes, tile_bytes, tile_bytes)))
    resident = view(shared.words(4).data_ptr(), Int64)
    return Memory(query, gradient, *rings, resident)


@cute.jit
def _load_query(
    memory: Memory, query_map: TensorMap, gradient_map: TensorMap, row: Int32, head_size: Constexpr
) -> None:
    """Starts the copies of the resident operands, from a row on."""
    primitives.mbarrier_arrive_expect_tx(memory.resident, 6 * KEYS * head_size)
    for part in cutlass.range_constexpr(head_size // PART):
        target = memory.query + part * (tile.ROWS * warpgroup.SWIZZLE_BYTES)
        _copy(target, query_map, (Int32(part * PART), row), memory.resident)
    _copy(memory.gradient, gradient_map, (Int32(0), Int32(0), Int32(0), row // 16), memory.resident)


@cute.jit
def _load_keys(
    memory: Memory,
    key_map: TensorMap,
    value_map: TensorMap,
    key_columns_map: TensorMap,
    keys: Range,
    kv_index: Int32,
    padded_keys: Int32,
    head_size: Constexpr,
) -> None:
    """Fills the rings with tiles of keys."""
    at = ring.Place(Int32(0), Int32(1))
    for j in cutlass.range(keys.num_tiles):
        key_tile = keys.first_tile + j
        row = kv_index * padded_keys + key_tile * KEYS
        ring.wait(memory.keys.empty(at.stage), at.parity)
        full = memory.keys.full(at.stage)
        primitives.mbarrier_arrive_expect_tx(full, memory.keys.bytes)
        for part in cutlass.range_constexpr(head_size // PART):
            target = memory.keys.stage(at.stage) + part * (KEYS * warpgroup.SWIZZLE_BYTES)
            _copy(target, key_map, (Int32(part * PART), row), full)
        ring.wait(memory.values.empty(at.stage), at.parity)
        full = memory.values.full(at.stage)
        primitives.mbarrier_arrive_expect_tx(full, memory.values.bytes)
        _copy(memory.values.stage(at.stage), value_map, (Int32(0), Int32(0), Int32(0), row // 16), full)
        ring.wait(memory.columns.empty(at.stage), at.parity)
        full = memory.columns.full(at.stage)
        primitives.mbarrier_arrive_expect_tx(full, memory.columns.bytes)
        columns = (key_tile * KEYS, kv_index * head_size)
        _copy(memory.columns.stage(at.stage), key_columns_map, columns, full)
        at = ring.following(at, _STAGES)


@cute.jit
def _differentiate(
    memory: Memory, seen: backward_keys.View, consumer: Int32, rows: Rows, head_size: Constexpr
) -> list[Float32]:
    """Sums for dQ of a warpgroup's rows, as accumulators."""
    rows_of_query = memory.query + consumer * (warpgroup.ROWS * warpgroup.SWIZZLE_BYTES)
    query_rows = backward_products.operand(rows_of_query, warpgroup.SWIZZLE_BYTES, "f16", tile.ROWS)
    rows_of_gradient = memory.gradient + consumer * (KEYS * head_size)
    gradient_rows = backward_products.operand(rows_of_gradient, head_size, "e5m2")
    key_tiles = backward_products.operand(memory.keys.memory, warpgroup.SWIZZLE_BYTES, "f16", KEYS)
    value_tiles = backward_products.operand(memory.values.memory, head_size, "e4m3")
    columns_of_tiles = backward_products.operand(memory.columns.memory, KEYS, "e4m3")
    d_query = [Float32(0.0) for _ in range(head_size // 2)]
    old_d_s = [Uint32(0) for _ in range(2 * GROUPS)]
    at, old = (ring.Place(Int32(0), Int32(0)) for _ in range(2))
    ring.wait(memory.resident, Int32(0))
    for j in cutlass.range(seen.keys.num_tiles):
        key_tile = seen.keys.first_tile + j
        mask = backward_scores.mask_of(seen, key_tile)
        ring.wait(memory.keys.full(at.stage), at.parity)
        key_rows = key_tiles.moved(at.stage, memory.keys.bytes)
        s = backward_products.of_shared(query_rows, key_rows, KEYS, 2 * head_size)
        ring.wait(memory.values.full(at.stage), at.parity)
        value_rows = value_tiles.moved(at.stage, memory.values.bytes)
        d_p = backward_products.of_shared(gradient_rows, value_rows, KEYS, head_size)
        s = warpgroup.wait(1, s)
        p = backward_scores.probabilities(s, backward_scores.of_rows(rows.offsets), rows.log2_scale, rows.lift)
        p_bytes = backward_scores.as_bytes(backward_scores.masked(p, seen, key_tile, mask))
        ring.wait(memory.columns.full(old.stage), old.parity)
        columns = columns_of_tiles.moved(old.stage, memory.columns.bytes)
        product = backward_products.of_registers(old_d_s, columns, head_size)
        d_p = warpgroup.wait(1, d_p)
        steps.arrive(memory.keys.empty(at.stage))
        steps.arrive(memory.values.empty(at.stage))
        d_s = backward_scores.score_gradients(d_p, backward_scores.of_rows(rows.statistics), p_bytes, rows.factor)
        d_s = backward_scores.masked(d_s, seen, key_tile, mask)
        d_query = backward_products.sums(d_query, warpgroup.wait(0, product))
        old_d_s = backward_scores.as_bytes(d_s)
        if j > 0:
            steps.arrive(memory.columns.empty(old.stage))
        at, old = ring.following(at, _STAGES), at
    if seen.keys.num_tiles > 0:
        ring.wait(memory.columns.full(old.stage), old.parity)
        columns = columns_of_tiles.moved(old.stage, memory.columns.bytes)
        product = backward_products.of_registers(old_d_s, columns, head_size)
        d_query = backward_products.sums(d_query, warpgroup.wait(0, product))
    return d_query


@cute.kernel
def backward_query(
    query_map: TensorMap,
    gradient_map: TensorMap,
    key_map: TensorMap,
    value_map: TensorMap,
    key_columns_map: TensorMap,
    statistics: Pointer,
    gradient_scale: Pointer,
    query_gradient: Pointer,
    query_lengths: Pointer,
    key_lengths: Pointer,
    query_segments: Pointer,
    key_segments: Pointer,
    key_offset: Pointer,
    num_queries: Int32,
    num_keys: Int32,
    query_heads: Int32,
    kv_heads: Int32,
    window_left: Int32,
    window_right: Int32,
    log2_scale: Float32,
    lift: Float32,
    factor: Float32,
    unit: Float32,
    head_size: Constexpr,
) -> None:
    """Gradient of 128 rows of a head.

    Args:
      query_map: Of float16 [B N T', head_size], from :mod:`kernels.hopper.backward_prepare`.
      gradient_map: Of E5M2 [B N T' / 16, 2, 8, head_size], where entry [_, h, g] is row 2 g + h.
      key_map: Of float16 [B K S', head_size], from :mod:`kernels.hopper.expand_key`.
      value_map: Of E4M3 [B K S' / 16, 2, 8, head_size], like the gradient's.
      key_columns_map: Of E4M3 [B K head_size, S'].
      statistics: float32 [B, N, T' / 64, 2, 64], from :mod:`kernels.hopper.backward_prepare`.
      gradient_scale: float32 [B, K].
      query_gradient: bfloat16 [B, T, N, head_size].
      query_lengths: int32 [B] or null.
      key_lengths: int32 [B] or null.
      query_segments: int32 [B, T] or null.
      key_segments: int32 [B, S] or null.
      key_offset: int32 [], position of key 0 minus that of query 0, or null.
      num_queries: T.
      num_keys: S.
      query_heads: N.
      kv_heads: K.
      window_left: A query sees keys at most so far behind it.
      window_right: And so far ahead of it.
      log2_scale: From a raw score to a base-2 log score.
      lift: Octaves by which P is lifted.
      factor: Softmax scale without the factors of the gradients' operands.
      unit: Factor of the gradient without its scale.
      head_size: 64 or 128.
    """
    memory = _allocate(head_size)
    thread, _, _ = thread_idx()
    warp = cute.arch.make_warp_uniform(warp_idx())
    if thread == 0:
        for each in (memory.keys, memory.values, memory.columns):
            each.initialize(steps.CONSUMER_WARPS)
        primitives.mbarrier_init(memory.resident, 1)
    primitives.fence_mbarrier_init()
    primitives.barrier_cta_sync(0)

    head, tile_index, batch = block_idx()
    _, row_tiles, _ = grid_dim()
    # The last rows come first: if attention is causal they see most keys.
    row_tile = row_tiles - 1 - tile_index
    head_index, kv_index = batch * query_heads + head, batch * kv_heads + head // (query_heads // kv_heads)
    padded_keys = (num_keys + tile.ROWS - 1) // tile.ROWS * tile.ROWS
    keys = backward_keys.range_of(
        row_tile * tile.ROWS,
        batch,
        num_queries,
        num_keys,
        query_lengths,
        key_lengths,
        key_offset,
        window_left,
        window_right,
    )

    if warp < 4:
        primitives.setmaxregister(_PRODUCER_REGISTERS, "decrease")
        if thread == 0:
            row = (head_index * row_tiles + row_tile) * tile.ROWS
            _load_query(memory, query_map, gradient_map, row, head_size)
            _load_keys(memory, key_map, value_map, key_columns_map, keys, kv_index, padded_keys, head_size)
    else:
        primitives.setmaxregister(_CONSUMER_REGISTERS, "increase")
        consumer = warp // 4 - 1
        first_row = row_tile * tile.ROWS + consumer * warpgroup.ROWS
        seen = backward_keys.View(
            keys,
            first_row,
            window_left,
            window_right,
            query_segments,
            key_segments,
            batch,
            num_queries,
            num_keys,
        )
        source = view(statistics, Uint32) + Int64(head_index * row_tiles + row_tile) * (4 * QUERIES)
        places = [source + (consumer * (2 * QUERIES) + (row - first_row)) for row in seen.rows]
        offsets = [as_float(load_if(Boolean(True), place, 1)[0]) for place in places]
        row_statistics = [as_float(load_if(Boolean(True), place + QUERIES, 1)[0]) for place in places]
        rows = Rows(offsets, row_statistics, log2_scale, lift, factor)
        d_query = _differentiate(memory, seen, consumer, rows, head_size)
        true_unit = unit * backward_query_sums.inverse_scale(gradient_scale, Int64(kv_index))
        factors = [when(offset == Float32(float("-inf")), Float32(0.0), true_unit) for offset in offsets]
        epilogue.store_output(
            view(query_gradient, Uint32),
            d_query,
            factors,
            seen.rows,
            num_queries,
            query_heads,
            head,
            batch,
            head_size,
        )
