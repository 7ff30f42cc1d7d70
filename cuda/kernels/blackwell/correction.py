"""The correction warpgroup: rescales accumulators where the running maximum has changed, and writes the output."""

import cutlass
import cutlass.cute as cute
from cutlass.cute.arch import lane_idx
from kernels import tile, work
from kernels.blackwell import packed, schedule, tensor_memory
from kernels.blackwell.barriers import Barrier, arrive, wait_until_there
from kernels.blackwell.memory import Memory
from kernels.blackwell.tensor_memory import OUTPUTS, STAGES
from kernels.words import Float32, Uint32, pair_of, view, when

Int32, Int64, Boolean, Pointer, Constexpr = (
    cutlass.Int32,
    cutlass.Int64,
    cutlass.Boolean,
    cutlass.Pointer,
    cutlass.Constexpr,
)

_CHUNK = 32  # channels at a time


@cute.jit
def run(
    plan: schedule.Schedule,
    memory: Memory,
    tensor: Int32,
    warp: Int32,
    output: Pointer,
    index: Int32,
    step: Int32,
    num_items: Int32,
    head_size: Constexpr,
    rescales: Constexpr,
) -> None:
    """Corrects and writes the output of all items.

    Args:
      plan: Items.
      memory: Shared memory.
      tensor: Address of tensor memory.
      warp: In the warpgroup.
      output: bfloat16 [B, T, N, head_size].
      index: Of the first item.
      step: To the next one.
      num_items: End of the items.
      head_size: 64 or 128.
      rescales: Whether there is a running maximum.
    """
    before = schedule.at_first()
    lanes = tensor + tensor_memory.lanes_of_warp(warp)
    while work.in_turn(index) < num_items:
        job = plan.job(index)
        if cutlass.const_expr(rescales):
            for j in cutlass.range(job.num_tiles):
                for stage in cutlass.range_constexpr(STAGES):
                    done = job.first_tile + j - job.ranges[stage].first_tile
                    if (done > 0) & (done < job.ranges[stage].num_tiles):
                        factor = take_factor(memory, stage, warp, before.tiles[stage] + done - 1)
                        rescale(lanes + OUTPUTS[stage].first, factor, head_size)
                        arrive(memory.barriers, Barrier.OUTPUT_READY, stage)
        for stage in cutlass.range_constexpr(STAGES):
            row = job.item.first_row + stage * tile.ROWS + warp * 32 + lane_idx()
            place = (Int64(job.item.batch) * plan.num_queries + row) * plan.query_heads + job.item.head
            target = view(output, Uint32) + place * (head_size // 2)
            there = row < plan.num_queries
            tiles = job.ranges[stage].num_tiles
            if tiles > 0:
                use = before.items[stage]
                if cutlass.const_expr(rescales):
                    use = before.tiles[stage] + tiles - 1
                factor = take_factor(memory, stage, warp, use)
                wait_until_there(memory.barriers, Barrier.OUTPUT_FULL, stage, before.items[stage])
                store_output(target, lanes + OUTPUTS[stage].first, factor, there, head_size)
                arrive(memory.barriers, Barrier.OUTPUT_READY, stage)
            else:
                store_zeros(target, there, head_size)
        before = before.after(job)
        index += step


def take_factor(memory: Memory, stage: int, warp: Int32, use: Int32) -> Float32:
    """The factor of the thread's row."""
    wait_until_there(memory.barriers, Barrier.FACTORS_FULL, stage, use)
    factor = (memory.factors + (stage * tile.ROWS + warp * 32 + lane_idx())).load()
    arrive(memory.barriers, Barrier.FACTORS_FREE, stage)
    return factor


@cute.jit
def rescale(columns: Int32, factor: Float32, head_size: Constexpr) -> None:
    """Multiplies the accumulators of the warp's rows, if the factor of any is not 1."""
    if cute.arch.vote_any_sync(~(factor == Float32(1.0))):
        for start in cutlass.range_constexpr(0, head_size, _CHUNK):
            values = tensor_memory.load(columns + start, _CHUNK)
            tensor_memory.store(columns + start, packed.products_of_pairs(values, factor))
        tensor_memory.wait_for_stores()


@cute.jit
def store_output(target: Pointer, columns: Int32, factor: Float32, there: Boolean, head_size: Constexpr) -> None:
    """Writes a row of bfloat16: accumulators times the factor, of which zero selects zero whatever they hold."""
    empty = factor == Float32(0.0)
    for start in cutlass.range_constexpr(0, head_size, _CHUNK):
        values = packed.products_of_pairs(tensor_memory.load(columns + start, _CHUNK), factor)
        words = [when(empty, Uint32(0), pair_of(*values[i : i + 2])) for i in range(0, _CHUNK, 2)]
        store_words(target + start // 2, words, there)


@cute.jit
def store_zeros(target: Pointer, there: Boolean, head_size: Constexpr) -> None:
    """Writes a row of zeros."""
    for start in cutlass.range_constexpr(0, head_size, _CHUNK):
        store_words(target + start // 2, [Uint32(0) for _ in range(_CHUNK // 2)], there)


@cute.jit
def store_words(target: Pointer, words: list[Uint32], there: Boolean) -> None:
    """Writes words, 16 bytes at a time, if the row is there."""
    if there:
        for i in cutlass.range_constexpr(0, len(words), 4):
            (target + i).store(cutlass.Vector.from_elements(words[i : i + 4], Uint32), alignment=16)
