"""Scores that a query must not see become minus infinity."""

import dataclasses

import cutlass
import cutlass.cute as cute
from kernels import tile
from kernels.hopper import warpgroup
from kernels.hopper.key_order import KEYS, KeyOrder
from kernels.words import Float32, Uint32, when
from kernels.work import UNLIMITED, Range, first_or

Int32, Boolean, Pointer = cutlass.Int32, cutlass.Boolean, cutlass.Pointer

_UNSEEN = float("-inf")


@dataclasses.dataclass(frozen=True)
class View:
    """What the rows of a warpgroup see. What belongs to single rows is found where a mask needs it.

    Attributes:
      keys: The item's range of keys.
      first_row: The first row of the warpgroup.
      window_left: A row sees keys at most so far behind it.
      window_right: And so far ahead of it.
      query_segments: Start of the segments of this batch entry's queries, or null.
      key_segments: Of its keys, likewise.
      order: int32 [num_keys], the key in each slot, or null.
      num_queries: Queries.
      num_keys: Keys, and slots.
      whole: The tiles that all rows see whole: from the first number to before the second.
    """

    keys: Range
    first_row: Int32
    window_left: Int32
    window_right: Int32
    query_segments: Pointer
    key_segments: Pointer
    order: Pointer
    num_queries: Int32
    num_keys: Int32
    whole: list[Int32]

    def rows(self) -> list[Int32]:
        """The two rows of this thread."""
        return warpgroup.rows_of_thread(self.first_row, warpgroup.thread_anew())

    def segments(self, rows: list[Int32]) -> list[Int32]:
        """The segment of each row; 1 without segments."""
        return [first_or(self.query_segments, cutlass.min(row, self.num_queries - 1), Int32(1)) for row in rows]

    def first(self, rows: list[Int32]) -> list[Int32]:
        """The first key that each row sees."""
        return [row - self.window_left - self.keys.offset for row in rows]

    def last(self, rows: list[Int32]) -> list[Int32]:
        """The last key that each row sees."""
        return [cutlass.min(row + self.window_right - self.keys.offset, self.keys.key_limit - 1) for row in rows]

    def is_general(self) -> Boolean:
        """Whether what a row sees is not just an interval of slots."""
        unlimited = (self.window_left == UNLIMITED) & (self.window_right == UNLIMITED)
        limited = (self.keys.key_limit < self.num_keys) | ~unlimited
        return (self.key_segments.toint() != 0) | ((self.order.toint() != 0) & limited)

    def is_whole(self, key_tile: Int32) -> Boolean:
        """Whether all rows see all keys of a tile."""
        first, end = self.whole
        return (key_tile >= first) & (key_tile < end)

    def first_slot(self, key_tile: Int32, has: KeyOrder) -> Int32:
        """The first slot of this thread in a tile."""
        return key_tile * tile.ROWS + warpgroup.thread_anew() % 4 * has.run

    def seen_by_interval(self, key_tile: Int32, has: KeyOrder) -> list[Uint32]:
        """For each row a bit for each key of the thread, by its interval."""
        start, rows = self.first_slot(key_tile, has), self.rows()
        return [
            _ones(has.count_below(last + 1 - start)) & ~_ones(has.count_below(first - start))
            for first, last in zip(self.first(rows), self.last(rows), strict=True)
        ]


def _ones(count: Int32) -> Uint32:
    """A word whose lowest bits, up to 32, are set."""
    return when(count >= KEYS, Uint32(0xFFFFFFFF), (Uint32(1) << Uint32(count & (KEYS - 1))) - 1)


@cute.jit
def _seen_in_general(seen: View, key_tile: Int32, has: cutlass.Constexpr) -> list[Uint32]:
    """The same by interval, order and segments, in a loop since all keys at once would take many registers."""
    rows = seen.rows()
    first, last, segments = seen.first(rows), seen.last(rows), seen.segments(rows)
    start = seen.first_slot(key_tile, has)
    bits = [Uint32(0), Uint32(0)]
    for group in cutlass.range(KEYS // 4):
        for i in cutlass.range_constexpr(4):
            slot = start + (4 * group // has.run * has.stride + 4 * group % has.run + i)
            inside = slot < seen.num_keys
            key = first_or_slot(seen.order, slot, inside)
            segment = first_or(seen.key_segments, cutlass.min(key, seen.num_keys - 1), Int32(0))
            sees = [
                inside
                & (key >= first[row])
                & (key <= last[row])
                & ((seen.key_segments.toint() == 0) | (segment == segments[row]))
                for row in (0, 1)
            ]
            bit = Uint32(1) << Uint32(4 * group + i)
            bits = [word | when(sees[row], bit, Uint32(0)) for row, word in enumerate(bits)]
    return bits


def first_or_slot(order: Pointer, slot: Int32, inside: Boolean) -> Int32:
    """The key in a slot, which is the slot itself without an order, and anything outside the keys."""
    return first_or(order, when(inside, slot, Int32(0)), slot)


@cute.jit
def masked(scores: list[Float32], seen: View, key_tile: Int32, has: cutlass.Constexpr) -> list[Float32]:
    """Scores of a tile as the rows see them; ``has``, a :class:`KeyOrder`, says which keys a thread has."""
    if not seen.is_whole(key_tile):
        bits = [Uint32(0), Uint32(0)]
        if seen.is_general():
            bits = _seen_in_general(seen, key_tile, has)
        else:
            bits = seen.seen_by_interval(key_tile, has)
        scores = _where(bits, scores, has)
    return scores


def _where(bits: list[Uint32], scores: list[Float32], has: KeyOrder) -> list[Float32]:
    """Scores whose bit is set; the others become minus infinity."""
    masked = list(scores)
    for row in (0, 1):
        for place, i in enumerate(has.accumulators[row]):
            masked[i] = when((bits[row] >> place) & 1 != 0, scores[i], Float32(_UNSEEN))
    return masked


def tiles_seen(seen: View, row_limit: Int32) -> list[Int32]:
    """The tiles of which some row sees some key, by its interval: from the first number to before the second.

    Args:
      seen: The rows.
      row_limit: Rows from here on see nothing.
    """
    before, behind = seen.first_row - seen.window_left, seen.first_row + (warpgroup.ROWS - 1) + seen.window_right
    first_tile, end_tile = seen.keys.first_tile, seen.keys.first_tile + seen.keys.num_tiles
    in_order = seen.order.toint() == 0
    first = when(in_order, _tile_of(before - seen.keys.offset), first_tile)
    end = when(in_order, _tile_of(behind - seen.keys.offset) + 1, end_tile)
    first = cutlass.min(cutlass.max(first, first_tile), end_tile)
    end = when(seen.first_row < row_limit, cutlass.min(end, end_tile), first)
    return [first, cutlass.max(end, first)]


def with_whole_tiles(seen: View) -> View:
    """The view with its ``whole`` tiles, which are none where a row sees more than an interval of slots."""
    first = _tile_of(seen.first_row + (warpgroup.ROWS - 1) - seen.window_left - seen.keys.offset + (tile.ROWS - 1))
    end = _tile_of(cutlass.min(seen.first_row + seen.window_right - seen.keys.offset + 1, seen.keys.key_limit))
    return dataclasses.replace(seen, whole=[first, when(seen.is_general(), first, end)])


def _tile_of(key: Int32) -> Int32:
    """The tile of a key, which may be negative."""
    return key >> (tile.ROWS.bit_length() - 1)
