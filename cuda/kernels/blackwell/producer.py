"""The producer: one thread that keeps the copy engine busy."""

import cutlass
import cutlass.cute as cute
from cutlass.experimental import primitives
from kernels import ring, tile, work
from kernels.blackwell import schedule
from kernels.blackwell.barriers import Barrier, at, wait_until_free
from kernels.blackwell.memory import Memory, Sizes, place_in_ring
from kernels.blackwell.tensor_memory import STAGES
from kernels.words import Uint8, view

Int32, Int64, Pointer, Constexpr = cutlass.Int32, cutlass.Int64, cutlass.Pointer, cutlass.Constexpr


@cute.jit
def run(
    plan: schedule.Schedule,
    memory: Memory,
    query_map: Pointer,
    query_pages: Pointer,
    key_map: Pointer,
    key_pages: Pointer,
    value_map: Pointer,
    value_pages: Pointer,
    index: Int32,
    step: Int32,
    num_items: Int32,
) -> None:
    """Loads the tiles of all items in the order in which they are used.

    Args:
      plan: Items.
      memory: Shared memory.
      query_map: Tensor map of the query's codes.
      query_pages: Its scale factors.
      key_map: Of the key's codes.
      key_pages: Its scale factors.
      value_map: Of the values.
      value_pages: Their scale factors, if they have any.
      index: Of the first item.
      step: To the next one.
      num_items: End of the items.
    """
    before = schedule.at_first()
    while work.in_turn(index) < num_items:
        job = plan.job(index)
        head, kv_head = plan.head_index(job.item), plan.kv_head_index(job.item)
        for j in cutlass.range(job.num_tiles):
            key_tile = job.first_tile + j
            for stage in cutlass.range_constexpr(STAGES):
                if (job.ranges[stage].num_tiles > 0) & (job.ranges[stage].first_tile == key_tile):
                    load_query(memory, query_map, query_pages, plan, job.item, head, before.items[stage], stage)
                if cutlass.const_expr(stage == 0):
                    load_key(memory, key_map, key_pages, plan, kv_head, key_tile, before.loads + j)
            load_value(memory, value_map, value_pages, plan, kv_head, key_tile, before.loads + j)
        before = before.after(job)
        index += step


def load_query(
    memory: Memory,
    codes: Pointer,
    pages: Pointer,
    plan: schedule.Schedule,
    item: work.Item,
    head: Int32,
    use: Int32,
    stage: int,
) -> None:
    """The query tile of a stage."""
    sizes: Sizes = memory.sizes
    first_row = item.first_row + stage * tile.ROWS
    tiles = (plan.num_queries + tile.ROWS - 1) // tile.ROWS
    wait_until_free(memory.barriers, Barrier.QUERY_FREE, stage, use)
    full = at(memory.barriers, Barrier.QUERY_FULL, stage)
    primitives.mbarrier_arrive_expect_tx(full, sizes.query + sizes.query_pages)
    target = memory.query + stage * sizes.query
    row = head * plan.num_queries + first_row
    primitives.cp_async_bulk_tensor_shared_cta_global(target, codes, (Int32(0), row), full)
    page = Int64(head * tiles + first_row // tile.ROWS) * sizes.query_pages
    target = memory.query_pages + stage * sizes.query_pages
    primitives.cp_async_bulk_shared_cluster_global(target, view(pages, Uint8) + page, full, sizes.query_pages)


def load_key(
    memory: Memory,
    codes: Pointer,
    pages: Pointer,
    plan: schedule.Schedule,
    head: Int32,
    key_tile: Int32,
    load: Int32,
) -> None:
    """A key tile."""
    sizes: Sizes = memory.sizes
    place = place_in_ring(load)
    index = head * plan.key_tiles + key_tile
    ring.wait(memory.keys.empty(place.stage), place.parity ^ 1)
    full = memory.keys.full(place.stage)
    primitives.mbarrier_arrive_expect_tx(full, sizes.query + sizes.query_pages)
    row = index * tile.ROWS
    primitives.cp_async_bulk_tensor_shared_cta_global(memory.keys.stage(place.stage), codes, (Int32(0), row), full)
    target = memory.key_pages + place.stage * sizes.query_pages
    source = view(pages, Uint8) + Int64(index) * sizes.query_pages
    primitives.cp_async_bulk_shared_cluster_global(target, source, full, sizes.query_pages)


def load_value(
    memory: Memory,
    values: Pointer,
    pages: Pointer,
    plan: schedule.Schedule,
    head: Int32,
    key_tile: Int32,
    load: Int32,
) -> None:
    """A value tile."""
    sizes: Sizes = memory.sizes
    place = place_in_ring(load)
    ring.wait(memory.values.empty(place.stage), place.parity ^ 1)
    full = memory.values.full(place.stage)
    primitives.mbarrier_arrive_expect_tx(full, sizes.value + sizes.value_pages)
    coordinates = (key_tile * sizes.value_row, head * sizes.channels)
    target = memory.values.stage(place.stage)
    primitives.cp_async_bulk_tensor_shared_cta_global(target, values, coordinates, full)
    if sizes.value_pages:
        target = memory.value_pages + place.stage * sizes.value_pages
        source = view(pages, Uint8) + Int64(head * plan.key_tiles + key_tile) * sizes.value_pages
        primitives.cp_async_bulk_shared_cluster_global(target, source, full, sizes.value_pages)
