"""Key in the order of the slots, for recipes that move the keys of an anchor to the front."""

import cutlass
import cutlass.cute as cute
from cutlass.cute.arch import block_idx, thread_idx
from kernels import tile, work
from kernels.words import Uint32, load_if, view, when

Int32, Int64, Boolean, Pointer, Constexpr = (
    cutlass.Int32,
    cutlass.Int64,
    cutlass.Boolean,
    cutlass.Pointer,
    cutlass.Constexpr,
)

_CHUNK = 4  # words that are copied at a time
_PAGE = 128  # words


@cute.kernel
def order_key(
    codes: Pointer,
    pages: Pointer,
    order: Pointer,
    ordered_codes: Pointer,
    ordered_pages: Pointer,
    num_keys: Int32,
    num_heads: Int32,
    head_size: Constexpr,
) -> None:
    """Copies the codes and the scale factors of a tile of slots.

    Args:
      codes: uint8 [B, num_heads, 128 tiles, head_size / 2].
      pages: uint8 [B, num_heads, tiles, head_size / 64, 512].
      order: int32 [num_keys], the key in each slot.
      ordered_codes: Like the codes.
      ordered_pages: Like the pages.
      num_keys: Keys; slots after them hold the padding that was there.
      num_heads: Heads.
      head_size: 64 or 128.
    """
    head_index, key_tile, batch = block_idx()
    thread, _, _ = thread_idx()
    tiles = (num_keys + tile.ROWS - 1) // tile.ROWS
    head = Int64(batch) * num_heads + head_index
    codes, pages, ordered_codes, ordered_pages = (
        view(pointer, Uint32) for pointer in (codes, pages, ordered_codes, ordered_pages)
    )
    words, threads = head_size // 8, 2 * head_size
    chunks, pages_a_tile = words // _CHUNK, head_size // 64
    for step in cutlass.range_constexpr(tile.ROWS * chunks // threads):
        index = step * threads + thread
        row, chunk = index // chunks, index % chunks
        key = _key_of_slot(key_tile * tile.ROWS + row, num_keys, order)
        source = codes + ((head * tiles * tile.ROWS + key) * words + chunk * _CHUNK)
        target = ordered_codes + ((head * tiles * tile.ROWS + key_tile * tile.ROWS + row) * words + chunk * _CHUNK)
        loaded = load_if(Boolean(True), source, _CHUNK)
        target.store(cutlass.Vector.from_elements(loaded, Uint32), alignment=16)
    for step in cutlass.range_constexpr(tile.ROWS * pages_a_tile // threads):
        index = step * threads + thread
        page, row = index // tile.ROWS, index % tile.ROWS
        key = _key_of_slot(key_tile * tile.ROWS + row, num_keys, order)
        source = pages + (((head * tiles + key // tile.ROWS) * pages_a_tile + page) * _PAGE + _place(key % tile.ROWS))
        target = ordered_pages + (((head * tiles + key_tile) * pages_a_tile + page) * _PAGE + _place(row))
        target.store(load_if(Boolean(True), source, 1)[0])


def _key_of_slot(slot: Int32, num_keys: Int32, order: Pointer) -> Int32:
    return when(slot < num_keys, work.int_at(order, cutlass.min(slot, num_keys - 1)), slot)


def _place(row: Int32) -> Int32:
    """Of a row's four scale factors in a page."""
    return row % 32 * 4 + row // 32
