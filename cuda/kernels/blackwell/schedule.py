"""What a thread block computes, item after item, as all of its roles see it.

An item is two neighbouring tiles of 128 query rows of one head, a *stage* each. A stage takes the key tiles that its
rows may see; keys and values are loaded for both. How often anything has been used before an item follows from the
tiles and items before it, so that nobody needs more than counters.
"""

import dataclasses

import cutlass
from kernels import tile, work
from kernels.blackwell.tensor_memory import STAGES
from kernels.words import when

Int32, Int64, Boolean, Pointer = cutlass.Int32, cutlass.Int64, cutlass.Boolean, cutlass.Pointer

ITEM_ROWS = STAGES * tile.ROWS
_NEVER = 1 << 30  # a key tile beyond all


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Sizes and restrictions; see :func:`kernels.blackwell.forward.forward`."""

    query_lengths: Pointer
    key_lengths: Pointer
    order: Pointer
    key_offset: Pointer
    num_queries: Int32
    num_keys: Int32
    query_heads: Int32
    kv_heads: Int32
    batches: Int32
    section: Int32
    window_left: Int32
    window_right: Int32

    def job(self, index: Int32) -> "Job":
        """The item that a thread block takes with an index."""
        item = work.item_of(
            work.in_turn(index),
            ITEM_ROWS,
            ITEM_ROWS,
            self.num_queries,
            self.query_heads,
            self.batches,
            self.section,
        )
        row_limit = work.row_limit_of(item, self.num_queries, self.query_lengths)
        ranges = [self._range(item, row_limit, stage * tile.ROWS) for stage in range(STAGES)]
        sees = [keys.num_tiles > 0 for keys in ranges]
        begins = [when(seen, keys.first_tile, Int32(_NEVER)) for seen, keys in zip(sees, ranges, strict=True)]
        ends = [when(seen, keys.first_tile + keys.num_tiles, Int32(0)) for seen, keys in zip(sees, ranges, strict=True)]
        begin, end = cutlass.min(*begins), cutlass.max(*ends)
        num_tiles = cutlass.max(end - begin, 0)
        return Job(item, row_limit, ranges, when(num_tiles > 0, begin, Int32(0)), num_tiles)

    def _range(self, item: work.Item, row_limit: Int32, rows_before: int) -> work.Range:
        return work.range_of(
            dataclasses.replace(item, first_row=item.first_row + rows_before),
            tile.ROWS,
            row_limit,
            self.num_keys,
            self.key_lengths,
            self.order,
            self.key_offset,
            self.window_left,
            self.window_right,
        )

    @property
    def key_tiles(self) -> Int32:
        """Key tiles of a head."""
        return (self.num_keys + tile.ROWS - 1) // tile.ROWS

    def head_index(self, item: work.Item) -> Int32:
        """Of batch entry and query head."""
        return item.batch * self.query_heads + item.head

    def kv_head_index(self, item: work.Item) -> Int32:
        """Of batch entry and key/value head."""
        return item.batch * self.kv_heads + item.head // (self.query_heads // self.kv_heads)


@dataclasses.dataclass(frozen=True)
class Job:
    """An item.

    Attributes:
      item: Its rows and head.
      row_limit: Rows from here on see nothing.
      ranges: Key tiles of each stage.
      first_tile: The first key tile of any stage.
      num_tiles: Key tiles until the last one of any stage.
    """

    item: work.Item
    row_limit: Int32
    ranges: list[work.Range]
    first_tile: Int32
    num_tiles: Int32

    def range_of(self, stage: Int32) -> work.Range:
        """Key tiles of a stage that is known at run time only."""
        names = [field.name for field in dataclasses.fields(work.Range)]
        return work.Range(*(when(stage == 0, *(getattr(keys, name) for keys in self.ranges)) for name in names))

    def takes(self, stage: int, key_tile: Int32) -> Boolean:
        """Whether a stage takes a key tile."""
        keys = self.ranges[stage]
        return (key_tile >= keys.first_tile) & (key_tile < keys.first_tile + keys.num_tiles)

    def tiles_until(self, stage: int, key_tile: Int32) -> Int32:
        """How many tiles a stage takes before a key tile."""
        keys = self.ranges[stage]
        return cutlass.max(cutlass.min(key_tile - keys.first_tile, keys.num_tiles), 0)


@dataclasses.dataclass(frozen=True)
class Before:
    """What was done before an item.

    Attributes:
      tiles: Key tiles of each stage.
      items: Items in which a stage had key tiles.
      loads: Key tiles that were loaded.
    """

    tiles: list[Int32]
    items: list[Int32]
    loads: Int32

    def of_stage(self, stage: Int32) -> tuple[Int32, Int32]:
        """Tiles and items of a stage that is known at run time only."""
        return when(stage == 0, *self.tiles), when(stage == 0, *self.items)

    def after(self, job: Job) -> "Before":
        """What was done when an item is complete, too."""
        counts = [keys.num_tiles for keys in job.ranges]
        return Before(
            [tiles + count for tiles, count in zip(self.tiles, counts, strict=True)],
            [items + when(count > 0, Int32(1), Int32(0)) for items, count in zip(self.items, counts, strict=True)],
            self.loads + job.num_tiles,
        )


def at_first() -> Before:
    """Before the first item."""
    return Before([Int32(0), Int32(0)], [Int32(0), Int32(0)], Int32(0))
