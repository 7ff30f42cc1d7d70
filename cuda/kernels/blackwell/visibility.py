"""Scores that a query must not see become minus infinity. A thread has all scores of a row."""

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass.cute.arch import lane_idx, shuffle_sync
from kernels import tile
from kernels.blackwell.scores import Scores
from kernels.words import Float32, when
from kernels.work import UNLIMITED, Range, first_or

Int32, Boolean, Pointer = cutlass.Int32, cutlass.Boolean, cutlass.Pointer

_UNSEEN = float("-inf")
_WARP = 32


@dataclasses.dataclass(frozen=True)
class View:
    """What the row of a thread sees.

    Attributes:
      keys: The stage's range of keys.
      first_row: The first row of the stage.
      row: The row.
      window_left: A row sees keys at most so far behind it.
      window_right: And so far ahead of it.
      segment: Segment of the row.
      key_segments: Start of the segments of this batch entry's keys, or null.
      order: int32 [num_keys], the key in each slot, or null.
      num_keys: Keys, and slots.
    """

    keys: Range
    first_row: Int32
    row: Int32
    window_left: Int32
    window_right: Int32
    segment: Int32
    key_segments: Pointer
    order: Pointer
    num_keys: Int32

    @property
    def first(self) -> Int32:
        """The first key that the row sees."""
        return self.row - self.window_left - self.keys.offset

    @property
    def last(self) -> Int32:
        """The last key that the row sees."""
        return cutlass.min(self.row + self.window_right - self.keys.offset, self.keys.key_limit - 1)

    def is_general(self) -> Boolean:
        """Whether what a row sees is not just an interval of slots."""
        unlimited = (self.window_left == UNLIMITED) & (self.window_right == UNLIMITED)
        limited = (self.keys.key_limit < self.num_keys) | ~unlimited
        return (self.key_segments.toint() != 0) | ((self.order.toint() != 0) & limited)

    def is_partial(self, key_tile: Int32) -> Boolean:
        """Whether some row of the stage does not see some key of a tile, by its interval."""
        first, last = key_tile * tile.ROWS, key_tile * tile.ROWS + (tile.ROWS - 1)
        beyond = last >= self.keys.key_limit
        ahead = last + self.keys.offset > self.first_row + self.window_right
        behind = first + self.keys.offset < self.first_row + (tile.ROWS - 1) - self.window_left
        return beyond | ahead | behind

    def mask_interval(self, scores: list[Float32], key_tile: Int32) -> list[Float32]:
        """Masks by the interval of the row."""
        first, last = self.first - key_tile * tile.ROWS, self.last - key_tile * tile.ROWS
        return [when((first <= i) & (last >= i), score, Float32(_UNSEEN)) for i, score in enumerate(scores)]

    def mask_general(self, scores: list[Float32], key_tile: Int32) -> list[Float32]:
        """Masks by interval, order and segments: each lane looks one key up, and tells the others."""
        masked = []
        for start in range(0, tile.ROWS, _WARP):
            slot = key_tile * tile.ROWS + start + lane_idx()
            inside = slot < self.num_keys
            key = when(inside, first_or(self.order, when(inside, slot, Int32(0)), slot), Int32(UNLIMITED))
            key_segment = first_or(self.key_segments, cutlass.min(key, self.num_keys - 1), self.segment)
            for i in range(_WARP):
                key_i, segment_i = shuffle_sync(key, i), shuffle_sync(key_segment, i)
                same = (self.key_segments.toint() == 0) | (segment_i == self.segment)
                seen = (key_i >= self.first) & (key_i <= self.last) & same
                masked.append(when(seen, scores[start + i], Float32(_UNSEEN)))
        return masked


@cute.jit
def masked(scores: Scores, seen: View, key_tile: Int32) -> Scores:
    """Scores of a tile as the row sees them."""
    if seen.is_general():
        scores = scores.replaced(seen.mask_general(scores.values, key_tile))
    elif seen.is_partial(key_tile):
        scores = scores.replaced(seen.mask_interval(scores.values, key_tile))
    return scores
