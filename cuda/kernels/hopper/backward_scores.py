"""P and the gradient of the scores, as bytes for the gradient products.

A thread has four consecutive columns of each 16, in two rows; a word is four columns of a row.
"""

import cutlass
import cutlass.cute as cute
from cutlass.cute.arch import lane_idx
from cutlass.experimental import primitives
from kernels.hopper import backward_keys, backward_queries
from kernels.hopper.backward_queries import GROUPS, QUERIES
from kernels.hopper.key_order import accumulators_of_group
from kernels.instructions import exp2, four_e4m3, fused, halves_of_e4m3, smaller_or_nan, values_of_halves
from kernels.words import Float32, Uint8, Uint32, bytes_of, view

Int32, Pointer = cutlass.Int32, cutlass.Pointer

_ROW_BYTES = 128  # of the 128 keys of a query
_CHUNK = 16


def of_columns(statistics: Pointer) -> list[Float32]:
    """A number of its column for each accumulator.

    Args:
      statistics: float32 [64], in shared memory.
    """
    values = [Float32(0.0)] * (2 * 4 * GROUPS)
    for group in range(GROUPS):
        four = (statistics + (group * 16 + lane_idx() % 4 * 4)).load(count=4, alignment=16)
        for row in (0, 1):
            for i, index in enumerate(accumulators_of_group(group, row)):
                values[index] = four[i]
    return values


def of_rows(two: list[Float32]) -> list[Float32]:
    """A number of its row for each accumulator."""
    return [two[index // 2 % 2] for index in range(2 * 4 * GROUPS)]


def probabilities(scores: list[Float32], offsets: list[Float32], log2_scale: Float32, lift: Float32) -> list[Float32]:
    """Lifted probabilities.

    Args:
      scores: Raw scores.
      offsets: What is added to the base-2 log scores; minus infinity where P is zero.
      log2_scale: From a raw score to a base-2 log score.
      lift: Octaves by which P is lifted, and what its logarithm does not exceed.
    """
    logs = [fused(score, log2_scale, offset) for score, offset in zip(scores, offsets, strict=True)]
    return [exp2(smaller_or_nan(log, lift)) for log in logs]


def score_gradients(
    gradients: list[Float32], statistics: list[Float32], p: list[Uint32], factor: Float32
) -> list[Float32]:
    """Gradients of the scores before rounding.

    Args:
      gradients: Of P.
      statistics: Row statistics of the queries, times the factor.
      p: P, from :func:`as_bytes`.
      factor: Softmax scale without the factors of the gradients' operands.
    """
    values = list(gradients)
    for place, word in enumerate(p):
        group, row = place // 2, place % 2
        rounded = [value for pair in (word, word >> 16) for value in values_of_halves(halves_of_e4m3(pair))]
        for i, index in enumerate(accumulators_of_group(group, row)):
            values[index] = fused(gradients[index], factor, statistics[index]) * rounded[i]
    return values


@cute.jit
def masked(values: list[Float32], seen: backward_queries.View | backward_keys.View, tile: Int32) -> list[Float32]:
    """Zero where a query does not see a key.

    Args:
      values: In the order of accumulators.
      seen: What rows are seen by, or see.
      tile: Of columns.
    """
    if seen.is_general():
        values = seen.mask_general(values, tile)
    elif seen.is_partial(tile):
        values = seen.mask_interval(values, tile)
    return values


def as_bytes(values: list[Float32]) -> list[Uint32]:
    """Rounded to E4M3, as the A operand of a gradient product: for each 16 columns a word of either row."""
    return [
        four_e4m3(*(values[i] for i in accumulators_of_group(group, row))) for group in range(GROUPS) for row in (0, 1)
    ]


def store_by_query(target: Pointer, words: list[Uint32], warp: Int32) -> None:
    """Writes [64 queries, 128 keys] bytes with chunks permuted for a product; a barrier must follow.

    The 16 keys of a warp are one chunk of a query's row. As 16-bit elements that are the two keys of a thread, words
    of two queries are the fragments that ``stmatrix`` transposes.

    Args:
      target: Shared memory, at a multiple of 1024.
      words: From :func:`as_bytes`.
      warp: Of the eight that have 16 keys each.
    """
    lane = lane_idx()
    matrix, row = lane // 8, lane % 8
    query = matrix // 2 * 16 + row // 2 * 4 + matrix % 2 * 2 + row % 2
    place = query * _ROW_BYTES + (warp ^ query % 8) * _CHUNK
    for step in range(GROUPS // 2):
        four = words[4 * step : 4 * step + 4]
        fragments = [bytes_of(*four[i : i + 2], selector) for i in (0, 2) for selector in (0x5140, 0x7362)]
        rows = target + (place + step * (32 * _ROW_BYTES))
        primitives.stmatrix(view(rows, Uint8), fragments, "col")
    cute.arch.fence_view_async_shared()


def clear(target: Pointer, thread: Int32) -> None:
    """Zeros in place of :func:`store_by_query`, by 256 threads; a barrier must follow."""
    zeros = cutlass.Vector.from_elements([Uint32(0)] * 4, Uint32)
    for start in range(0, QUERIES * _ROW_BYTES, 256 * _CHUNK):
        view(target + (start + thread * _CHUNK), Uint32).store(zeros, alignment=16)
    cute.arch.fence_view_async_shared()
