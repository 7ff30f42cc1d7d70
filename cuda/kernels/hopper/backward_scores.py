"""P and the gradient of the scores, as bytes for the gradient products.

A thread has four consecutive columns of each 16, in two rows; a word is four columns of a row.
"""

import cutlass
import cutlass.cute as cute
from cutlass.cute.arch import lane_idx
from cutlass.experimental import primitives
from kernels.hopper import backward_keys, backward_queries
from kernels.hopper.backward_queries import GROUPS
from kernels.hopper.key_order import accumulators_of_group
from kernels.instructions import exp2, four_e4m3, fused, halves_of_e4m3, smaller_or_nan, values_of_halves
from kernels.words import Float32, Uint8, Uint32, bytes_of, view, when

Int32, Pointer = cutlass.Int32, cutlass.Pointer
View = backward_queries.View | backward_keys.View
"""What rows are seen by, or see."""

_ROW_BYTES = 128  # of the 128 keys of a query
_CHUNK = 16
_PAIRS = 0x5140, 0x7362  # bytes of the first two queries of two words, and of the last two
_NOTHING, _INTERVAL, _GENERAL = range(3)  # of masks


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


def mask_of(seen: View, tile: Int32) -> Int32:
    """What :func:`masked` has to do in a tile of columns, which is found early, since branches wait for it."""
    return when(seen.is_general(), Int32(_GENERAL), when(seen.is_partial(tile), Int32(_INTERVAL), Int32(_NOTHING)))


@cute.jit
def masked(values: list[Float32], seen: View, tile: Int32, mask: Int32) -> list[Float32]:
    """Zero where a query does not see a key.

    Args:
      values: In the order of accumulators.
      seen: What rows are seen by, or see.
      tile: Of columns.
      mask: From :func:`mask_of`.
    """
    if mask != _NOTHING:
        if mask == _GENERAL:
            values = seen.mask_general(values, tile)
        else:
            values = seen.mask_interval(values, tile)
    return values


def as_bytes(values: list[Float32]) -> list[Uint32]:
    """Rounded to E4M3, as the A operand of a gradient product: for each 16 columns a word of either row."""
    return [
        four_e4m3(*(values[i] for i in accumulators_of_group(group, row))) for group in range(GROUPS) for row in (0, 1)
    ]


def store_by_query(target: Pointer, words: list[Uint32], warp: Int32) -> None:
    """Writes [64 queries, 128 keys] bytes with chunks permuted for a product; a fence must follow.

    The 16 keys of a warp are one chunk of a query's row. As 16-bit elements that are the two keys of a thread, words
    of two queries are the fragments that ``stmatrix`` transposes. The threads of the second half of 16 queries take
    theirs in the other order, so that the eight rows of a matrix lie in different banks.

    Args:
      target: Shared memory, at a multiple of 1024.
      words: From :func:`as_bytes`.
      warp: Of the eight that have 16 keys each.
    """
    lane = lane_idx()
    matrix, row = lane // 8, lane % 8
    query = matrix // 2 * 16 + row // 2 * 4 + (matrix % 2 ^ row // 4) * 2 + row % 2
    place = query * _ROW_BYTES + (warp ^ query % 8) * _CHUNK
    is_first = lane % 4 < 2
    selectors = [when(is_first, Uint32(a), Uint32(b)) for a, b in (_PAIRS, _PAIRS[::-1])]
    for step in range(GROUPS // 2):
        four = words[4 * step : 4 * step + 4]
        fragments = [bytes_of(*four[i : i + 2], selector) for i in (0, 2) for selector in selectors]
        rows = target + (place + step * (32 * _ROW_BYTES))
        primitives.stmatrix(view(rows, Uint8), fragments, "col")
