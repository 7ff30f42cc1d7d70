"""A tile of bytes turned in shared memory: written four rows at a time, read along the rows of the transpose.

The tile is [channels, 128] bytes. Words of four rows are permuted so that the eight blocks of 16 channels that a warp
writes at once, and the channels that it reads, fall into different banks.
"""

import cutlass
import cutlass.cute as cute
from kernels import shared
from kernels.words import Uint16, Uint32, bytes_of, view, words_at

Int32, Int64, Pointer, Constexpr = cutlass.Int32, cutlass.Int64, cutlass.Pointer, cutlass.Constexpr

_ROW_WORDS = 32
_BLOCK = 16


def _word(channel: Int32, four_rows: Int32) -> Int32:
    return channel * _ROW_WORDS + (four_rows ^ (channel // _BLOCK * 4))


def allocate(head_size: int) -> cutlass.Array:
    """Shared words for a tile."""
    return shared.words(head_size * _ROW_WORDS)


def put_four_rows(tile: cutlass.Array, four_rows: Int32, channel: Int32, pairs: list[Uint32]) -> None:
    """Writes two channels of four rows.

    Args:
      tile: Shared words.
      four_rows: The rows 4 i to 4 i + 3.
      channel: The first channel, even.
      pairs: For each row the bytes of both channels, in the low half.
    """
    first, second = bytes_of(pairs[0], pairs[1], 0x5410), bytes_of(pairs[2], pairs[3], 0x5410)
    tile[_word(channel, four_rows)] = bytes_of(first, second, 0x6420)
    tile[_word(channel + 1, four_rows)] = bytes_of(first, second, 0x7531)


def put_two_rows(tile: cutlass.Array, two_rows: Int32, channel: Int32, pairs: list[Uint32]) -> None:
    """Writes two channels of the rows 2 i and 2 i + 1; otherwise as :func:`put_four_rows`."""
    halves = view(tile.data_ptr(), Uint16)
    for which, selector in enumerate((0x0040, 0x0051)):
        place = _word(channel + which, two_rows // 2) * 2 + two_rows % 2
        (halves + place).store(Uint16(bytes_of(pairs[0], pairs[1], selector)))


@cute.jit
def copy(tile: cutlass.Array, columns: Pointer, head_index: Int64, row_tiles: Int32, head_size: Constexpr) -> None:
    """Copies the complete tile of this thread block to memory, with two threads for every channel.

    Args:
      tile: Shared words.
      columns: uint8 [B, N, head_size, 128 row_tiles].
      head_index: Of the tile, in [B, N].
      row_tiles: Tiles of rows.
      head_size: Channels.
    """
    _, row_tile, _ = cute.arch.block_idx()
    thread, _, _ = cute.arch.thread_idx()
    target = view(columns, Uint32) + (head_index * head_size * row_tiles + row_tile) * _ROW_WORDS
    row_bytes = row_tiles * (4 * _ROW_WORDS)
    for step in cutlass.range_constexpr(head_size * 8 // (2 * head_size)):
        index = step * (2 * head_size) + thread
        channel, part = index // 8, index % 8
        words = words_at(tile, _word(channel, part * 4), 4)
        (target + (Int64(channel) * (row_bytes // 4) + part * 4)).store(words, alignment=16)
