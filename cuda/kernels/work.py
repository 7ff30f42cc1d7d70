"""Which part of the output a thread block computes next, and which key tiles it takes."""

import dataclasses

import cutlass
from cutlass.cute.arch import grid_dim
from kernels import tile
from kernels.words import Uint32, load_if, view, when

Int32, Boolean, Pointer = cutlass.Int32, cutlass.Boolean, cutlass.Pointer


UNLIMITED = 1 << 30
"""A side of a window that leaves nothing out."""
_FARTHEST = 1 << 29  # positions beyond which an offset makes no difference; sums with UNLIMITED do not overflow


@dataclasses.dataclass(frozen=True)
class Item:
    """A tile of query rows of one head.

    Attributes:
      first_row: Of the tile.
      head: Query head.
      batch: Batch entry.
    """

    first_row: Int32
    head: Int32
    batch: Int32


def item_of(
    index: Int32, rows: int, part: int, num_queries: Int32, num_heads: Int32, batches: Int32, section: Int32
) -> Item:
    """The item of an index.

    Rows are divided from the last one on, in units of a part, so that the item with fewer parts than the others is the
    first of its head: if attention is causal it sees the fewest keys. These come last, after the whole items of all
    heads.

    Heads come in sections that the L2 cache holds. Within one the rows that see most keys, if attention is causal, of
    all heads come first; in every other section, counted from the last one, last, so that work goes on without a step.

    Args:
      index: Of the item.
      rows: Of an item.
      part: Rows of a part; parts of an item take no time where they have no rows. :attr:`Item.first_row` may be
        negative by whole parts.
      num_queries: Rows of a head.
      num_heads: Query heads.
      batches: Batch entries.
      section: Heads in a section.
    """
    num_parts = (num_queries + part - 1) // part
    tiles, rest = num_parts * part // rows, num_parts * part % rows
    num_sections = (num_heads * batches + section - 1) // section
    which, within = index // (section * cutlass.max(tiles, 1)), index % (section * cutlass.max(tiles, 1))
    first_head = which * section
    heads = cutlass.min(section, num_heads * batches - first_head)
    within = when((num_sections - which) % 2 == 1, within, heads * tiles - 1 - within)
    is_whole = index < num_heads * batches * tiles
    heads = cutlass.max(heads, 1)
    head = when(is_whole, first_head + within % heads, index - num_heads * batches * tiles)
    tile_of_head = when(is_whole, tiles - within // heads, Int32(0))
    return Item(tile_of_head * rows + rest - rows, head % num_heads, head // num_heads)


def in_turn(index: Int32) -> Int32:
    """What thread blocks that count on by their number take, every other time from the last block to the first.

    So the one that had the longest item gets the shortest.
    """
    blocks, _, _ = grid_dim()
    turn, place = index // blocks, index % blocks
    return turn * blocks + when(turn % 2 == 0, place, blocks - 1 - place)


@dataclasses.dataclass(frozen=True)
class Range:
    """Key slots that rows of an item may see.

    Attributes:
      key_limit: Keys from here on are seen by nobody.
      offset: Position of key 0 minus that of query 0.
      first_tile: First key tile.
      num_tiles: Key tiles.
    """

    key_limit: Int32
    offset: Int32
    first_tile: Int32
    num_tiles: Int32


def first_or(pointer: Pointer, index: Int32, otherwise: Int32) -> Int32:
    """An int32 of an array, or another value if there is no array."""
    there = pointer.toint() != 0
    return when(there, Int32(load_if(there, view(pointer, Uint32) + index, 1)[0]), otherwise)


def int_at(pointer: Pointer, index: Int32) -> Int32:
    """An int32 of an array that no kernel writes to."""
    return Int32(load_if(Boolean(True), view(pointer, Uint32) + index, 1)[0])


def offset_of(key_offset: Pointer) -> Int32:
    """Position of key 0 minus that of query 0; no offset without an array."""
    return cutlass.max(cutlass.min(first_or(key_offset, Int32(0), Int32(0)), _FARTHEST), -_FARTHEST)


def row_limit_of(item: Item, num_queries: Int32, query_lengths: Pointer) -> Int32:
    """Rows from here on see nothing."""
    return cutlass.min(num_queries, first_or(query_lengths, item.batch, num_queries))


def range_of(
    item: Item,
    rows: int,
    row_limit: Int32,
    num_keys: Int32,
    key_lengths: Pointer,
    order: Pointer,
    key_offset: Pointer,
    window_left: Int32,
    window_right: Int32,
) -> Range:
    """The key tiles of an item.

    Args:
      item: The item.
      rows: Of the item.
      row_limit: From :func:`row_limit_of`.
      num_keys: Keys.
      key_lengths: int32 [B] or null.
      order: int32 [num_keys], the key in each slot, or null; with it no tile is left out.
      key_offset: int32 [] or null.
      window_left: A query sees keys at most so far behind it.
      window_right: And so far ahead of it.
    """
    offset = offset_of(key_offset)
    key_limit = cutlass.min(num_keys, first_or(key_lengths, item.batch, num_keys))
    begin = item.first_row - window_left - offset
    end = cutlass.min(key_limit, item.first_row + rows + window_right - offset)
    in_order = order.toint() == 0
    first_tile = cutlass.max(when(in_order, begin, Int32(0)), 0) // tile.ROWS
    end_tile = (when(in_order, end, num_keys) + tile.ROWS - 1) // tile.ROWS
    num_tiles = when(item.first_row < row_limit, cutlass.max(end_tile - first_tile, 0), Int32(0))
    return Range(key_limit, offset, first_tile, num_tiles)
