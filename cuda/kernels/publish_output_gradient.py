"""The output gradient to E5M2 in both orientations, and the row statistic of the backward from the rounded values."""

import cutlass
import cutlass.cute as cute
from cutlass.cute.arch import block_idx, thread_idx
from cutlass.experimental import primitives
from kernels import publication, tile, transpose
from kernels.publication import BLOCK, ROWS_A_THREAD
from kernels.words import Float32, Uint32, as_float, from_e5m2, high_value, low_value, to_e5m2, view, when

Int32, Int64, Pointer, Constexpr = cutlass.Int32, cutlass.Int64, cutlass.Pointer, cutlass.Constexpr

_INFINITY = 0x7F800000


def _sum_of_neighbours(terms: list[Float32]) -> Float32:
    while len(terms) > 1:
        terms = [terms[i] + terms[i + 1] for i in range(0, len(terms), 2)]
    return terms[0]


def _dot(output: list[Uint32], gradient: list[Uint32], blocks: int) -> Float32:
    """Sum over the channels of a row, held by ``blocks`` neighbouring threads, in the order of the reference."""
    products = []
    for pair, published in zip(output, gradient, strict=True):
        low, high = from_e5m2(published)
        products += [low_value(pair) * low, high_value(pair) * high]
    total = _sum_of_neighbours(products)
    distance = 1
    while distance < blocks:
        total = total + cute.arch.shuffle_sync_bfly(total, offset=distance)
        distance *= 2
    return total


@cute.kernel
def publish_output_gradient(
    output: Pointer,
    output_gradient: Pointer,
    lse: Pointer,
    lse_gradient: Pointer,
    gradient_scale: Pointer,
    published_rows: Pointer,
    columns: Pointer,
    row_statistic: Pointer,
    num_rows: Int32,
    num_heads: Int32,
    heads_a_group: Int32,
    multiplier: Float32,
    head_size: Constexpr,
) -> None:
    """Publishes a tile.

    Args:
      output: bfloat16 [B, num_rows, num_heads, head_size].
      output_gradient: bfloat16 of the same shape.
      lse: float32 [B, num_heads, num_rows].
      lse_gradient: float32 [B, num_heads, num_rows].
      gradient_scale: float32 [B, num_heads / heads_a_group].
      published_rows: uint8 [B, num_heads, 128 tiles, head_size].
      columns: uint8 [B, num_heads, head_size, 128 tiles].
      row_statistic: float32 [B, num_heads, num_rows].
      num_rows: Rows.
      num_heads: Query heads.
      heads_a_group: Query heads of a key/value head.
      multiplier: Factor of the published gradient, a power of two.
      head_size: 64 or 128.
    """
    head, row_tile, batch = block_idx()
    thread, _, _ = thread_idx()
    blocks = head_size // BLOCK
    four_rows, block = thread // blocks, thread % blocks
    first_row = row_tile * tile.ROWS + four_rows * ROWS_A_THREAD
    row_tiles = (num_rows + tile.ROWS - 1) // tile.ROWS
    head_index = Int64(batch) * num_heads + head
    output, output_gradient, published_rows, columns = (
        view(pointer, Uint32) for pointer in (output, output_gradient, published_rows, columns)
    )
    lse, lse_gradient, gradient_scale, row_statistic = (
        view(pointer, Float32) for pointer in (lse, lse_gradient, gradient_scale, row_statistic)
    )
    turned = transpose.allocate(head_size)

    group = Int64(batch) * (num_heads // heads_a_group) + head // heads_a_group
    scale = (gradient_scale + group).load()
    encoded = []
    for i in cutlass.range_constexpr(ROWS_A_THREAD):
        row = first_row + i
        in_rows = row < num_rows
        of_row = head_index * num_rows + row
        lse_bits, d_lse_bits = tile.word(lse, in_rows, of_row), tile.word(lse_gradient, in_rows, of_row)
        contributes = in_rows & ((lse_bits & 0x7FFFFFFF) != _INFINITY)
        gradient, out = (
            tile.load_row(array, contributes, row, num_rows, num_heads, [block * BLOCK], head_size)
            for array in (output_gradient, output)
        )
        published = publication.encode_row(gradient, publication.pair_multiplier(multiplier * scale), to_e5m2)
        encoded.append(published)
        padded_row = head_index * row_tiles * tile.ROWS + row
        publication.store_row(published_rows + (padded_row * (head_size // 4) + block * (BLOCK // 4)), published)
        dot = _dot(out, published, blocks)
        d_lse = when(contributes, as_float(d_lse_bits), Float32(0.0))
        if (block == 0) & in_rows:
            (row_statistic + of_row).store((multiplier * multiplier * scale) * d_lse - multiplier * dot)
    publication.put_columns(turned, four_rows, block, encoded)
    primitives.barrier_cta_sync(0)
    transpose.copy(turned, columns, head_index, row_tiles, head_size)
