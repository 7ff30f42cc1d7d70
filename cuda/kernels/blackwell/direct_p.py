"""Direct-P on Blackwell: E2M1 codes with power-of-two scales, in the format of the second product.

A thread has the 128 scores of a row and tile, four blocks of 32 keys. Of each block it finds the exponent of the scale
from the largest score, maps the scores, and rounds with the hardware's conversion. Codes and scales go to tensor
memory. Scales are absolute, so that the accumulators of the output are never rescaled, and so is the denominator, the
sum of the codes times their scales, whose codes are added as integers.

Every step rounds where the reference rounds, so that scales, and all codes but those within rounding of a midpoint, are
the reference's.
"""

import dataclasses

import cutlass
import cutlass.cute as cute
from kernels import code_maps, tile
from kernels.blackwell import packed, tensor_memory
from kernels.blackwell.tensor_memory import P_SCALES, P
from kernels.instructions import exp2, fused, larger_or_nan, log2, smaller_or_nan, sum_rounded_down
from kernels.words import Float32, Uint32, as_bits, reciprocal, rounded_product, when

Int32, Boolean = cutlass.Int32, cutlass.Boolean

_BLOCK = 32  # keys
_WORD = 8  # codes
_LOG2_SIX = 2.584962500721156
_LN_2 = 0.6931471805599453
_BIAS, _NAN_BYTE = 127, 255
_ROUNDER = 12582912.0  # 1.5 * 2**23: whose bits have the exponent in the low ones
_TWELFTH = 1.0 / 12  # of twice a sum of codes: 1/6 of P
_UNIT = 1.0 / 36  # 1/6 of P times 1/6 of V, which the product leaves out
_LEAST = 2.0**-126
"""Denominators below it, the least number that float32 holds in full, count as zero."""


@dataclasses.dataclass(frozen=True)
class Constants:
    """Numbers of the recipe.

    Attributes:
      log2_scale: From a raw score to a base-2 log score.
      block_offset: 1 - log2 of the threshold from which a block's exponent is raised.
      shift: The recipe's p_scale_shift.
      margin: Of the anchor, in raw score units.
      map_constants: Numbers of the code map.
      map: The code map.
      anchor_keys: How many leading keys give the row reference; 0 for reference zero.
    """

    log2_scale: Float32
    block_offset: Float32
    shift: Float32
    margin: Float32
    map_constants: code_maps.Constants
    map: cutlass.Constexpr[code_maps.Map]
    anchor_keys: cutlass.Constexpr[int]


@dataclasses.dataclass(frozen=True)
class Row:
    """What is known of a row after some tiles.

    Attributes:
      total: Denominator.
      reference: Row reference, in raw score units.
    """

    total: Float32
    reference: Float32


def before_any_tile() -> Row:
    """A row that has seen nothing."""
    return Row(Float32(0.0), Float32(0.0))


def step(scores: list[Float32], row: Row, key_tile: Int32, columns: Int32, warp: Int32, constants: Constants) -> Row:
    """Stores P and its scale factors of a tile.

    Args:
      scores: Masked raw scores.
      row: Of the tiles before.
      key_tile: Index of the tile.
      columns: Address of the stage's scores in tensor memory, at the warp's lanes.
      warp: Of the four, which stores the scale factors of its rows to the column of its own.
      constants: Of the recipe.

    Returns:
      The row with this tile.
    """
    if constants.anchor_keys:
        row = dataclasses.replace(row, reference=_reference(scores, row.reference, key_tile, constants))
    scales, increments = Uint32(0), []
    for quarter in range(tile.ROWS // _BLOCK):
        block = scores[quarter * _BLOCK : (quarter + 1) * _BLOCK]
        exponent = _exponent(block, row.reference, constants)
        payloads = _payloads(block, _bias(exponent, row.reference, constants), quarter, constants)
        words = [packed.eight_e2m1(payloads[i : i + _WORD]) for i in range(0, _BLOCK, _WORD)]
        tensor_memory.store(columns + (P.first + quarter * len(words)), words)
        stored = exponent - constants.shift
        scales = scales | _scale_byte(stored) << (8 * quarter)
        codes = Float32(packed.doubled_sum_of_e2m1(words)) * Float32(_TWELFTH)
        increments.append(exp2(stored - Float32(_ROUNDER)) * codes)
    tensor_memory.store(columns + (P_SCALES.first + warp), [scales])
    increment = (increments[0] + increments[1]) + (increments[2] + increments[3])
    return dataclasses.replace(row, total=row.total + increment)


@cute.jit
def _reference(scores: list[Float32], reference: Float32, key_tile: Int32, constants: Constants) -> Float32:
    """At the first tile the maximum over the leading keys plus the margin; zero for a row that sees none of them."""
    if key_tile == 0:
        anchor = packed.highest(scores[: constants.anchor_keys])
        reference = when(anchor == Float32(float("-inf")), Float32(0.0), anchor + constants.margin)
    return reference


def _exponent(block: list[Float32], reference: Float32, constants: Constants) -> Float32:
    """Of a block, before the shift, in the low bits of a number near 2**23; NaN for NaN."""
    highest = packed.highest(block)
    if constants.anchor_keys:
        highest = highest - reference
    raised = rounded_product(highest, constants.log2_scale) + constants.block_offset
    lowest = constants.shift + Float32(1.0 - _BIAS)
    clamped = larger_or_nan(smaller_or_nan(raised, Float32(float(_BIAS))), lowest)
    return sum_rounded_down(clamped, Float32(_ROUNDER))


def _bias(exponent: Float32, reference: Float32, constants: Constants) -> Float32:
    """What a base-2 log score needs to become the logarithm of the wanted code."""
    bias = Float32(_LOG2_SIX) - (exponent - Float32(_ROUNDER))
    if constants.anchor_keys:
        bias = bias - rounded_product(reference, constants.log2_scale)
    return bias


def _scale_byte(exponent: Float32) -> Uint32:
    """The E8M0 byte of an exponent in the low bits of a number near 2**23."""
    byte = Int32(as_bits(exponent)) + _BIAS & 0xFF
    return Uint32(when(exponent == exponent, byte, Int32(_NAN_BYTE)))


def _payloads(block: list[Float32], bias: Float32, quarter: int, constants: Constants) -> list[Float32]:
    """What is rounded to codes."""
    numbers = constants.map_constants
    mapped = code_maps.payloads(constants.map.kind, numbers, block, bias, fused_all=packed.fused_pairs)
    if constants.map.mixed:
        chosen = [2 * pair + i for pair in code_maps.exact_pairs(quarter) for i in (0, 1)]
        raw, numbers = [block[i] for i in chosen], code_maps.exponential(numbers)
        exact = code_maps.payloads("exponential", numbers, raw, bias, fused_all=packed.fused_pairs)
        for i, value in zip(chosen, exact, strict=True):
            mapped[i] = value
    return mapped


def normalize(row: Row, sees: Boolean, constants: Constants) -> tuple[Float32, Float32]:
    """Factor of the row's accumulators, zero for a row without output, and its log-sum-exp.

    Args:
      row: After all tiles.
      sees: Whether it may see anything.
      constants: Of the recipe.
    """
    vanishes = (row.total < Float32(_LEAST)) | ~sees
    overflows = row.total == Float32(float("inf"))
    factor = when(vanishes | overflows, Float32(0.0), Float32(_UNIT) * reciprocal(row.total))
    offset = fused(row.reference, constants.log2_scale, constants.shift)
    log = when(overflows, Float32(float("inf")), (log2(row.total) + offset) * Float32(_LN_2))
    return factor, when(vanishes, Float32(float("-inf")), log)
