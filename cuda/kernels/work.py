"""Which part of the output a thread block computes next, and which key tiles it takes."""

import dataclasses

import cutlass
from cutlass.cute.arch import grid_dim
from kernels import tile
from kernels.words import Uint32, load_if, view, when

Int32, Boolean, Pointer = cutlass.Int32, cutlass.Boolean, cutlass.Pointer


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


def item_of(index: Int32, rows: int, num_queries: Int32, num_heads: Int32, batches: Int32, section: Int32) -> Item:
    """The item of an index.

    Heads come in sections that the L2 cache holds. Within one the rows that see most keys, if attention is causal, of
    all heads come first; in every other section last, so that work goes on without a step. Thread blocks take items in
    turn, every other time from the last block to the first: the one that had the longest item gets the shortest.

    Args:
      index: Of the item.
      rows: Of an item.
      num_queries: Rows of a head.
      num_heads: Query heads.
      batches: Batch entries.
      section: Heads in a section.
    """
    tiles = (num_queries + rows - 1) // rows
    index = _there_and_back(index, num_heads * batches * tiles)
    which, within = index // (section * tiles), index % (section * tiles)
    first_head = which * section
    heads = cutlass.min(section, num_heads * batches - first_head)
    within = when(which % 2 == 0, within, heads * tiles - 1 - within)
    head = first_head + within % heads
    return Item((tiles - 1 - within // heads) * rows, head % num_heads, head // num_heads)


def _there_and_back(index: Int32, end: Int32) -> Int32:
    """The indices below ``end`` with every other run of as many as there are thread blocks reversed."""
    blocks, _, _ = grid_dim()
    turn, place = index // blocks, index % blocks
    length = cutlass.min(blocks, end - turn * blocks)
    return when(turn % 2 == 0, index, turn * blocks + length - 1 - place)


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
    offset = first_or(key_offset, Int32(0), Int32(0))
    key_limit = cutlass.min(num_keys, first_or(key_lengths, item.batch, num_keys))
    begin = item.first_row - window_left - offset
    end = cutlass.min(key_limit, item.first_row + rows + window_right - offset)
    in_order = order.toint() == 0
    first_tile = cutlass.max(when(in_order, begin, Int32(0)), 0) // tile.ROWS
    end_tile = (when(in_order, end, num_keys) + tile.ROWS - 1) // tile.ROWS
    num_tiles = when(item.first_row < row_limit, cutlass.max(end_tile - first_tile, 0), Int32(0))
    return Range(key_limit, offset, first_tile, num_tiles)
