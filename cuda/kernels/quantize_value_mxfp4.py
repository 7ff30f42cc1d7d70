"""Value to MXFP4 with the keys along the row, and to the E4M3 copy with the channels, which the backward reads.

A thread has 32 keys of two channels, so that its blocks need no exchange between threads.
"""

import cutlass
import cutlass.cute as cute
from cutlass.cute.arch import block_idx, thread_idx
from cutlass.experimental import primitives
from kernels import mxfp4, publication, scale_pages, shared, tile
from kernels.e2m1 import codes_of_pairs
from kernels.words import (
    MAGNITUDES,
    Float32,
    Uint16,
    Uint32,
    bytes_of,
    larger_of_pairs,
    load_if,
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
def _key_of_slot(slot: Int32, num_keys: Int32, order: Pointer, ordered: Constexpr) -> Int32:
    key = slot
    if cutlass.const_expr(ordered):
        if slot < num_keys:
            key = (order + slot).load()
    return key


def _rows_of_block(start: Pointer, key: Int32, first_slot: Int32, row_size: Int32, ordered: bool) -> list[Pointer]:
    """Places of the rows of a block's keys.

    Args:
      start: Place of the row of key 0.
      key: The key in the slot of this lane.
      first_slot: Of the block.
      row_size: Distance of rows.
      ordered: Whether keys are not in the order of the slots.
    """
    if ordered:
        return [start + Int64(cute.arch.shuffle_sync(key, i)) * row_size for i in range(_BLOCK)]
    first = start + Int64(first_slot) * row_size
    return [first + i * row_size for i in range(_BLOCK)]


def _quantize_channel(pairs: list[Uint32], byte: Uint32) -> list[Uint32]:
    """Packed codes of 32 keys of a channel."""
    inverse = mxfp4.inverse_of(byte)
    inverse = inverse | inverse << 16
    thresholds = [Uint32(bits) for bits in mxfp4.THRESHOLDS]
    scaled = [product_of_pairs(pair, inverse) for pair in pairs]
    words = [codes_of_pairs(scaled[start : start + 4], thresholds) for start in range(0, len(scaled), 4)]
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
    ordered: Constexpr,
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
      order: int32 [num_rows], the key in each slot, if ``ordered``.
      num_rows: Keys of the source.
      num_heads: Heads.
      channels_per_scale: 1 or 32.
      round_up_at: See :func:`kernels.mxfp4.byte_of`.
      odd_weight: Likewise.
      row_multiplier: Factor of the rows.
      head_size: 64 or 128.
      ordered: Whether the slots have an order of their own.
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
    key = _key_of_slot(first_slot + cute.arch.lane_idx(), num_rows, order, ordered)
    valid = cute.arch.vote_ballot_sync(tile.counts(key, limit, num_rows, batch, segments))
    start = source + ((Int64(batch) * num_rows * num_heads + head) * (head_size // 2) + channel // 2)
    places = _rows_of_block(start, key, first_slot, num_heads * (head_size // 2), ordered)
    rows = [load_if((valid & Uint32(1 << i)) != 0, place, 1)[0] for i, place in enumerate(places)]
    if cutlass.const_expr(with_rows):
        factor = publication.pair_multiplier(row_multiplier)
        start = published_rows + (head_index * (tiles * tile.ROWS) * (head_size // 2) + channel // 2)
        places = _rows_of_block(start, key, first_slot, Int32(head_size // 2), ordered)
        for i in cutlass.range_constexpr(_BLOCK):
            places[i].store(Uint16(publication.encode_pair(rows[i], factor, to_e4m3)))

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
