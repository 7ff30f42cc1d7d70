"""Query or key of 128 channels to NVFP4 with scales that the halves of a row share (K64 fold), and to the E4M3 copy.

A thread has the blocks i and i + 4 of two consecutive rows.
"""

import cutlass
import cutlass.cute as cute
from cutlass.cute.arch import block_idx, thread_idx
from cutlass.experimental import primitives
from kernels import folded_scale, nvfp4, publication, scale_pages, tile, transpose
from kernels.publication import BLOCK
from kernels.words import Float32, Uint32, from_e4m3, to_e4m3, view

Int32, Int64, Pointer, Constexpr = cutlass.Int32, cutlass.Int64, cutlass.Pointer, cutlass.Constexpr

_ROWS_A_THREAD = 2
_HALVES = 2
_SHARED = 4


@cute.kernel
def quantize_folded_rows(
    source: Pointer,
    codes: Pointer,
    pages: Pointer,
    columns: Pointer,
    lengths: Pointer,
    segments: Pointer,
    num_rows: Int32,
    num_heads: Int32,
    code_rows: Int32,
    ties_toward_zero: Int32,
    multiplier: Float32,
    head_size: Constexpr,
    with_columns: Constexpr,
) -> None:
    """Quantises a tile; arguments as those of :func:`kernels.quantize_rows.quantize_rows`."""
    head, row_tile, batch = block_idx()
    thread, _, _ = thread_idx()
    blocks = head_size // BLOCK
    two_rows, block = thread // _SHARED, thread % _SHARED
    first_row = row_tile * tile.ROWS + two_rows * _ROWS_A_THREAD
    head_index = Int64(batch) * num_heads + head
    source, codes, pages, columns = (view(pointer, Uint32) for pointer in (source, codes, pages, columns))
    page = scale_pages.allocate(blocks)

    first_channels = [(block + half * _SHARED) * BLOCK for half in range(_HALVES)]
    rows = tile.load_rows(
        source, lengths, segments, num_rows, num_heads, first_row, _ROWS_A_THREAD, first_channels, head_size
    )

    for i in cutlass.range_constexpr(_ROWS_A_THREAD):
        scale = folded_scale.best_scale(rows[i], nvfp4.largest_magnitude(rows[i]))
        thresholds = nvfp4.thresholds_of(from_e4m3(scale), ties_toward_zero)
        for half in cutlass.range_constexpr(_HALVES):
            words = nvfp4.quantize_block(rows[i][8 * half : 8 * half + 8], scale, thresholds)
            of_half = block + half * _SHARED
            scale_pages.put(page, two_rows * _ROWS_A_THREAD + i, of_half, scale)
            tile.store_codes(codes, words, first_row + i, code_rows, num_heads, of_half, head_size)

    if cutlass.const_expr(with_columns):
        turned = transpose.allocate(head_size)
        factor = publication.pair_multiplier(multiplier)
        for half in cutlass.range_constexpr(_HALVES):
            encoded = [publication.encode_row(row[8 * half : 8 * half + 8], factor, to_e4m3) for row in rows]
            publication.put_columns_of_two_rows(turned, two_rows, block + half * _SHARED, encoded)
    primitives.barrier_cta_sync(0)

    row_tiles = (code_rows + tile.ROWS - 1) // tile.ROWS
    tile_index = head_index * row_tiles + row_tile
    scale_pages.copy(page, pages, tile_index, blocks)
    if cutlass.const_expr(with_columns):
        transpose.copy(turned, columns, head_index, row_tiles, head_size)
