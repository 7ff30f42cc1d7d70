"""Direct-P on Blackwell: E2M1 codes with power-of-two scales, in the format of the second product.

A thread has the 128 scores of a row and tile, four blocks of 32 keys. Of each block it finds the exponent of the scale
from the largest score, maps the scores, and rounds with the hardware's conversion. Codes and scales go to tensor
memory. Scales are absolute, so that the accumulators of the output are never rescaled, and so is the denominator, the
sum of the codes times their scales, whose codes are added as integers.

Every step rounds where the reference rounds, so that scales and codes are the reference's, but those within rounding of
a threshold or midpoint: a compiler may contract the reference's product and sum of a block's largest score, as is done
here.
"""

import dataclasses

import cutlass
import cutlass.cute as cute
from kernels import code_maps
from kernels.blackwell import packed, tensor_memory
from kernels.blackwell.scores import BLOCK, BLOCKS, Scores
from kernels.blackwell.tensor_memory import P_SCALES, P
from kernels.instructions import fused, larger_or_nan, log2, smaller_or_nan, sum_rounded_down
from kernels.words import Float32, Uint32, as_bits, as_float, bytes_of, reciprocal, rounded_product, when

Int32, Boolean = cutlass.Int32, cutlass.Boolean

_WORD = 8  # codes
_LOG2_SIX = 2.584962500721156
_LN_2 = 0.6931471805599453
_BIAS = 127.0
_MANTISSA_BITS = 23
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


def step(
    scores: Scores,
    row: Row,
    key_tile: Int32,
    columns: Int32,
    warp: Int32,
    tables: list[Uint32],
    constants: Constants,
) -> Row:
    """Stores P and its scale factors of a tile.

    Args:
      scores: Masked raw scores.
      row: Of the tiles before.
      key_tile: Index of the tile.
      columns: Address of the stage's scores in tensor memory, at the warp's lanes.
      warp: Of the four, which stores the scale factors of its rows to the column of its own.
      tables: Values of the codes.
      constants: Of the recipe.

    Returns:
      The row with this tile.
    """
    if constants.anchor_keys:
        row = dataclasses.replace(row, reference=_reference(scores, row.reference, key_tile, constants))
    stored: list[Float32] = []
    total = row.total
    for quarter in range(BLOCKS):
        exponent = _exponent(scores.highest(quarter, 1), row.reference, constants)
        payloads = _payloads(scores.block(quarter), _bias(exponent, row.reference, constants), quarter, constants)
        words = [packed.eight_e2m1(payloads[i : i + _WORD]) for i in range(0, BLOCK, _WORD)]
        tensor_memory.store(columns + (P.first + quarter * len(words)), words)
        # The low byte is that of E8M0, which for NaN is 255.
        stored.append(exponent - (constants.shift - Float32(_BIAS)))
        codes = Float32(packed.doubled_sum_of_e2m1(words, tables)) * Float32(_TWELFTH)
        total = fused(as_float(as_bits(stored[-1]) << _MANTISSA_BITS), codes, total)  # minus infinity for NaN
    tensor_memory.store(columns + (P_SCALES.first + warp), [_low_bytes(stored)])
    return dataclasses.replace(row, total=total)


@cute.jit
def _reference(scores: Scores, reference: Float32, key_tile: Int32, constants: Constants) -> Float32:
    """At the first tile the maximum over the leading keys plus the margin; zero for a row that sees none of them."""
    if key_tile == 0:
        anchor = scores.highest(count=constants.anchor_keys // BLOCK)
        reference = when(anchor == Float32(float("-inf")), Float32(0.0), anchor + constants.margin)
    return reference


def _exponent(highest: Float32, reference: Float32, constants: Constants) -> Float32:
    """Of a block with this maximum, before the shift, in the low bits of a number near 2**23; NaN for NaN."""
    if constants.anchor_keys:
        highest = highest - reference
    raised = fused(highest, constants.log2_scale, constants.block_offset)
    lowest = constants.shift + Float32(1.0 - _BIAS)
    clamped = larger_or_nan(smaller_or_nan(raised, Float32(_BIAS)), lowest)
    return sum_rounded_down(clamped, Float32(_ROUNDER))


def _bias(exponent: Float32, reference: Float32, constants: Constants) -> Float32:
    """What a base-2 log score needs to become the logarithm of the wanted code."""
    bias = Float32(_LOG2_SIX) - (exponent - Float32(_ROUNDER))
    if constants.anchor_keys:
        bias = bias - rounded_product(reference, constants.log2_scale)
    return bias


def _low_bytes(values: list[Float32]) -> Uint32:
    """The lowest byte of each of four numbers, the first one's lowest."""
    bits = [as_bits(value) for value in values]
    return bytes_of(bytes_of(*bits[:2], 0x0040), bytes_of(*bits[2:], 0x0040), 0x5410)


def _payloads(block: list[Float32], bias: Float32, quarter: int, constants: Constants) -> list[Float32]:
    """What is rounded to codes."""
    numbers = constants.map_constants
    mapped = code_maps.payloads(constants.map.kind, numbers, block, bias, arithmetic=packed.ARITHMETIC)
    if constants.map.mixed:
        chosen = [2 * pair + i for pair in code_maps.exact_pairs(quarter) for i in (0, 1)]
        raw, numbers = [block[i] for i in chosen], code_maps.exponential(numbers)
        exact = code_maps.payloads("exponential", numbers, raw, bias, arithmetic=packed.ARITHMETIC)
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
    # NaN has left minus infinity, see above.
    total = when(row.total < Float32(0.0), Float32(float("nan")), row.total)
    vanishes = (total < Float32(_LEAST)) | ~sees
    overflows = total == Float32(float("inf"))
    factor = when(vanishes | overflows, Float32(0.0), Float32(_UNIT) * reciprocal(total))
    offset = fused(row.reference, constants.log2_scale, constants.shift)
    log = when(overflows, Float32(float("inf")), (log2(total) + offset) * Float32(_LN_2))
    return factor, when(vanishes, Float32(float("-inf")), log)
