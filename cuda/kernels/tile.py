"""The part of an input that a thread block works on: 128 rows of one head, and which of them count.

The grid is (heads, tiles of rows, batch), so that blocks which run together read neighbouring heads of the same rows.
"""

import cutlass
import cutlass.cute as cute
from cutlass.cute.arch import block_idx
from kernels.words import Uint32, load_if, view

Int32, Int64, Boolean, Pointer = cutlass.Int32, cutlass.Int64, cutlass.Boolean, cutlass.Pointer

ROWS = 128


@cute.jit
def rows_that_count(num_rows: Int32, batch: Int32, lengths: Pointer) -> Int32:
    """Rows of a batch entry that count: all, or as many as its length says.

    Args:
      num_rows: Rows of the array.
      batch: Batch entry.
      lengths: int32 [B], or null.
    """
    count = num_rows
    if lengths.toint() != 0:
        count = cutlass.min(count, (lengths + batch).load())
    return count


@cute.jit
def counts(row: Int32, limit: Int32, num_rows: Int32, batch: Int32, segments: Pointer) -> Boolean:
    """Whether a row counts: it lies within the limit and belongs to a segment above 0.

    Args:
      row: Row.
      limit: From :func:`rows_that_count`.
      num_rows: Rows of the array.
      batch: Batch entry.
      segments: int32 [B, num_rows], or null.
    """
    valid = row < limit
    if segments.toint() != 0:
        if valid:
            valid = (segments + (Int64(batch) * num_rows + row)).load() > 0
    return valid


def load_rows(
    source: Pointer,
    lengths: Pointer,
    segments: Pointer,
    num_rows: Int32,
    num_heads: Int32,
    first_row: Int32,
    count: int,
    first_channels: list[Int32],
    head_size: int,
) -> list[list[Uint32]]:
    """Blocks of 16 channels of consecutive rows of this thread block's head; zeros in rows that do not count.

    Args:
      source: bfloat16 [B, num_rows, num_heads, head_size].
      lengths: int32 [B], or null.
      segments: int32 [B, num_rows], or null.
      num_rows: Rows of the source.
      num_heads: Heads of the source.
      first_row: First row.
      count: Number of rows.
      first_channels: First channel of each block.
      head_size: Channels of the source.

    Returns:
      For each row the pairs of all blocks.
    """
    _, _, batch = block_idx()
    limit = rows_that_count(num_rows, batch, view(lengths, Int32))
    rows = []
    for i in range(count):
        row = first_row + i
        valid = counts(row, limit, num_rows, batch, view(segments, Int32))
        rows.append(load_row(source, valid, row, num_rows, num_heads, first_channels, head_size))
    return rows


def load_row(
    source: Pointer,
    valid: Boolean,
    row: Int32,
    num_rows: Int32,
    num_heads: Int32,
    first_channels: list[Int32],
    head_size: int,
) -> list[Uint32]:
    """The pairs of blocks of 16 channels of a row; zeros, without access, if it is not valid."""
    head, _, batch = block_idx()
    place = ((Int64(batch) * num_rows + row) * num_heads + head) * (head_size // 2)
    pairs: list[Uint32] = []
    for first in first_channels:
        for start in (0, 8):
            pairs += load_if(valid, view(source, Uint32) + (place + (first + start) // 2), 4)
    return pairs


def word(source: Pointer, valid: Boolean, index: Int64) -> Uint32:
    """Bits of a float32 or int32, or 0 without access."""
    return load_if(valid, source + index, 1)[0]


@cute.jit
def store_codes(
    codes: Pointer, words: list[Uint32], row: Int32, code_rows: Int32, num_heads: Int32, block: Int32, head_size: int
) -> None:
    """Writes the codes of a block of 16 channels, if the array has the row.

    Args:
      codes: uint8 [B, num_heads, code_rows, head_size / 2].
      words: Two words of codes.
      row: Row.
      code_rows: Rows of the array.
      num_heads: Heads.
      block: Index of the block.
      head_size: Channels.
    """
    head, _, batch = block_idx()
    if row < code_rows:
        place = ((Int64(batch) * num_heads + head) * code_rows + row) * (head_size // 8) + block * 2
        (view(codes, Uint32) + place).store(cutlass.Vector.from_elements(words, Uint32), alignment=8)
