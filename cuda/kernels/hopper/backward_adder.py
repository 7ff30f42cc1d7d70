"""The threads of the backward that have the copy engine add to dQ what the consumers leave in shared memory.

Each consumer has one of them, in the producer's warpgroup: no consumer waits for a copy to start or to have read.
"""

import cutlass
import cutlass.cute as cute
from cutlass.experimental import primitives
from kernels import ring
from kernels.hopper import backward_query_sums
from kernels.hopper.backward_producer import Place
from kernels.hopper.backward_queries import QUERIES

Int32, Pointer, Constexpr = cutlass.Int32, cutlass.Pointer, cutlass.Constexpr


@cute.jit
def add_query_sums(
    sums: Pointer,
    sums_ring: ring.Ring,
    consumer: Int32,
    place: Place,
    first_tile: Int32,
    num_tiles: Int32,
    head_size: Constexpr,
) -> None:
    """Adds the halves of all tiles that a consumer leaves.

    Args:
      sums: float32 [B, N, T', head_size].
      sums_ring: Of all consumers.
      consumer: Whose part of the ring this is.
      place: Of the thread block.
      first_tile: First query tile.
      num_tiles: Query tiles of each head of the group.
      head_size: 128.
    """
    index = Int32(0)
    for member in cutlass.range(place.group_heads):
        first = (place.first_head + member) * (place.padded_queries // QUERIES) + first_tile
        for j in cutlass.range(num_tiles):
            at = backward_query_sums.place_of(consumer, index)
            ring.wait(sums_ring.full(at.stage), at.parity)
            target = sums + backward_query_sums.offset_of_half(first + j, consumer, head_size)
            primitives.inline_ptx(
                f"cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [{{$r0}}], [{{$r1}}], {sums_ring.bytes};"
                " cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0;",
                read_only_args=[target, sums_ring.stage(at.stage)],
            )
            primitives.mbarrier_arrive(sums_ring.empty(at.stage))
            index += 1
