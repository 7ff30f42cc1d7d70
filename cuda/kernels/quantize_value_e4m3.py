"""Value to E4M3, with the keys along the row for the PV product and with the channels for the backward."""

import cutlass
import cutlass.cute as cute
from cutlass.cute.arch import block_idx, thread_idx
from cutlass.experimental import primitives
from kernels import publication, tile, transpose
from kernels.publication import BLOCK, ROWS_A_THREAD
from kernels.words import Float32, Uint32, to_e4m3, view

Int32, Int64, Pointer, Constexpr = cutlass.Int32, cutlass.Int64, cutlass.Pointer, cutlass.Constexpr


@cute.kernel
def quantize_value_e4m3(
    source: Pointer,
    columns: Pointer,
    published_rows: Pointer,
    lengths: Pointer,
    segments: Pointer,
    num_rows: Int32,
    num_heads: Int32,
    multiplier: Float32,
    row_multiplier: Float32,
    head_size: Constexpr,
    with_rows: Constexpr,
) -> None:
    """Quantises a tile.

    Args:
      source: bfloat16 [B, num_rows, num_heads, head_size].
      columns: uint8 [B, num_heads, head_size, 128 tiles].
      published_rows: uint8 [B, num_heads, 128 tiles, head_size], if ``with_rows``.
      lengths: int32 [B] or null.
      segments: int32 [B, num_rows] or null.
      num_rows: Rows of the source.
      num_heads: Heads.
      multiplier: Factor of the columns.
      row_multiplier: Factor of the rows.
      head_size: 64 or 128.
      with_rows: Whether to write the rows.
    """
    head, row_tile, batch = block_idx()
    thread, _, _ = thread_idx()
    blocks = head_size // BLOCK
    four_rows, block = thread // blocks, thread % blocks
    first_row = row_tile * tile.ROWS + four_rows * ROWS_A_THREAD
    row_tiles = (num_rows + tile.ROWS - 1) // tile.ROWS
    head_index = Int64(batch) * num_heads + head
    source, columns, published_rows = (view(pointer, Uint32) for pointer in (source, columns, published_rows))
    turned = transpose.allocate(head_size)

    first_channels = [block * BLOCK]
    rows = tile.load_rows(
        source, lengths, segments, num_rows, num_heads, first_row, ROWS_A_THREAD, first_channels, head_size
    )

    if cutlass.const_expr(with_rows):
        factor = publication.pair_multiplier(row_multiplier)
        for i in cutlass.range_constexpr(ROWS_A_THREAD):
            place = (head_index * row_tiles * tile.ROWS + first_row + i) * (head_size // 4) + block * (BLOCK // 4)
            publication.store_row(published_rows + place, publication.encode_row(rows[i], factor, to_e4m3))
    factor = publication.pair_multiplier(multiplier)
    encoded = [publication.encode_row(row, factor, to_e4m3) for row in rows]
    publication.put_columns(turned, four_rows, block, encoded)
    primitives.barrier_cta_sync(0)
    transpose.copy(turned, columns, head_index, row_tiles, head_size)
