"""Key from NVFP4 to float16, in an order of rows that a first product wants."""

import cutlass
import cutlass.cute as cute
from cutlass.cute.arch import block_idx, thread_idx
from kernels import tile
from kernels.hopper.key_order import key_of_row, key_of_row_by_block
from kernels.hopper.nvfp4_values import factor_of, values_of_word
from kernels.words import Uint32, load_if, view

Int32, Int64, Pointer, Constexpr = cutlass.Int32, cutlass.Int64, cutlass.Pointer, cutlass.Constexpr

_CHANNELS = 8  # of a word of codes; a block has two


@cute.jit
def _key_of_slot(slot: Int32, num_keys: Int32, order: Pointer) -> Int32:
    key = slot
    if order.toint() != 0:
        if slot < num_keys:
            key = (order + slot).load()
    return key


def _expand_word(
    codes: Pointer,
    pages: Pointer,
    values: Pointer,
    head: Int64,
    key: Int32,
    row: Int64,
    word: Int32,
    tiles: Int32,
    head_size: int,
) -> None:
    (loaded,) = load_if(
        cutlass.Boolean(True), codes + ((head * tiles * tile.ROWS + key) * (head_size // _CHANNELS) + word), 1
    )
    block = word // 2
    page = (head * tiles + key // tile.ROWS) * (head_size // 64) + block // 4
    place = page * 128 + key % 32 * 4 + key % tile.ROWS // 32
    scales = load_if(cutlass.Boolean(True), pages + place, 1)[0]
    pairs = values_of_word(loaded, factor_of(scales >> (block % 4 * 8) & 0xFF))
    target = values + ((head * tiles * tile.ROWS + row) * (head_size // 2) + word * 4)
    target.store(cutlass.Vector.from_elements(pairs, Uint32), alignment=16)


@cute.kernel
def expand_key(
    codes: Pointer,
    pages: Pointer,
    order: Pointer,
    values: Pointer,
    counter: Pointer,
    num_keys: Int32,
    num_heads: Int32,
    head_size: Constexpr,
    by_block: Constexpr,
) -> None:
    """Expands a tile.

    Args:
      codes: uint8 [B, num_heads, 128 tiles, head_size / 2].
      pages: uint8 [B, num_heads, tiles, head_size / 64, 512].
      order: int32 [num_keys], the key in each slot, or null.
      values: float16 [B, num_heads, 128 tiles, head_size]; row p of a tile is of slot ``key_of_row(p)``, or
        ``key_of_row_by_block(p)``.
      counter: int32 [], cleared for the kernel that reads the values, or null.
      num_keys: Keys.
      num_heads: Heads.
      head_size: 64 or 128.
      by_block: In which order rows are.
    """
    slot_of_row = key_of_row_by_block if by_block else key_of_row
    head_index, key_tile, batch = block_idx()
    thread, _, _ = thread_idx()
    tiles = (num_keys + tile.ROWS - 1) // tile.ROWS
    head = Int64(batch) * num_heads + head_index
    codes, pages, values = (view(pointer, Uint32) for pointer in (codes, pages, values))
    order = view(order, Int32)
    if counter.toint() != 0:
        if (thread == 0) & (head_index == 0) & (key_tile == 0) & (batch == 0):
            view(counter, Int32).store(Int32(0))
    words = head_size // _CHANNELS
    threads = 2 * head_size
    # A warp writes without gaps: a thread has only as many channels as it can store at once.
    for step in cutlass.range_constexpr(tile.ROWS * words // threads):
        index = step * threads + thread
        row, word = index // words, index % words
        key = _key_of_slot(key_tile * tile.ROWS + slot_of_row(row), num_keys, order)
        _expand_word(codes, pages, values, head, key, Int64(key_tile * tile.ROWS + row), word, tiles, head_size)
