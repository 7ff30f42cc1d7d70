"""The thread of the forward that has the copy engine fill the ring, and hands items of work over to the consumers."""

import cutlass
import cutlass.cute as cute
from cutlass.cute.arch import block_idx
from cutlass.experimental import cuda, primitives
from kernels import ring, tile, work
from kernels.hopper import items, warpgroup

Int32, Pointer, Constexpr = cutlass.Int32, cutlass.Pointer, cutlass.Constexpr
TensorMap = cutlass.GridConstant[cuda.TensorMap]


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
def produce(
    keys: ring.Ring,
    values: ring.Ring,
    handover: items.Handover,
    key_map: TensorMap,
    value_map: TensorMap,
    counter: Pointer,
    problem: items.Problem,
    rows: Constexpr,
    head_size: Constexpr,
) -> None:
    """Goes through the items of this thread block, and through their tiles of keys.

    Args:
      keys: Ring of keys.
      values: Ring of values.
      handover: For the items.
      key_map: See :func:`kernels.hopper.forward.forward`.
      value_map: Likewise.
      counter: See :func:`kernels.hopper.items.next_index`.
      problem: Sizes and restrictions.
      rows: Of an item.
      head_size: 64 or 128.
    """
    place, item_place = (ring.Place(Int32(0), Int32(1)) for _ in range(2))
    index, _, _ = block_idx()
    while index < problem.num_items:
        item = work.item_of(
            index, rows, warpgroup.ROWS, problem.num_queries, problem.query_heads, problem.batches, problem.section
        )
        job = items.job_of(item, rows, problem)
        item_place = items.give(handover, item_place, job)
        for j in cutlass.range(job.keys.num_tiles):
            key_tile = job.keys.first_tile + j
            _load(keys, values, place, key_map, value_map, job.kv_index, key_tile, problem.key_tiles, head_size)
            place = ring.following(place, keys.stages)
        index = items.next_index(counter, problem.num_items)
    items.give(handover, item_place, items.end())
