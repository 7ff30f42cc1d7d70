"""Shared memory of the backward.

| operand | rows | bytes of a row | from |
|---|---|---|---|
| key | 128 keys, a part for each 64 channels | 128, float16 | resident |
| value | 128 keys | head_size, E4M3 | resident |
| columns of the key | head_size channels | 128 keys, E4M3 | resident |
| dS | 64 queries, two buffers | 128 keys, E4M3 | the consumers |
| query | 64 queries, a part for each 64 channels | 128, float16 | ring, with the statistics |
| output gradient | 64 queries | head_size, E5M2 | ring |
| columns of output gradient and query | head_size channels each | 64 queries, E5M2 and E4M3 | ring |
| dQ for the copy engine | see :mod:`kernels.hopper.backward_query_sums` | | each consumer half of the channels |

Besides the barriers of the rings there are

| barrier | arrives | completes when |
|---|---|---|
| resident | the producer's thread, with the bytes that it expects | the resident operands have been written |
| exchanged | one lane of each consumer warp | a buffer of dS has been written |

A buffer of dS needs no barrier for having been read: a warpgroup writes it after it has waited for the dS of the step
before, and so for the other warpgroup to be done with the dS before that.
"""

import dataclasses

import cutlass
from cutlass.experimental import primitives
from kernels import shared, tile
from kernels.hopper import backward_query_sums, backward_ring, warpgroup
from kernels.hopper.backward_queries import QUERIES
from kernels.ring import Ring
from kernels.ring import allocate as allocate_rings
from kernels.words import Float32, Uint8, view

Int64, Pointer = cutlass.Int64, cutlass.Pointer

PART = 64
"""Channels of a float16 row of 128 bytes."""
STATISTICS = 2 * QUERIES
"""Numbers of the query rows of a tile."""
SCORE_BYTES = QUERIES * tile.ROWS
"""Of a buffer of dS."""
_RING_CHANNELS = 256
"""Of the stages of a ring together."""
_ALIGNMENT = 1024  # of rows with permuted chunks


@dataclasses.dataclass(frozen=True)
class Memory:
    """Where everything is.

    Attributes:
      key: Resident operand, as the next two.
      value: See above.
      key_columns: See above.
      scores: Two buffers of dS.
      query_ring: Stages of the query.
      gradient_ring: Stages of the output gradient.
      columns_ring: Stages of the columns of the output gradient, and of the query behind them.
      statistics: float32 [stages, 2, 64], written with the query.
      resident: Barrier.
      exchanged: Two barriers.
      query_sums: float32 [2, 64 head_size / 2], what the copy engine adds to dQ next for each consumer; None if it adds
        nothing.
    """

    key: Pointer
    value: Pointer
    key_columns: Pointer
    scores: Pointer
    query_ring: Ring
    gradient_ring: Ring
    columns_ring: Ring
    statistics: Pointer
    resident: Pointer
    exchanged: Pointer
    query_sums: Pointer | None

    def initialize(self) -> None:
        """Initialises the barriers, by one thread."""
        for ring in (self.query_ring, self.gradient_ring, self.columns_ring):
            ring.initialize(backward_ring.CONSUMER_WARPS)
        primitives.mbarrier_init(self.resident, 1)
        for buffer in range(2):
            primitives.mbarrier_init(self.exchanged + buffer, backward_ring.CONSUMER_WARPS)


def allocate(head_size: int, with_query: bool) -> Memory:
    """Allocates everything."""
    key_bytes = head_size // PART * tile.ROWS * warpgroup.SWIZZLE_BYTES
    tile_bytes = head_size * QUERIES
    key, value, key_columns, scores = (
        view(shared.words(size // 4, _ALIGNMENT).data_ptr(), Uint8)
        for size in (key_bytes, tile.ROWS * head_size, tile.ROWS * head_size, 2 * SCORE_BYTES)
    )
    sums = None
    if with_query and backward_query_sums.by_copy_engine(head_size):
        sums = view(shared.words(tile_bytes, _ALIGNMENT).data_ptr(), Float32)
    stages = _RING_CHANNELS // head_size
    rings = allocate_rings(*((stages, size) for size in (2 * tile_bytes, tile_bytes, 2 * tile_bytes)))
    statistics = view(shared.words(stages * STATISTICS).data_ptr(), Float32)
    barriers = view(shared.words(8).data_ptr(), Int64)
    return Memory(key, value, key_columns, scores, *rings, statistics, barriers, barriers + 1, sums)
