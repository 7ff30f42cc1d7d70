"""What the backward wants of query rows and no other step makes: float16 values, statistics, and a cleared gradient."""

import cutlass
import cutlass.cute as cute
from cutlass.cute.arch import block_idx, thread_idx
from kernels import tile
from kernels.hopper.backward_queries import QUERIES
from kernels.hopper.key_order import key_of_row
from kernels.hopper.nvfp4_values import factor_of, values_of_word
from kernels.words import Float32, Uint32, as_float, load_if, view, when

Int32, Int64, Boolean, Pointer, Constexpr = (
    cutlass.Int32,
    cutlass.Int64,
    cutlass.Boolean,
    cutlass.Pointer,
    cutlass.Constexpr,
)

_CHANNELS = 8  # of a word of codes; a block has two
_LOG2_E = 1.4426950408889634
_INFINITY = 0x7F800000


def contributes(lse: Pointer, there: Boolean, index: Int64) -> Boolean:
    """Whether a row has a finite denominator, hence a gradient.

    Args:
      lse: float32 array, as words.
      there: Whether there is such a row.
      index: Of the row.
    """
    return there & ((load_if(there, lse + index, 1)[0] & 0x7FFFFFFF) != _INFINITY)


def _expand_word(
    codes: Pointer,
    pages: Pointer,
    there: Boolean,
    row: Int64,
    page_row: Int32,
    page: Int64,
    word: Int32,
    head_size: int,
) -> list[Uint32]:
    """Four pairs of float16, zero for a row that does not count."""
    (loaded,) = load_if(there, codes + (row * (head_size // _CHANNELS) + word), 1)
    block = word // 2
    place = (page + block // 4) * 128 + page_row % 32 * 4 + page_row // 32
    scale = load_if(there, pages + place, 1)[0] >> (block % 4 * 8) & 0xFF
    return values_of_word(loaded, factor_of(scale))


@cute.jit
def _store_statistics(
    statistics: Pointer,
    lse: Pointer,
    row_statistic: Pointer,
    first_row: Int32,
    head: Int64,
    num_rows: Int32,
    lift: Float32,
    correction: Float32,
    factor: Float32,
) -> None:
    """Both statistics of a row, by the thread of its number."""
    thread, _, _ = thread_idx()
    if thread < tile.ROWS:
        row = first_row + thread
        counts = contributes(lse, row < num_rows, head * num_rows + row)
        logarithm, statistic = (
            as_float(load_if(counts, array + (head * num_rows + row), 1)[0]) for array in (lse, row_statistic)
        )
        offset = when(counts, lift - (logarithm + correction) * Float32(_LOG2_E), Float32(float("-inf")))
        padded_rows = (num_rows + tile.ROWS - 1) // tile.ROWS * tile.ROWS
        target = statistics + (
            head * padded_rows * 2 + (first_row + thread // QUERIES * QUERIES) * 2 + thread % QUERIES
        )
        target.store(offset)
        (target + QUERIES).store(statistic * factor)


@cute.kernel
def backward_prepare(
    query_codes: Pointer,
    query_pages: Pointer,
    lse: Pointer,
    row_statistic: Pointer,
    values: Pointer,
    statistics: Pointer,
    query_sums: Pointer,
    num_rows: Int32,
    num_heads: Int32,
    lift: Float32,
    correction: Float32,
    factor: Float32,
    head_size: Constexpr,
) -> None:
    """Prepares a tile of 128 rows.

    Args:
      query_codes: uint8 [B, N, num_rows, head_size / 2].
      query_pages: uint8 [B, N, tiles, head_size / 64, 512].
      lse: float32 [B, N, num_rows].
      row_statistic: float32 [B, N, num_rows].
      values: float16 [B, N, 128 tiles, head_size]; row p of 16 is of query ``key_of_row(p)``, zero for a row that does
        not contribute.
      statistics: float32 [B, N, 2 tiles, 2, 64]: what is added to the base-2 log scores of a row, minus infinity for
        one that does not contribute, and the row statistic times ``factor``.
      query_sums: float32 [B, N, 128 tiles, head_size], cleared, or null.
      num_rows: Rows of a head.
      num_heads: Heads.
      lift: Octaves by which P is lifted.
      correction: Natural-log units added to the lse.
      factor: Softmax scale without the factors of the gradients' operands.
      head_size: 64 or 128.
    """
    head_index, row_tile, batch = block_idx()
    thread, _, _ = thread_idx()
    tiles = (num_rows + tile.ROWS - 1) // tile.ROWS
    head = Int64(batch) * num_heads + head_index
    codes, pages, lse, values = (view(pointer, Uint32) for pointer in (query_codes, query_pages, lse, values))
    words, threads = head_size // _CHANNELS, 2 * head_size
    padded_row = head * tiles * tile.ROWS + row_tile * tile.ROWS
    page = (head * tiles + row_tile) * (head_size // 64)
    # A warp writes without gaps: a thread has only as many channels as it can store at once.
    for step in cutlass.range_constexpr(tile.ROWS * words // threads):
        index = step * threads + thread
        slot, word = index // words, index % words
        row_of_tile = key_of_row(slot)
        row = row_tile * tile.ROWS + row_of_tile
        counts = contributes(lse, row < num_rows, head * num_rows + row)
        pairs = _expand_word(codes, pages, counts, head * num_rows + row, row_of_tile, page, word, head_size)
        target = values + ((padded_row + slot) * (head_size // 2) + word * 4)
        target.store(cutlass.Vector.from_elements(pairs, Uint32), alignment=16)
    _store_statistics(
        view(statistics, Float32),
        lse,
        view(row_statistic, Uint32),
        row_tile * tile.ROWS,
        head,
        num_rows,
        lift,
        correction,
        factor,
    )
    if query_sums.toint() != 0:
        zeros = cutlass.Vector.from_elements([Uint32(0)] * 4, Uint32)
        sums = view(query_sums, Uint32) + (padded_row * head_size + thread * 4)
        for step in cutlass.range_constexpr(tile.ROWS * head_size // (4 * threads)):
            (sums + step * (4 * threads)).store(zeros, alignment=16)
