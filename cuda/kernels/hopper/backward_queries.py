"""Which query tiles see a tile of keys, and which of their elements: rows are keys here, and columns are queries."""

import dataclasses

import cutlass
from cutlass.cute.arch import lane_idx, thread_idx
from kernels import tile
from kernels.hopper import warpgroup
from kernels.hopper.key_order import accumulators_of_group
from kernels.words import Float32, Uint32, load_if, view, when
from kernels.work import first_or, offset_of

Int32, Int64, Boolean, Pointer = cutlass.Int32, cutlass.Int64, cutlass.Boolean, cutlass.Pointer

QUERIES = 64
"""Of a tile."""
GROUPS = QUERIES // 16
_NEVER = -(1 << 30)


@dataclasses.dataclass(frozen=True)
class Range:
    """Query tiles that may see a tile of keys.

    Attributes:
      key_limit: Keys from here on are seen by nobody.
      offset: Position of key 0 minus that of query 0.
      first_tile: First query tile.
      num_tiles: Query tiles.
    """

    key_limit: Int32
    offset: Int32
    first_tile: Int32
    num_tiles: Int32


def range_of(
    first_key: Int32,
    batch: Int32,
    num_queries: Int32,
    num_keys: Int32,
    query_lengths: Pointer,
    key_lengths: Pointer,
    key_offset: Pointer,
    window_left: Int32,
    window_right: Int32,
) -> Range:
    """The query tiles of a tile of keys.

    Args:
      first_key: Of the tile.
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
    last_key = cutlass.min(first_key + tile.ROWS, key_limit) - 1
    first_tile = cutlass.max(first_key + offset - window_right, 0) // QUERIES
    end = cutlass.min(row_limit, last_key + offset + window_left + 1)
    num_tiles = cutlass.max((end + (QUERIES - 1)) // QUERIES - first_tile, 0)
    return Range(key_limit, offset, first_tile, when(first_key < key_limit, num_tiles, Int32(0)))


@dataclasses.dataclass(frozen=True)
class View:
    """Which queries see the keys of a warpgroup; what differs between threads is found when it is needed.

    Attributes:
      queries: The range of queries.
      first_key: The first key of the warpgroup.
      window_left: A query sees keys at most so far behind it.
      window_right: And so far ahead of it.
      query_segments: int32 [B, T] or null.
      key_segments: int32 [B, S] or null.
      batch: Batch entry.
      num_queries: T.
      num_keys: S.
    """

    queries: Range
    first_key: Int32
    window_left: Int32
    window_right: Int32
    query_segments: Pointer
    key_segments: Pointer
    batch: Int32
    num_queries: Int32
    num_keys: Int32

    @property
    def keys(self) -> list[Int32]:
        """The two keys of this thread."""
        thread = thread_idx()[0] % 128
        return [self.first_key + (thread // 32 * 16 + thread % 32 // 4 * 2 + i) for i in (0, 1)]

    def is_general(self) -> Boolean:
        """Whether what a query sees is more than an interval of keys."""
        return self.query_segments.toint() != 0

    def is_partial(self, query_tile: Int32) -> Boolean:
        """Whether some query of a tile does not see some key of the warpgroup, by its interval."""
        first = self.first_key + self.queries.offset
        beyond = self.first_key + warpgroup.ROWS > self.queries.key_limit
        ahead = first + (warpgroup.ROWS - 1) > query_tile * QUERIES + self.window_right
        behind = first < query_tile * QUERIES + (QUERIES - 1) - self.window_left
        return beyond | ahead | behind

    def mask_interval(self, values: list[Float32], query_tile: Int32) -> list[Float32]:
        """Zero where a query does not see a key, by its interval; values are in the order of accumulators."""
        return mask_outside(values, *self._interval(query_tile))

    def mask_general(self, values: list[Float32], query_tile: Int32) -> list[Float32]:
        """The same by interval and segments."""
        start = Int64(self.batch) * self.num_queries
        first = query_tile * QUERIES + lane_idx() % 4 * 4
        segments = [
            segment_of(self.key_segments, Int64(self.batch) * self.num_keys, key, self.num_keys) for key in self.keys
        ]
        values = self.mask_interval(values, query_tile)
        return mask_others(values, segments, self.query_segments, start, first, self.num_queries)

    def _interval(self, query_tile: Int32) -> tuple[list[Int32], list[Int32]]:
        """The first and the last query that sees each key, relative to the first one of this thread."""
        start = query_tile * QUERIES + lane_idx() % 4 * 4
        positions = [key + (self.queries.offset - start) for key in self.keys]
        ends = [
            when(key < self.queries.key_limit, position + self.window_left, Int32(_NEVER))
            for key, position in zip(self.keys, positions, strict=True)
        ]
        return [position - self.window_right for position in positions], ends


def mask_outside(values: list[Float32], first: list[Int32], last: list[Int32]) -> list[Float32]:
    """Zero outside of an interval of columns.

    Args:
      values: In the order of accumulators.
      first: The first column of each row, relative to the first one of this thread.
      last: The last one.
    """
    masked = list(values)
    for column, row, index in _places():
        masked[index] = when((first[row] <= column) & (last[row] >= column), values[index], Float32(0.0))
    return masked


def mask_others(
    values: list[Float32], segments: list[Int32], others: Pointer, start: Int64, first: Int32, count: Int32
) -> list[Float32]:
    """Zero where row and column belong to different segments.

    Args:
      values: In the order of accumulators.
      segments: Of the rows.
      others: int32 array of the segments of the columns.
      start: Where those of this batch entry start.
      first: The first column of this thread.
      count: Columns that there are.
    """
    masked = list(values)
    for column, row, index in _places():
        same = segment_of(others, start, first + column, count) == segments[row]
        masked[index] = when(same, values[index], Float32(0.0))
    return masked


def segment_of(segments: Pointer, start: Int64, index: Int32, count: Int32) -> Int32:
    """Of a query or key, or of the last one if there is no such."""
    place = start + cutlass.min(index, count - 1)
    return Int32(load_if(Boolean(True), view(segments, Uint32) + place, 1)[0])


def _places() -> list[tuple[int, int, int]]:
    """Column, relative to the first one of the thread, row, and accumulator."""
    return [
        (16 * group + i, row, index)
        for group in range(GROUPS)
        for row in (0, 1)
        for i, index in enumerate(accumulators_of_group(group, row))
    ]
