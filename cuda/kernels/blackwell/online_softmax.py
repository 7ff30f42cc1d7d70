"""Probabilities with a lazily updated row maximum, as E4M3 in the format of the second product."""

import dataclasses

import cutlass
from kernels.blackwell import packed, tensor_memory
from kernels.blackwell.scores import BLOCK, BLOCKS, Scores
from kernels.blackwell.tensor_memory import P
from kernels.instructions import exp2, four_e4m3, fused, larger_or_nan, log2
from kernels.words import Float32, reciprocal, rounded_product, when

Int32, Boolean = cutlass.Int32, cutlass.Boolean

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
class Row:
    """What is known of a row after some tiles.

    Attributes:
      total: Sum of the exponentials.
      highest: Maximum in raw score units.
    """

    total: Float32
    highest: Float32


def before_any_tile() -> Row:
    """A row that has seen nothing."""
    return Row(Float32(0.0), Float32(_MINUS_INFINITY))


def update(scores: Scores, row: Row, constants: Constants) -> tuple[Float32, Float32]:
    """The maximum with a tile, and the factor for what has been accumulated so far.

    Args:
      scores: Masked raw scores of the tile.
      row: Of the tiles before.
      constants: Of the recipe.
    """
    candidate = larger_or_nan(scores.highest(), row.highest)
    keep = (row.highest - candidate) * constants.log2_scale >= -constants.threshold
    highest = when(keep, row.highest, candidate)
    return highest, exp2(fused(row.highest, constants.log2_scale, -_reference(highest, constants)))


def step(scores: Scores, row: Row, highest: Float32, factor: Float32, columns: Int32, constants: Constants) -> Row:
    """Stores P of a tile.

    Args:
      scores: Masked raw scores.
      row: Of the tiles before.
      highest: From :func:`update`.
      factor: Likewise.
      columns: Address of the stage's scores in tensor memory, at the warp's lanes.
      constants: Of the recipe.

    Returns:
      The row with this tile.
    """
    addend, sums = -_reference(highest, constants), []
    for index in range(BLOCKS):
        scaled = packed.fused_pairs(scores.block(index), constants.log2_scale, addend)
        exponentials = [exp2(x) for x in scaled]
        words = [four_e4m3(*exponentials[i : i + 4]) for i in range(0, BLOCK, 4)]
        tensor_memory.store(columns + (P.first + index * len(words)), words)
        sums.append(packed.sum_of_all(exponentials))
    increment = (sums[0] + sums[1]) + (sums[2] + sums[3])
    return Row(fused(row.total, factor, increment), highest)


def _reference(highest: Float32, constants: Constants) -> Float32:
    """What is subtracted from base-2 log scores."""
    return rounded_product(when(highest == Float32(_MINUS_INFINITY), Float32(0.0), highest), constants.log2_scale)


def normalize(row: Row, sees: Boolean, constants: Constants) -> tuple[Float32, Float32]:
    """Factor of the row's accumulators, zero for a row without output, and its log-sum-exp.

    Args:
      row: After all tiles.
      sees: Whether it may see anything.
      constants: Of the recipe.
    """
    empty = (row.total == Float32(0.0)) | ~sees
    factor = when(empty, Float32(0.0), constants.unit * reciprocal(row.total))
    log = fused(row.highest, constants.log2_scale, log2(row.total)) * Float32(_LN_2)
    return factor, when(empty, Float32(_MINUS_INFINITY), log)
