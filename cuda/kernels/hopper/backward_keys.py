"""Which key tiles rows of queries see, and which of their elements: rows are queries here, and columns are keys."""

import dataclasses

import cutlass
from cutlass.cute.arch import lane_idx, thread_idx
from kernels import tile
from kernels.hopper import warpgroup
from kernels.hopper.backward_queries import mask_others, mask_outside, segment_of
from kernels.words import Float32, when
from kernels.work import Range, first_or, offset_of

Int32, Int64, Boolean, Pointer = cutlass.Int32, cutlass.Int64, cutlass.Boolean, cutlass.Pointer

KEYS = 64
"""Of a tile."""


def range_of(
    first_row: Int32,
    batch: Int32,
    num_queries: Int32,
    num_keys: Int32,
    query_lengths: Pointer,
    key_lengths: Pointer,
    key_offset: Pointer,
    window_left: Int32,
    window_right: Int32,
) -> Range:
    """The key tiles of 128 rows.

    Args:
      first_row: Of the rows.
      batch: Batch entry.
      num_queries: Rows of a head.
      num_keys: Keys.
      query_lengths: int32 [B] or null.
      key_lengths: int32 [B] or null.
      key_offset: int32 [] or null.
      window_left: A query sees keys at most so far behind it.
      window_right: And so far ahead of it.
    """
    offset = offset_of(key_offset)
    key_limit = cutlass.min(num_keys, first_or(key_lengths, batch, num_keys))
    row_limit = cutlass.min(num_queries, first_or(query_lengths, batch, num_queries))
    first_tile = cutlass.max(first_row - window_left - offset, 0) // KEYS
    end = cutlass.min(key_limit, first_row + tile.ROWS + window_right - offset)
    num_tiles = cutlass.max((end + (KEYS - 1)) // KEYS - first_tile, 0)
    return Range(key_limit, offset, first_tile, when(first_row < row_limit, num_tiles, Int32(0)))


@dataclasses.dataclass(frozen=True)
class View:
    """Which keys the rows of a warpgroup see; what differs between threads is found when it is needed.

    Attributes:
      keys: The range of keys.
      first_row: The first row of the warpgroup.
      window_left: A query sees keys at most so far behind it.
      window_right: And so far ahead of it.
      query_segments: int32 [B, T] or null.
      key_segments: int32 [B, S] or null.
      batch: Batch entry.
      num_queries: T.
      num_keys: S.
    """

    keys: Range
    first_row: Int32
    window_left: Int32
    window_right: Int32
    query_segments: Pointer
    key_segments: Pointer
    batch: Int32
    num_queries: Int32
    num_keys: Int32

    @property
    def rows(self) -> list[Int32]:
        """The two rows of this thread."""
        thread = thread_idx()[0] % 128
        return [self.first_row + (thread // 32 * 16 + thread % 32 // 4 * 2 + i) for i in (0, 1)]

    def is_general(self) -> Boolean:
        """Whether what a row sees is more than an interval of keys."""
        return self.query_segments.toint() != 0

    def is_partial(self, key_tile: Int32) -> Boolean:
        """Whether some row of the warpgroup does not see some key of a tile, by its interval."""
        first = key_tile * KEYS + self.keys.offset
        beyond = key_tile * KEYS + KEYS > self.keys.key_limit
        ahead = first + (KEYS - 1) > self.first_row + self.window_right
        behind = first < self.first_row + (warpgroup.ROWS - 1) - self.window_left
        return beyond | ahead | behind

    def mask_interval(self, values: list[Float32], key_tile: Int32) -> list[Float32]:
        """Zero where a row does not see a key, by its interval; values are in the order of accumulators."""
        start = key_tile * KEYS + lane_idx() % 4 * 4
        positions = [row - self.keys.offset for row in self.rows]
        first = [position - self.window_left - start for position in positions]
        last = [cutlass.min(p + self.window_right, self.keys.key_limit - 1) - start for p in positions]
        return mask_outside(values, first, last)

    def mask_general(self, values: list[Float32], key_tile: Int32) -> list[Float32]:
        """The same by interval and segments."""
        start = Int64(self.batch) * self.num_keys
        first = key_tile * KEYS + lane_idx() % 4 * 4
        segments = [
            segment_of(self.query_segments, Int64(self.batch) * self.num_queries, row, self.num_queries)
            for row in self.rows
        ]
        values = self.mask_interval(values, key_tile)
        return mask_others(values, segments, self.key_segments, start, first, self.num_keys)
