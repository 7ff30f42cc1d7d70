"""Query or key to NVFP4, and to the transposed E4M3 copy that the backward reads."""

import cutlass
import cutlass.cute as cute
from cutlass.cute.arch import block_idx, thread_idx
from cutlass.experimental import primitives
from kernels import nvfp4, publication, scale_pages, tile, transpose
from kernels.publication import BLOCK, ROWS_A_THREAD
from kernels.words import Float32, Uint32, from_e4m3, low_value, to_e4m3, view

Int32, Int64, Pointer, Constexpr = cutlass.Int32, cutlass.Int64, cutlass.Pointer, cutlass.Constexpr


@cute.kernel
def quantize_rows(
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
    """Quantises a tile.

    Args:
      source: bfloat16 [B, num_rows, num_heads, head_size].
      codes: uint8 [B, num_heads, code_rows, head_size / 2].
      pages: uint8 [B, num_heads, tiles, head_size / 64, 512].
      columns: uint8 [B, num_heads, head_size, 128 tiles], if ``with_columns``.
      lengths: int32 [B] or null.
      segments: int32 [B, num_rows] or null.
      num_rows: Rows of the source.
      num_heads: Heads.
      code_rows: Rows of the codes.
      ties_toward_zero: Whether codes at midpoints take the smaller magnitude instead of the even code.
      multiplier: Factor of the E4M3 copy.
      head_size: 64 or 128.
      with_columns: Whether to write the E4M3 copy.
    """
    head, row_tile, batch = block_idx()
    thread, _, _ = thread_idx()
    blocks = head_size // BLOCK
    four_rows, block = thread // blocks, thread % blocks
    first_row = row_tile * tile.ROWS + four_rows * ROWS_A_THREAD
    head_index = Int64(batch) * num_heads + head
    source, codes, pages, columns = (view(pointer, Uint32) for pointer in (source, codes, pages, columns))
    page = scale_pages.allocate(blocks)

    first_channels = [block * BLOCK]
    rows = tile.load_rows(
        source, lengths, segments, num_rows, num_heads, first_row, ROWS_A_THREAD, first_channels, head_size
    )

    for i in cutlass.range_constexpr(ROWS_A_THREAD):
        scale = nvfp4.scale_of(low_value(nvfp4.largest_magnitude(rows[i])))
        words = nvfp4.quantize_block(rows[i], scale, nvfp4.thresholds_of(from_e4m3(scale), ties_toward_zero))
        scale_pages.put(page, four_rows * ROWS_A_THREAD + i, block, scale)
        tile.store_codes(codes, words, first_row + i, code_rows, num_heads, block, head_size)

    if cutlass.const_expr(with_columns):
        turned = transpose.allocate(head_size)
        factor = publication.pair_multiplier(multiplier)
        encoded = [publication.encode_row(row, factor, to_e4m3) for row in rows]
        publication.put_columns(turned, four_rows, block, encoded)
    primitives.barrier_cta_sync(0)

    row_tiles = (code_rows + tile.ROWS - 1) // tile.ROWS
    tile_index = head_index * row_tiles + row_tile
    scale_pages.copy(page, pages, tile_index, blocks)
    if cutlass.const_expr(with_columns):
        transpose.copy(turned, columns, head_index, row_tiles, head_size)
