"""Scores that a query must not see become minus infinity."""

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass.cute.arch import lane_idx
from kernels import tile
from kernels.hopper import warpgroup
from kernels.hopper.key_order import accumulators_of_group, key_of_accumulator
from kernels.words import Float32, when
from kernels.work import Range, first_or

Int32, Boolean, Pointer = cutlass.Int32, cutlass.Boolean, cutlass.Pointer

UNLIMITED = 1 << 30
"""A side of a window that leaves nothing out."""
_UNSEEN = float("-inf")


@dataclasses.dataclass(frozen=True)
class View:
    """What the two rows of a thread see.

    Attributes:
      keys: The item's range of keys.
      first_row: The first row of the warpgroup.
      rows: The rows.
      window_left: A row sees keys at most so far behind it.
      window_right: And so far ahead of it.
      segments: Segment of each row.
      key_segments: Start of the segments of this batch entry's keys, or null.
      order: int32 [num_keys], the key in each slot, or null.
      num_keys: Keys, and slots.
    """

    keys: Range
    first_row: Int32
    rows: list[Int32]
    window_left: Int32
    window_right: Int32
    segments: list[Int32]
    key_segments: Pointer
    order: Pointer
    num_keys: Int32

    @property
    def first(self) -> list[Int32]:
        """The first key that each row sees."""
        return [row - self.window_left - self.keys.offset for row in self.rows]

    @property
    def last(self) -> list[Int32]:
        """The last key that each row sees."""
        return [cutlass.min(row + self.window_right - self.keys.offset, self.keys.key_limit - 1) for row in self.rows]

    def is_general(self) -> Boolean:
        """Whether what a row sees is not just an interval of slots."""
        unlimited = (self.window_left == UNLIMITED) & (self.window_right == UNLIMITED)
        limited = (self.keys.key_limit < self.num_keys) | ~unlimited
        return (self.key_segments.toint() != 0) | ((self.order.toint() != 0) & limited)

    def is_partial(self, key_tile: Int32) -> Boolean:
        """Whether some row of the warpgroup does not see some key of a tile, by its interval."""
        first, last = key_tile * tile.ROWS, key_tile * tile.ROWS + (tile.ROWS - 1)
        beyond = last >= self.keys.key_limit
        ahead = last + self.keys.offset > self.first_row + self.window_right
        behind = first + self.keys.offset < self.first_row + (warpgroup.ROWS - 1) - self.window_left
        return beyond | ahead | behind

    def is_hidden(self, key_tile: Int32) -> Boolean:
        """Whether no row of the warpgroup sees any key of a tile, by their intervals."""
        first, last = key_tile * tile.ROWS, key_tile * tile.ROWS + (tile.ROWS - 1)
        ahead = first + self.keys.offset > self.first_row + (warpgroup.ROWS - 1) + self.window_right
        behind = last + self.keys.offset < self.first_row - self.window_left
        return (ahead | behind) & (self.order.toint() == 0)

    def mask_interval(self, scores: list[Float32], key_tile: Int32) -> list[Float32]:
        """Masks by the interval of each row."""
        start = key_tile * tile.ROWS + lane_idx() % 4 * 4
        first = [row - start for row in self.first]
        last = [row - start for row in self.last]
        return [
            when((key >= first[row]) & (key <= last[row]), score, Float32(_UNSEEN))
            for score, key, row in ((s, key_of_accumulator(i), i // 2 % 2) for i, s in enumerate(scores))
        ]

    def mask_general(self, scores: list[Float32], key_tile: Int32) -> list[Float32]:
        """Masks by interval, order and segments."""
        masked = list(scores)
        start = key_tile * tile.ROWS + lane_idx() % 4 * 4
        first, last = self.first, self.last
        for group in range(tile.ROWS // 16):
            for i in range(4):
                slot = start + (group * 16 + i)
                inside = slot < self.num_keys
                key = first_or_slot(self.order, slot, inside)
                segment = first_or(self.key_segments, cutlass.min(key, self.num_keys - 1), Int32(0))
                for row in (0, 1):
                    index = accumulators_of_group(group, row)[i]
                    seen = inside & (key >= first[row]) & (key <= last[row])
                    same = (self.key_segments.toint() == 0) | (segment == self.segments[row])
                    masked[index] = when(seen & same, masked[index], Float32(_UNSEEN))
        return masked


def first_or_slot(order: Pointer, slot: Int32, inside: Boolean) -> Int32:
    """The key in a slot, which is the slot itself without an order, and anything outside the keys."""
    return first_or(order, when(inside, slot, Int32(0)), slot)


@cute.jit
def masked(scores: list[Float32], seen: View, key_tile: Int32) -> list[Float32]:
    """Scores of a tile as the rows see them."""
    if seen.is_general():
        scores = seen.mask_general(scores, key_tile)
    elif seen.is_partial(key_tile):
        scores = seen.mask_interval(scores, key_tile)
    return scores
