"""The warpgroup of the backward that feeds the consumers, computes dQ from what they leave of dS, and has it added.

It takes no part in the softmax: neither waiting for the copy engine nor for dS of the other consumer delays one.
"""

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass.cute.arch import thread_idx
from cutlass.experimental import primitives
from kernels import ring, tile
from kernels.hopper import backward_producer, backward_products, backward_query_sums, warpgroup
from kernels.hopper import backward_ring as steps
from kernels.hopper.backward_memory import PART, SUM_BYTES, SUM_STAGES, Memory
from kernels.hopper.backward_producer import Place, QueryTile, Sources
from kernels.hopper.backward_queries import QUERIES, Range
from kernels.words import Float32, when

Int32, Pointer, Constexpr = cutlass.Int32, cutlass.Pointer, cutlass.Constexpr

_BARRIER = 1  # of the warpgroup


@dataclasses.dataclass(frozen=True)
class _Next:
    """What is loaded next into a ring.

    Attributes:
      query_tile: Tile of queries.
      at: Its place in the ring.
    """

    query_tile: QueryTile
    at: ring.Place

    def following(self, queries: Range, stages: int) -> "_Next":
        """What comes after it."""
        return _Next(backward_producer.following(self.query_tile, queries), ring.following(self.at, stages))


@cute.jit
def feed_and_multiply(
    memory: Memory, place: Place, queries: Range, sources: Sources, query_sums: Pointer, head_size: Constexpr
) -> None:
    """Goes through the tiles of queries.

    The rings are filled ahead: rows of a tile are asked for where the rows that they replace have been read, which is
    before dS of these can be waited for; columns, which are read last, a tile later.

    Args:
      memory: Shared memory.
      place: Of the thread block in the arrays.
      queries: Of each head.
      sources: Of the tiles.
      query_sums: float32 [B, N, T', head_size].
      head_size: 64 or 128.
    """
    thread, _, _ = thread_idx()
    scores_ring, stages, num_steps = memory.scores_ring, memory.rows_ring.stages, place.group_heads * queries.num_tiles
    scores = backward_products.operand(scores_ring.memory, tile.ROWS, "e4m3")
    channels = backward_products.operand(memory.key_columns, tile.ROWS, "e4m3")
    first = backward_producer.first_tile(place, queries)
    rows = columns = _Next(first, ring.Place(Int32(0), Int32(1)))
    if thread == 0:
        for _ in cutlass.range(cutlass.min(stages, num_steps), unroll=1):
            backward_producer.load_rows(memory, rows.query_tile, place, rows.at, sources, head_size)
            rows = rows.following(queries, stages)
        for _ in cutlass.range(cutlass.min(stages - 1, num_steps), unroll=1):
            backward_producer.load_columns(memory, columns.query_tile, columns.at, sources, head_size)
            columns = columns.following(queries, stages)
    ring.wait(memory.resident, Int32(0))
    at, query_tile, stage = ring.Place(Int32(0), Int32(0)), first, Int32(0)
    for _ in cutlass.range(num_steps, unroll=1):
        if thread == 0:
            if columns.query_tile.count < num_steps:
                backward_producer.load_columns(memory, columns.query_tile, columns.at, sources, head_size)
                columns = columns.following(queries, stages)
            if rows.query_tile.count < num_steps:
                backward_producer.load_rows(memory, rows.query_tile, place, rows.at, sources, head_size)
                rows = rows.following(queries, stages)
        ring.wait(scores_ring.full(at.stage), at.parity)
        target = query_sums + backward_query_sums.offset_of(
            query_tile.head * (place.padded_queries // QUERIES) + query_tile.index, head_size
        )
        d_s = scores.moved(at.stage, scores_ring.bytes)
        for part in cutlass.range(head_size // PART, unroll=1):
            keys = channels.moved(part, PART * tile.ROWS)
            d_query = warpgroup.wait(0, backward_products.of_shared(d_s, keys, PART, tile.ROWS))
            steps.arrive(scores_ring.empty(at.stage))
            _add(target + part * (QUERIES * PART), memory.sums + stage * SUM_BYTES, d_query)
            stage = when(stage == SUM_STAGES - 1, Int32(0), stage + 1)
        at, query_tile = ring.following(at, scores_ring.stages), backward_producer.following(query_tile, queries)
    if thread == 0:
        primitives.inline_ptx("cp.async.bulk.wait_group.read 0;")


@cute.jit
def _add(target: Pointer, stage: Pointer, d_query: list[Float32]) -> None:
    """Adds a part of dQ in global memory, by way of a stage that the copy engine read some parts ago.

    The stage of the next part is waited for here, where a barrier tells all threads.
    """
    thread, _, _ = thread_idx()
    backward_query_sums.store(stage, d_query)
    cute.arch.fence_view_async_shared()
    if thread == 0:
        primitives.inline_ptx(f"cp.async.bulk.wait_group.read {SUM_STAGES - 2};")
    primitives.barrier_cta_sync(barrier_id=_BARRIER, thread_count=warpgroup.THREADS)
    if thread == 0:
        primitives.inline_ptx(
            f"cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [{{$r0}}], [{{$r1}}], {SUM_BYTES};"
            " cp.async.bulk.commit_group;",
            read_only_args=[target, stage],
        )
