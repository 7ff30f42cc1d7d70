"""Value to MXFP4 with the keys along the row, and to the E4M3 copy with the channels, which the backward reads.

A thread has 32 keys of two channels, so that its blocks need no exchange between threads.
"""

import cutlass
import cutlass.cute as cute
from cutlass.cute.arch import block_idx, thread_idx
from cutlass.experimental import primitives
from kernels import mxfp4, scale_pages, shared, tile
from kernels.e2m1 import codes_of_pair, pack_codes
from kernels.words import (
    MAGNITUDES,
    Float32,
    Uint16,
    Uint32,
    bytes_of,
    high_value,
    larger_of_pairs,
    low_value,
    product_of_pairs,
    to_e4m3,
    view,
    when,
    words_at,
)

Int32, Int64, Pointer, Constexpr = cutlass.Int32, cutlass.Int64, cutlass.Pointer, cutlass.Constexpr

_BLOCK = 32
_BLOCKS = tile.ROWS // _BLOCK
_CODE_WORDS = tile.ROWS // 8
_PITCH = _CODE_WORDS + 4  # keeps the rows that a warp writes at once out of one another's banks


@cute.jit
def _largest_of_tile(largest: Uint32, channels_per_scale: Int32) -> Uint32:
    """Makes the maxima of the 32 channels of neighbouring threads one, where channels share a scale."""
    if channels_per_scale != 1:
        for distance in cutlass.range_constexpr(4):
            largest = larger_of_pairs(largest, cute.arch.shuffle_sync_bfly(largest, offset=1 << distance))
        largest = larger_of_pairs(largest, bytes_of(largest, largest, 0x1032))
    return largest


@cute.jit
def _keys_of_block(
    first_slot: Int32, num_keys: Int32, limit: Int32, batch: Int32, segments: Pointer, order: Pointer
) -> tuple[Int32, Uint32]:
    """The key in the slot of each lane, and a word with a bit for every lane whose key counts."""
    key = first_slot + cute.arch.lane_idx()
    if order.toint() != 0:
        if key < num_keys:
            key = (order + key).load()
    return key, cute.arch.vote_ballot_sync(tile.counts(key, limit, num_keys, batch, segments))


def _quantize_channel(pairs: list[Uint32], byte: Uint32) -> list[Uint32]:
    """Packed codes of 32 keys of a channel."""
    inverse = mxfp4.inverse_of(byte)
    inverse = inverse | inverse << 16
    thresholds = [Uint32(bits) for bits in mxfp4.THRESHOLDS]
    codes = [codes_of_pair(product_of_pairs(pair, inverse), thresholds) for pair in pairs]
    words = [pack_codes(codes[start : start + 4]) for start in range(0, len(codes), 4)]
    filled = when(byte == mxfp4.NAN_BYTE, Uint32(0x77777777), Uint32(0))
    special = (byte == mxfp4.NAN_BYTE) | (byte == 0)
    return [when(special, filled, word) for word in words]


@cute.kernel
def quantize_value_mxfp4(
    source: Pointer,
    codes: Pointer,
    pages: Pointer,
    published_rows: Pointer,
    lengths: Pointer,
    segments: Pointer,
    order: Pointer,
    num_rows: Int32,
    num_heads: Int32,
    channels_per_scale: Int32,
    round_up_at: Int32,
    odd_weight: Int32,
    row_multiplier: Float32,
    head_size: Constexpr,
    with_rows: Constexpr,
) -> None:
    """Quantises a tile.

    Args:
      source: bfloat16 [B, num_rows, num_heads, head_size].
      codes: uint8 [B, num_heads, head_size, 64 tiles].
      pages: uint8 [B, num_heads, 1, tiles, 512].
      published_rows: uint8 [B, num_heads, 128 tiles, head_size], if ``with_rows``; in the order of the sequence.
      lengths: int32 [B] or null.
      segments: int32 [B, num_rows] or null.
      order: int32 [num_rows], the key in each slot, or null for the order of the sequence.
      num_rows: Keys of the source.
      num_heads: Heads.
      channels_per_scale: 1 or 32.
      round_up_at: See :func:`kernels.mxfp4.byte_of`.
      odd_weight: Likewise.
      row_multiplier: Factor of the rows.
      head_size: 64 or 128.
      with_rows: Whether to write the rows.
    """
    head, key_tile, batch = block_idx()
    thread, _, _ = thread_idx()
    channel, block = thread % (head_size // 2) * 2, thread // (head_size // 2)
    tiles = (num_rows + tile.ROWS - 1) // tile.ROWS
    head_index = Int64(batch) * num_heads + head
    source, codes, pages = (view(pointer, Uint32) for pointer in (source, codes, pages))
    published_rows = view(published_rows, Uint16)
    lengths, segments, order = (view(pointer, Int32) for pointer in (lengths, segments, order))
    page = scale_pages.allocate(_BLOCKS)
    staged = shared.words(head_size * _PITCH)

    limit = tile.rows_that_count(num_rows, batch, lengths)
    first_slot = key_tile * tile.ROWS + block * _BLOCK
    keys, valid = _keys_of_block(first_slot, num_rows, limit, batch, segments, order)
    keys = [cute.arch.shuffle_sync(keys, i) for i in range(_BLOCK)]
    first_word = (Int64(batch) * num_rows * num_heads + head) * (head_size // 2) + channel // 2
    row_words = num_heads * (head_size // 2)
    rows = [
        tile.word(source, (valid & Uint32(1 << i)) != 0, first_word + Int64(keys[i]) * row_words) for i in range(_BLOCK)
    ]
    for i in cutlass.range_constexpr(_BLOCK):
        if cutlass.const_expr(with_rows):
            row = rows[i]
            published = to_e4m3(low_value(row) * row_multiplier, high_value(row) * row_multiplier)
            place = (head_index * tiles * tile.ROWS + keys[i]) * (head_size // 2) + channel // 2
            (published_rows + place).store(Uint16(published))

    largest = rows[0] & MAGNITUDES
    for row in rows[1:]:
        largest = larger_of_pairs(largest, row & MAGNITUDES)
    largest = _largest_of_tile(largest, channels_per_scale)
    for which, selector in enumerate((0x5410, 0x7632)):
        byte = mxfp4.byte_of(largest >> (16 * which) & 0xFFFF, round_up_at, odd_weight)
        pairs = [bytes_of(rows[i], rows[i + 1], selector) for i in range(0, _BLOCK, 2)]
        words = cutlass.Vector.from_elements(_quantize_channel(pairs, byte), Uint32)
        view(staged.data_ptr((channel + which) * _PITCH + block * 4), Uint32).store(words, alignment=16)
        scale_pages.put(page, channel + which, block, byte)
        if cutlass.const_expr(head_size < tile.ROWS):
            scale_pages.put(page, channel + which + head_size, block, Uint32(0))
    primitives.barrier_cta_sync(0)

    scale_pages.copy(page, pages, head_index * tiles + key_tile, _BLOCKS)
    threads = 2 * head_size
    for step in cutlass.range_constexpr(head_size * 4 // threads):
        index = step * threads + thread
        row, part = index // 4, index % 4
        place = (head_index * head_size + row) * (tiles * _CODE_WORDS) + key_tile * _CODE_WORDS + part * 4
        (codes + place).store(words_at(staged, row * _PITCH + part * 4, 4), alignment=16)
