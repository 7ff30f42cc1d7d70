"""The issuer: one warp that issues all products, and copies the scale factors that they need."""

import cutlass
import cutlass.cute as cute
from kernels import ring, work
from kernels.blackwell import products, schedule
from kernels.blackwell.barriers import Barrier, at, wait_until_free, wait_until_there
from kernels.blackwell.memory import Memory, place_in_ring
from kernels.blackwell.tensor_memory import STAGES
from kernels.words import when

Int32, Constexpr = cutlass.Int32, cutlass.Constexpr


@cute.jit
def run(
    plan: schedule.Schedule,
    memory: Memory,
    tensor: Int32,
    index: Int32,
    step: Int32,
    num_items: Int32,
    head_size: Constexpr,
    rescales: Constexpr,
) -> None:
    """Issues the products of all items: of each key tile, P V of the tile before and then Q K, stage by stage.

    Args:
      plan: Items.
      memory: Shared memory.
      tensor: Address of tensor memory.
      index: Of the first item.
      step: To the next one.
      num_items: End of the items.
      head_size: 64 or 128.
      rescales: Whether the correction rescales the output before each tile.
    """
    before = schedule.at_first()
    while work.in_turn(index) < num_items:
        job = plan.job(index)
        for j in cutlass.range(when(job.num_tiles > 0, job.num_tiles + 1, Int32(0))):
            key_tile = job.first_tile + j
            if j > 0:
                wait_for_tile(memory.values, before.loads + j - 1)
            for stage in cutlass.range_constexpr(STAGES):
                if job.takes(stage, key_tile - 1):
                    issue_output(memory, tensor, job, before, stage, key_tile - 1, j - 1, head_size, rescales)
                if cutlass.const_expr(stage == 0):
                    if j < job.num_tiles:
                        wait_for_tile(memory.keys, before.loads + j)
                if job.takes(stage, key_tile):
                    issue_scores(memory, tensor, job, before, stage, key_tile, j, head_size)
            if j > 0:
                products.commit(memory.values.empty(place_in_ring(before.loads + j - 1).stage))
            if j < job.num_tiles:
                products.commit(memory.keys.empty(place_in_ring(before.loads + j).stage))
        before = before.after(job)
        index += step


def wait_for_tile(tiles: ring.Ring, load: Int32) -> None:
    """Waits for a load of a ring."""
    place = place_in_ring(load)
    ring.wait(tiles.full(place.stage), place.parity)


@cute.jit
def issue_scores(
    memory: Memory,
    tensor: Int32,
    job: schedule.Job,
    before: schedule.Before,
    stage: Constexpr,
    key_tile: Int32,
    j: Int32,
    head_size: Constexpr,
) -> None:
    """Q K of a stage, when the columns of its scale factors are free."""
    keys = job.ranges[stage]
    if key_tile == keys.first_tile:
        wait_until_there(memory.barriers, Barrier.QUERY_FULL, stage, before.items[stage])
    # The scale factors go where the other stage's scores were: those that it has been given last must be loaded.
    other = 1 - stage
    given = before.tiles[other] + job.tiles_until(other, key_tile + stage)
    wait_until_free(memory.barriers, Barrier.SCORES_LOADED, other, given)
    place = place_in_ring(before.loads + j)
    sizes = memory.sizes
    products.multiply_query_and_key(
        tensor,
        stage,
        (memory.query + stage * sizes.query).toint(Int32),
        (memory.query_pages + stage * sizes.query_pages).toint(Int32),
        memory.keys.stage(place.stage).toint(Int32),
        (memory.key_pages + place.stage * sizes.query_pages).toint(Int32),
        head_size,
    )
    products.commit(at(memory.barriers, Barrier.SCORES_FULL, stage))
    if key_tile == keys.first_tile + keys.num_tiles - 1:
        products.commit(at(memory.barriers, Barrier.QUERY_FREE, stage))


@cute.jit
def issue_output(
    memory: Memory,
    tensor: Int32,
    job: schedule.Job,
    before: schedule.Before,
    stage: Constexpr,
    key_tile: Int32,
    j: Int32,
    head_size: Constexpr,
    rescales: Constexpr,
) -> None:
    """P V of a stage, when P is there and the accumulators may be added to."""
    keys = job.ranges[stage]
    done = key_tile - keys.first_tile
    if cutlass.const_expr(rescales):
        wait_until_free(memory.barriers, Barrier.OUTPUT_READY, stage, before.tiles[stage] + done)
    elif done == 0:
        wait_until_free(memory.barriers, Barrier.OUTPUT_READY, stage, before.items[stage])
    wait_until_there(memory.barriers, Barrier.P_FULL, stage, before.tiles[stage] + done)
    place = place_in_ring(before.loads + j)
    value = memory.values.stage(place.stage).toint(Int32)
    accumulate = when(done > 0, Int32(1), Int32(0))
    if cutlass.const_expr(memory.value_pages is None):
        products.multiply_e4m3_p_and_value(tensor, stage, value, accumulate, head_size)
    else:
        pages = (memory.value_pages + place.stage * memory.sizes.value_pages).toint(Int32)
        products.multiply_mxfp4_p_and_value(tensor, stage, value, pages, accumulate, head_size)
    if done == keys.num_tiles - 1:
        products.commit(at(memory.barriers, Barrier.OUTPUT_FULL, stage))
