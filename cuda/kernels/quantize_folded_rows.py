"""Query or key of 128 channels to NVFP4 with scales that the halves of a row share (K64 fold), and to the E4M3 copy.

A thread has the blocks i and i + 4 of two consecutive rows.
"""

import cutlass
import cutlass.cute as cute
from cutlass.cute.arch import block_idx, thread_idx
from cutlass.experimental import primitives
from kernels import folded_scale, half_quotients, nvfp4, publication, scale_pages, tile, transpose
from kernels.publication import BLOCK
from kernels.words import Float32, Uint32, from_e4m3, to_e4m3, view, when

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
    exchange = folded_scale.allocate(2 * head_size)
    half_step = half_quotients.half_step_of(num_rows)

    first_channels = [(block + half * _SHARED) * BLOCK for half in range(_HALVES)]
    rows = tile.load_rows(
        source, lengths, segments, num_rows, num_heads, first_row, _ROWS_A_THREAD, first_channels, head_size
    )

    for i in cutlass.range_constexpr(_ROWS_A_THREAD):
        largest = nvfp4.largest_magnitude(rows[i])
        unit = half_quotients.unit_of(largest)
        magnitudes = half_quotients.in_units(rows[i], unit)
        scale = folded_scale.best_scale(rows[i], magnitudes, unit, largest, half_step, exchange)
        words = _codes(rows[i], magnitudes, scale, unit, half_step, ties_toward_zero)
        for half in cutlass.range_constexpr(_HALVES):
            of_half = block + half * _SHARED
            scale_pages.put(page, two_rows * _ROWS_A_THREAD + i, of_half, scale)
            tile.store_codes(
                codes, words[2 * half : 2 * half + 2], first_row + i, code_rows, num_heads, of_half, head_size
            )

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


@cute.jit
def _codes(
    pairs: list[Uint32],
    magnitudes: list[Uint32],
    scale: Uint32,
    unit: Uint32,
    half_step: Uint32,
    ties_toward_zero: Int32,
) -> list[Uint32]:
    """Packed codes of both blocks, eight a word."""
    factor = when(ties_toward_zero != 0, Float32(1.0), Float32(half_quotients.UP_ON_TIE))
    inverse = half_quotients.inverse_of(from_e4m3(scale), unit, factor)
    words = [Uint32(0) for _ in range(len(pairs) // 4)]
    if ties_toward_zero != 0:
        words = _words(pairs, magnitudes, inverse, half_step, ties_toward_zero=True)
    else:
        words = _words(pairs, magnitudes, inverse, half_step, ties_toward_zero=False)
    return [nvfp4.codes_or_marks(word, scale) for word in words]


def _words(
    pairs: list[Uint32], magnitudes: list[Uint32], inverse: Uint32, half_step: Uint32, ties_toward_zero: bool
) -> list[Uint32]:
    return [
        half_quotients.codes_of_pairs(pairs[i : i + 4], magnitudes[i : i + 4], inverse, half_step, ties_toward_zero)
        for i in range(0, len(pairs), 4)
    ]
