"""Shared memory of the backward.

| operand | rows | bytes of a row | from |
|---|---|---|---|
| key | 128 keys, a part for each 64 channels | 128, float16 | resident |
| value | 128 keys | head_size, E4M3 | resident |
| columns of the key | head_size channels | 128 keys, E4M3 | resident |
| dS | 64 queries | 128 keys, E4M3 | ring from the consumers to the warpgroup for dQ |
| query | 64 queries, a part for each 64 channels | 128, float16 | ring of rows, with the statistics |
| output gradient | 64 queries | head_size, E5M2 | ring of rows |
| columns of output gradient and query | head_size channels each | 64 queries, E5M2 and E4M3 | ring of columns |
| dQ | a part of 64 channels | float32, see :mod:`kernels.hopper.backward_query_sums` | stages, to the copy engine |

Besides the barriers of the rings there is one for the resident operands: the producer's thread arrives, with the bytes
that it expects.
"""

import dataclasses

import cutlass
from cutlass.experimental import primitives
from kernels import shared, tile
from kernels.hopper import backward_ring, warpgroup
from kernels.hopper.backward_queries import QUERIES
from kernels.ring import Ring
from kernels.ring import allocate as allocate_rings
from kernels.words import Float32, Uint8, view

Int64, Pointer = cutlass.Int64, cutlass.Pointer

PART = 64
"""Channels of a float16 row of 128 bytes."""
STATISTICS = 2 * QUERIES
"""Numbers of the query rows of a tile."""
SUM_STAGES = 4
"""Parts of dQ on their way to global memory."""
SUM_BYTES = 4 * QUERIES * PART
"""Of such a part."""
_SCORE_STAGES = 2
_RING_CHANNELS = 256
"""Of the stages of a ring together."""
_ALIGNMENT = 1024  # of rows with permuted chunks


@dataclasses.dataclass(frozen=True)
class Memory:
    """Where everything is.

    Attributes:
      key: Resident operand, as the next two.
      value: See above.
      key_columns: See above; None if the query's gradient is made elsewhere, like the last two.
      rows_ring: Stages of the query, and of the output gradient behind it.
      columns_ring: Stages of the columns of the output gradient, and of the query behind them.
      statistics: float32 [stages, 2, 64], written with the query.
      resident: Barrier.
      scores_ring: Stages of dS.
      sums: Stages of parts of dQ.
    """

    key: Pointer
    value: Pointer
    key_columns: Pointer | None
    rows_ring: Ring
    columns_ring: Ring
    statistics: Pointer
    resident: Pointer
    scores_ring: Ring | None
    sums: Pointer | None

    def initialize(self, head_size: int) -> None:
        """Initialises the barriers, by one thread."""
        for ring in (self.rows_ring, self.columns_ring):
            ring.initialize(backward_ring.CONSUMER_WARPS)
        if self.scores_ring is not None:
            readers = backward_ring.WARPGROUP_WARPS * (head_size // PART)  # The warps of dQ, for each part.
            self.scores_ring.initialize(readers, backward_ring.CONSUMER_WARPS)
        primitives.mbarrier_init(self.resident, 1)


def allocate(head_size: int, with_query: bool) -> Memory:
    """Allocates everything."""
    key_bytes = head_size // PART * tile.ROWS * warpgroup.SWIZZLE_BYTES
    tile_bytes = head_size * QUERIES
    sizes = [key_bytes, tile.ROWS * head_size]
    stages = _RING_CHANNELS // head_size
    rings = [(stages, 3 * tile_bytes), (stages, 2 * tile_bytes)]
    if with_query:
        sizes += [tile.ROWS * head_size, SUM_STAGES * SUM_BYTES]
        rings.append((_SCORE_STAGES, QUERIES * tile.ROWS))
    key, value, *of_query = (view(shared.words(size // 4, _ALIGNMENT).data_ptr(), Uint8) for size in sizes)
    rows, columns, *scores = allocate_rings(*rings)
    statistics = view(shared.words(stages * STATISTICS).data_ptr(), Float32)
    resident = view(shared.words(4).data_ptr(), Int64)
    key_columns, sums = of_query or (None, None)
    (scores_ring,) = scores or (None,)
    return Memory(key, value, key_columns, rows, columns, statistics, resident, scores_ring, sums)
