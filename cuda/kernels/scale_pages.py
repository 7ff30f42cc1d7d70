"""Scale bytes of a tile, gathered in shared memory into pages of 128 rows by 4 scales (PTX ISA, tcgen05)."""

import cutlass
import cutlass.cute as cute
from kernels import shared
from kernels.words import Uint8, Uint32, view, words_at

Int32, Int64, Pointer, Constexpr = cutlass.Int32, cutlass.Int64, cutlass.Pointer, cutlass.Constexpr

_SCALES = 4
_WORDS = 128


def allocate(scales: int) -> cutlass.Array:
    """Shared words for 128 rows of ``scales`` scales."""
    return shared.words(scales // _SCALES * _WORDS)


def put(page: cutlass.Array, row: Int32, column: Int32, scale: Uint32) -> None:
    """Writes the scale of a row."""
    place = row % 32 * 16 + row // 32 * 4 + column % _SCALES + column // _SCALES * (4 * _WORDS)
    (view(page.data_ptr(), Uint8) + place).store(Uint8(scale))


@cute.jit
def copy(page: cutlass.Array, pages: Pointer, index: Int64, scales: Constexpr) -> None:
    """Copies the complete pages of a tile to memory.

    Args:
      page: Shared words.
      pages: All pages, as words.
      index: Of the tile.
      scales: Scales of a row.
    """
    thread, _, _ = cute.arch.thread_idx()
    words = scales // _SCALES * _WORDS
    if thread < words // 4:
        (pages + (index * words + thread * 4)).store(words_at(page, thread * 4, 4), alignment=16)
