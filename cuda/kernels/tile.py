"""The part of an input that a thread block works on: 128 rows of one head, and which of them count.

The grid is (heads, tiles of rows, batch), so that blocks which run together read neighbouring heads of the same rows.
"""

import cutlass
import cutlass.cute as cute
from kernels.words import Uint32, load_if

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


def channels(
    source: Pointer,
    valid: Boolean,
    row: Int64,
    first: Int32,
    count: int,
) -> list[Uint32]:
    """Consecutive channels of a row, two a word; zeros if the row does not count.

    Args:
      source: bfloat16 [rows, channels], as words.
      valid: Whether the row counts.
      row: Index of the row among all rows, times words a row.
      first: First channel.
      count: Number of channels, a multiple of 8.
    """
    words: list[Uint32] = []
    for start in range(0, count, 8):
        words += load_if(valid, source + (row + (first + start) // 2), 4)
    return words


def word(source: Pointer, valid: Boolean, index: Int64) -> Uint32:
    """Bits of a float32 or int32, or 0 without access."""
    return load_if(valid, source + index, 1)[0]
