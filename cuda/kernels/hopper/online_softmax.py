"""Probabilities with a lazily updated row maximum, as the E4M3 operand of the second product."""

import dataclasses

import cutlass
import cutlass.cute as cute
from kernels.hopper import maximum
from kernels.hopper.key_order import INTERLEAVED, KEYS
from kernels.instructions import exp2, four_e4m3, fused, larger_or_nan, log2
from kernels.words import Float32, Uint32, reciprocal, when

Int32, Boolean = cutlass.Int32, cutlass.Boolean

P_KIND = "e4m3"
KEY_ORDER = INTERLEAVED  # values stay in their own order, as they are published
_GROUPS = KEYS // 4  # of keys in a word of probabilities
_LN_2 = 0.6931471805599453
_MINUS_INFINITY = float("-inf")


@dataclasses.dataclass(frozen=True)
class Constants:
    """Numbers of the recipe.

    Attributes:
      log2_scale: From a raw score to a base-2 log score.
      threshold: Octaves by which the maximum may be exceeded before it changes.
      unit: Factor that the values leave out.
    """

    log2_scale: Float32
    threshold: Float32
    unit: Float32


@dataclasses.dataclass(frozen=True)
class Rows:
    """What is known of the two rows of a thread after some tiles.

    Attributes:
      total: Sum of the exponentials of this thread's keys.
      highest: Maximum in raw score units.
    """

    total: list[Float32]
    highest: list[Float32]


def before_any_tile() -> Rows:
    """Rows that have seen nothing."""
    return Rows([Float32(0.0), Float32(0.0)], [Float32(_MINUS_INFINITY), Float32(_MINUS_INFINITY)])


def step(scores: list[Float32], rows: Rows, constants: Constants) -> tuple[list[Uint32], list[Float32], Rows]:
    """What a tile adds.

    Args:
      scores: Masked raw scores.
      rows: Of the tiles before.
      constants: Of the recipe.

    Returns:
      The A operand of the second product, the factor of each row for what has been accumulated so far, and the rows.
    """
    words: dict[tuple[int, int], Uint32] = {}
    corrections, totals, maxima = [], [], []
    found = maximum.of_rows(*(KEY_ORDER.of_row(scores, row) for row in (0, 1)))
    for row in (0, 1):
        raw = KEY_ORDER.of_row(scores, row)
        highest, addend, correction = _update(found[row], rows.highest[row], constants)
        sums = []
        for group in range(_GROUPS):
            four = raw[4 * group : 4 * group + 4]
            exponentials = [exp2(fused(score, constants.log2_scale, addend)) for score in four]
            sums.append((exponentials[0] + exponentials[1]) + (exponentials[2] + exponentials[3]))
            words[group, row] = four_e4m3(*exponentials)
        while len(sums) > 1:
            sums = [sums[i] + sums[i + 1] for i in range(0, len(sums), 2)]
        totals.append(fused(rows.total[row], correction, sums[0]))
        maxima.append(highest)
        corrections.append(correction)
    order = [(2 * quarter + group, row) for quarter in range(_GROUPS // 2) for group in (0, 1) for row in (0, 1)]
    return [words[place] for place in order], corrections, Rows(totals, maxima)


def _update(candidate: Float32, old: Float32, constants: Constants) -> tuple[Float32, Float32, Float32]:
    """The new maximum from that of the thread's scores, the addend of the scaled scores, and the correction."""
    for offset in (1, 2):
        candidate = larger_or_nan(candidate, cute.arch.shuffle_sync_bfly(candidate, offset=offset))
    candidate = larger_or_nan(candidate, old)
    keep = (old - candidate) * constants.log2_scale >= -constants.threshold
    new = when(keep, old, candidate)
    reference = when(new == Float32(_MINUS_INFINITY), Float32(0.0), new) * constants.log2_scale
    return new, -reference, exp2(fused(old, constants.log2_scale, -reference))


def normalize(
    rows: Rows, totals: list[Float32], sees: list[Boolean], constants: Constants
) -> tuple[list[Float32], list[Float32]]:
    """Factor of each row's accumulators, zero for a row without output, and its log-sum-exp.

    Args:
      rows: After all tiles.
      totals: The total of each row over its four threads.
      sees: Whether each row may see anything.
      constants: Of the recipe.
    """
    factors, logs = [], []
    for row in (0, 1):
        total = totals[row]
        empty = (total == Float32(0.0)) | ~sees[row]
        factors.append(when(empty, Float32(0.0), constants.unit * reciprocal(total)))
        log = fused(rows.highest[row], constants.log2_scale, log2(total)) * Float32(_LN_2)
        logs.append(when(empty, Float32(_MINUS_INFINITY), log))
    return factors, logs
