"""The softmax warpgroups: from the scores of a stage in tensor memory to P, a row a thread."""

from types import ModuleType

import cutlass
import cutlass.cute as cute
from cutlass.cute.arch import lane_idx
from kernels import tile, work
from kernels.blackwell import direct_p, online_softmax, packed, schedule, tensor_memory
from kernels.blackwell.barriers import Barrier, arrive, wait_until_free, wait_until_there
from kernels.blackwell.memory import Memory
from kernels.blackwell.scores import Scores
from kernels.blackwell.tensor_memory import SCORES, STAGE_COLUMNS
from kernels.blackwell.visibility import View, masked
from kernels.words import Float32, Uint32, view, when

Int32, Int64, Boolean, Pointer, Constexpr = (
    cutlass.Int32,
    cutlass.Int64,
    cutlass.Boolean,
    cutlass.Pointer,
    cutlass.Constexpr,
)


@cute.jit
def run(
    plan: schedule.Schedule,
    memory: Memory,
    tensor: Int32,
    stage: Int32,
    warp: Int32,
    query_segments: Pointer,
    key_segments: Pointer,
    lse: Pointer,
    index: Int32,
    step: Int32,
    num_items: Int32,
    constants: online_softmax.Constants | direct_p.Constants,
    maxima_from_loads: Constexpr,
) -> None:
    """Makes the probabilities of all items, and writes their log-sum-exp.

    Args:
      plan: Items.
      memory: Shared memory.
      tensor: Address of tensor memory.
      stage: Of the warpgroup.
      warp: In the warpgroup.
      query_segments: int32 [B, T] or null.
      key_segments: int32 [B, S] or null.
      lse: float32 [B, N, T].
      index: Of the first item.
      step: To the next one.
      num_items: End of the items.
      constants: Of the recipe.
      maxima_from_loads: Whether loads of scores give the maximum of each block.
    """
    before = schedule.at_first()
    columns = tensor + tensor_memory.lanes_of_warp(warp) + (SCORES[0].first + stage * STAGE_COLUMNS)
    while work.in_turn(index) < num_items:
        job = plan.job(index)
        keys = job.range_of(stage)
        seen = _view_of(plan, job, keys, stage, warp, query_segments, key_segments)
        tables = packed.tables_of_e2m1(seen.row)
        state = _softmax(constants).before_any_tile()
        tiles, items = before.of_stage(stage)
        for j in cutlass.range(keys.num_tiles):
            key_tile = keys.first_tile + j
            wait_until_there(memory.barriers, Barrier.SCORES_FULL, stage, tiles + j)
            if cutlass.const_expr(maxima_from_loads):
                scores = Scores(*tensor_memory.load_with_maxima(columns, tile.ROWS))
            else:
                scores = Scores(tensor_memory.load(columns, tile.ROWS), [])
            arrive(memory.barriers, Barrier.SCORES_LOADED, stage)
            scores = masked(scores, seen, key_tile)
            state = _probabilities(scores, state, memory, stage, warp, key_tile, j, columns, tables, constants)
            tensor_memory.wait_for_stores()
            arrive(memory.barriers, Barrier.P_FULL, stage)
        sees = (seen.row < job.row_limit) & (seen.segment > 0)
        factor, log = _softmax(constants).normalize(state, sees, constants)
        if keys.num_tiles > 0:
            use = items
            if cutlass.const_expr(isinstance(constants, online_softmax.Constants)):
                use = tiles + keys.num_tiles - 1
            wait_until_free(memory.barriers, Barrier.FACTORS_FREE, stage, use)
            publish(memory, stage, warp, factor)
        if seen.row < plan.num_queries:
            (view(lse, Float32) + (Int64(plan.head_index(job.item)) * plan.num_queries + seen.row)).store(log)
        before = before.after(job)
        index += step


def _view_of(
    plan: schedule.Schedule,
    job: schedule.Job,
    keys: work.Range,
    stage: Int32,
    warp: Int32,
    query_segments: Pointer,
    key_segments: Pointer,
) -> View:
    """What the row of the thread sees."""
    batch = job.item.batch
    first_row = job.item.first_row + stage * tile.ROWS
    row = first_row + warp * 32 + lane_idx()
    place = batch * plan.num_queries + cutlass.min(row, plan.num_queries - 1)
    first_key = when(key_segments.toint() != 0, Int64(batch) * plan.num_keys, Int64(0))
    return View(
        keys,
        first_row,
        row,
        plan.window_left,
        plan.window_right,
        work.first_or(query_segments, place, Int32(1)),
        view(key_segments, Int32) + first_key,
        plan.order,
        plan.num_keys,
    )


def _softmax(constants: online_softmax.Constants | direct_p.Constants) -> ModuleType:
    """Where the functions of a softmax are."""
    return online_softmax if isinstance(constants, online_softmax.Constants) else direct_p


def _probabilities(
    scores: Scores,
    state: online_softmax.Row | direct_p.Row,
    memory: Memory,
    stage: Int32,
    warp: Int32,
    key_tile: Int32,
    j: Int32,
    columns: Int32,
    tables: list[Uint32],
    constants: online_softmax.Constants | direct_p.Constants,
) -> online_softmax.Row | direct_p.Row:
    """P of a tile; with a running maximum the correction is told what to multiply by first."""
    if isinstance(constants, direct_p.Constants):
        return direct_p.step(scores, state, key_tile, columns, warp, tables, constants)
    highest, factor = online_softmax.update(scores, state, constants)
    _publish_unless_first(memory, stage, warp, j, factor)
    return online_softmax.step(scores, state, highest, factor, columns, constants)


@cute.jit
def _publish_unless_first(memory: Memory, stage: Int32, warp: Int32, j: Int32, factor: Float32) -> None:
    """The factor before has been read: the product before these scores waited for the rescaling that it was for."""
    if j > 0:
        publish(memory, stage, warp, factor)


def publish(memory: Memory, stage: Int32, warp: Int32, factor: Float32) -> None:
    """Hands the factor of each row to the correction."""
    (memory.factors + (stage * tile.ROWS + warp * 32 + lane_idx())).store(factor)
    arrive(memory.barriers, Barrier.FACTORS_FULL, stage)
