"""Shared memory of the backward.

| operand | rows | bytes of a row | from |
|---|---|---|---|
| key | 128 keys, a part for each 64 channels | 128, float16 | resident |
| value | 128 keys | head_size, E4M3 | resident |
| columns of the key | head_size channels | 128 keys, E4M3 | resident |
| dS | 64 queries, two buffers | 128 keys, E4M3 | the consumers |
| query | 64 queries, a part for each 64 channels | 128, float16 | ring of rows, with the statistics |
| output gradient | 64 queries | head_size, E5M2 | ring of rows |
| columns of output gradient and query | head_size channels each | 64 queries, E5M2 and E4M3 | ring of columns |
| dQ | see :mod:`kernels.hopper.backward_query_sums` | | ring from the consumers to the copy engine |

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
      key_columns: See above; None if the query's gradient is made elsewhere.
      scores: Two buffers of dS; likewise.
      rows_ring: Stages of the query, and of the output gradient behind it.
      columns_ring: Stages of the columns of the output gradient, and of the query behind them.
      statistics: float32 [stages, 2, 64], written with the query.
      resident: Barrier.
      exchanged: Two barriers.
      sums_ring: Stages of what the copy engine adds to dQ, first those of the first consumer; None if it adds nothing.
    """

    key: Pointer
    value: Pointer
    key_columns: Pointer | None
    scores: Pointer | None
    rows_ring: Ring
    columns_ring: Ring
    statistics: Pointer
    resident: Pointer
    exchanged: Pointer
    sums_ring: Ring | None

    def initialize(self) -> None:
        """Initialises the barriers, by one thread."""
        for ring in (self.rows_ring, self.columns_ring):
            ring.initialize(backward_ring.CONSUMER_WARPS)
        if self.sums_ring is not None:
            self.sums_ring.initialize(1, backward_ring.CONSUMER_WARPS // backward_ring.CONSUMERS)
        primitives.mbarrier_init(self.resident, 1)
        for buffer in range(2):
            primitives.mbarrier_init(self.exchanged + buffer, backward_ring.CONSUMER_WARPS)


def allocate(head_size: int, with_query: bool) -> Memory:
    """Allocates everything."""
    key_bytes = head_size // PART * tile.ROWS * warpgroup.SWIZZLE_BYTES
    tile_bytes = head_size * QUERIES
    sizes = [key_bytes, tile.ROWS * head_size]
    if with_query:
        sizes += [tile.ROWS * head_size, 2 * SCORE_BYTES]
    key, value, *of_query = (view(shared.words(size // 4, _ALIGNMENT).data_ptr(), Uint8) for size in sizes)
    key_columns, scores = of_query or (None, None)
    stages = _RING_CHANNELS // head_size
    rings = [(stages, 3 * tile_bytes), (stages, 2 * tile_bytes)]
    if with_query and backward_query_sums.by_copy_engine(head_size):
        rings.append((backward_ring.CONSUMERS * backward_query_sums.STAGES, 4 * tile_bytes // backward_ring.CONSUMERS))
    rows, columns, *sums = allocate_rings(*rings)
    statistics = view(shared.words(stages * STATISTICS).data_ptr(), Float32)
    barriers = view(shared.words(8).data_ptr(), Int64)
    sums_ring = sums[0] if sums else None
    return Memory(key, value, key_columns, scores, rows, columns, statistics, barriers, barriers + 1, sums_ring)
