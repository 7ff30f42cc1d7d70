"""Direct-P on Hopper: E2M1 codes with power-of-two scales, as the E5M2 operand of the second product.

A thread has eight scores of each block of 32 keys, in each of two rows. Per block it finds the exponent of the scale
from the largest score, maps the scores, and rounds. The map's result is scaled by 2**-14: there the steps of E2M1 are
multiples of 2**9 of float16's bits, subnormal code included, so that the code is the rounded upper part of the bits,
and the bits without the rest are the code's value. One multiplication by a power of two in float16 brings it to the
block's scale, and the upper byte of that is E5M2.

Exponents are kept as they come out of the rounding, in the low bits of float32 numbers between 2**23 and 2**24: their
differences are exact as floats and as integers.

Probabilities are relative to the largest scale of their row in the tile: blocks more than 2**14 smaller may lose bits,
and those more than 2**29 smaller are zero. Across tiles nothing is lost: each tile's product is added in float32 with a
factor of its own.
"""

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass.cute.arch import lane_idx
from kernels import code_maps
from kernels.hopper.key_order import accumulators_of_group
from kernels.instructions import (
    exp2,
    fused,
    larger_or_nan,
    log2,
    product_of_halves,
    smaller_or_nan,
    sum_clamped,
    sum_of_halves,
    sum_rounded_down,
    total_of_halves,
    truncated_pair,
)
from kernels.words import Float32, Uint32, as_bits, bytes_of, larger, multiply_add, reciprocal, when

Int32, Boolean = cutlass.Int32, cutlass.Boolean

QUARTERS = 4
P_KIND = "e5m2"
_GROUPS = 2  # of 16 keys in a quarter
_LOG2_SIX = 2.584962500721156
_LN_2 = 0.6931471805599453
_MAX_EXPONENT, _MIN_STORED_EXPONENT = 127.0, -126.0
_ROUNDER = 12582912.0  # 1.5 * 2**23
_HALF_STEP, _CODES = 0x01000100, 0x0E000E00
_TOP = 0x0FFF0FFF  # still code 7
_CODE_EXPONENT = -14  # of the scaled codes in float16
_FACTOR_EXPONENT = 30  # of float16, for the block with the largest scale; the largest there is
_UNIT = 2.0**-15 / 6  # probabilities are doubled, totals 2**-14 times the codes, and V leaves out a sixth
_RESCALE_AT = 60.0  # octaves by which a scale may exceed that of the first tile


@dataclasses.dataclass(frozen=True)
class Constants:
    """Numbers of the recipe.

    Attributes:
      log2_scale: From a raw score to a base-2 log score.
      block_offset: 1 - log2 of the threshold from which a block's exponent is raised.
      shift: The recipe's p_scale_shift.
      margin: Of the anchor, in raw score units.
      map: The code map.
      map_constants: Its numbers.
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
class Rows:
    """What is known of the two rows of a thread after some tiles.

    Attributes:
      total: Sum of the scaled codes of this thread's keys, times 2**-14, relative to the level.
      level: Exponent that the total and the accumulators are relative to: that of the first tile's largest scale, or
        of a later one if that was too small.
      reference: Row reference, in raw score units.
    """

    total: list[Float32]
    level: list[Float32]
    reference: list[Float32]


def before_any_tile() -> Rows:
    """Rows that have seen nothing."""
    return Rows(*([Float32(0.0), Float32(0.0)] for _ in dataclasses.fields(Rows)))


@cute.jit
def step(
    scores: list[Float32],
    accumulators: list[Float32],
    rows: Rows,
    key_tile: Int32,
    is_first: Boolean,
    value_exponent: Int32,
    constants: Constants,
) -> tuple[list[Uint32], list[Float32], list[Float32], Rows]:
    """What a tile adds.

    Args:
      scores: Masked raw scores.
      accumulators: Of the tiles before.
      rows: Of the tiles before.
      key_tile: Index of the tile.
      is_first: Whether no tile was before.
      value_exponent: Of the tile's values.
      constants: Of the recipe.

    Returns:
      The A operand of the second product, the factor of that product in each row, the accumulators to which it is to be
      added, and the rows.
    """
    reference, level, total = rows.reference, rows.level, rows.total
    if cutlass.const_expr(constants.anchor_keys > 0):
        if key_tile == 0:
            reference = _anchor_of(scores, constants)
    exponents = [_exponents(scores, row, reference[row], constants) for row in (0, 1)]
    top = [_highest(blocks) for blocks in exponents]
    level = [when(is_first, new, old) for new, old in zip(top, level, strict=True)]
    grown = [new - old > Float32(_RESCALE_AT) for new, old in zip(top, level, strict=True)]
    if cute.arch.vote_any_sync(grown[0] | grown[1]):
        new_level = [larger(old, new) for old, new in zip(level, top, strict=True)]
        shrink = [exp2(old - new) for old, new in zip(level, new_level, strict=True)]
        accumulators = [value * shrink[i // 2 % 2] for i, value in enumerate(accumulators)]
        total = [value * factor for value, factor in zip(total, shrink, strict=True)]
        level = new_level
    p, total = _probabilities(scores, exponents, top, total, level, reference, constants)
    factors = [exp2(new - old + Float32(value_exponent)) for new, old in zip(top, level, strict=True)]
    return p, factors, accumulators, Rows(total, level, reference)


def _anchor_of(scores: list[Float32], constants: Constants) -> list[Float32]:
    """The maximum over the leading keys plus the margin; zero for a row that sees none of them."""
    references = []
    for row in (0, 1):
        leading = [score for quarter in range(constants.anchor_keys // 32) for score in _quarter(scores, quarter, row)]
        highest = _over_four(_highest(leading))
        references.append(when(highest == Float32(float("-inf")), Float32(0.0), highest + constants.margin))
    return references


def _quarter(scores: list[Float32], quarter: int, row: int) -> list[Float32]:
    """Scores of a block in the order of its keys."""
    groups = range(quarter * _GROUPS, (quarter + 1) * _GROUPS)
    return [scores[i] for group in groups for i in accumulators_of_group(group, row)]


def _highest(values: list[Float32]) -> Float32:
    while len(values) > 1:
        values = [larger_or_nan(*values[i : i + 2]) for i in range(0, len(values), 2)]
    return values[0]


def _over_four(value: Float32) -> Float32:
    """Maximum over the four threads that share a row."""
    for offset in (1, 2):
        value = larger_or_nan(value, cute.arch.shuffle_sync_bfly(value, offset=offset))
    return value


def _exponents(scores: list[Float32], row: int, reference: Float32, constants: Constants) -> list[Float32]:
    """Exponent of each block of a row, rounded in the order in which the reference rounds."""
    exponents = []
    for quarter in range(QUARTERS):
        highest = _over_four(_highest(_quarter(scores, quarter, row)))
        if constants.anchor_keys:
            highest = highest - reference
        log_max = fused(highest, constants.log2_scale, constants.block_offset)
        clamped = larger_or_nan(smaller_or_nan(log_max, Float32(_MAX_EXPONENT)), _lowest(constants))
        exponents.append(sum_rounded_down(clamped, Float32(_ROUNDER)))
    return exponents


def _lowest(constants: Constants) -> Float32:
    """The exponent of a block that nobody sees."""
    return constants.shift + Float32(_MIN_STORED_EXPONENT)


def _probabilities(
    scores: list[Float32],
    exponents: list[list[Float32]],
    top: list[Float32],
    totals: list[Float32],
    level: list[Float32],
    reference: list[Float32],
    constants: Constants,
) -> tuple[list[Uint32], list[Float32]]:
    """The A operand of the second product, and the totals with the tile's codes."""
    words: dict[tuple[int, int, int], Uint32] = {}
    totals = list(totals)
    for row in (0, 1):
        below_top = _FACTOR_EXPONENT - Int32(as_bits(top[row]))
        for quarter, exponent in enumerate(exponents[row]):
            factor = cutlass.max(Int32(as_bits(exponent)) + below_top, 0)
            factors = multiply_add(Uint32(factor), Uint32(1 << 26 | 1 << 10), Uint32(0))
            bias = _bias(exponent, reference[row], constants)
            block = _quarter(scores, quarter, row)
            mapped = _mapped(block, bias, quarter, constants)
            codes = [_codes(*mapped[i : i + 2]) for i in range(0, len(mapped), 2)]
            for group in range(_GROUPS):
                low, high = (product_of_halves(pair, factors) for pair in codes[2 * group : 2 * group + 2])
                words[quarter, group, row] = bytes_of(low, high, 0x7531)
            totals[row] = fused(exp2(exponent - level[row]), _total(codes), totals[row])
    order = [(quarter, group, row) for quarter in range(QUARTERS) for group in range(_GROUPS) for row in (0, 1)]
    return [words[place] for place in order], totals


def _bias(exponent: Float32, reference: Float32, constants: Constants) -> Float32:
    """What a base-2 log score needs to become the logarithm of the wanted code."""
    bias = Float32(_LOG2_SIX) - (exponent - Float32(_ROUNDER))
    if constants.anchor_keys:
        bias = fused(-reference, constants.log2_scale, bias)
    return bias


def _mapped(block: list[Float32], bias: Float32, quarter: int, constants: Constants) -> list[Float32]:
    """Payloads of keys 4 lane .. 4 lane + 3 of each 16 of a block, times 2**-14."""
    numbers = constants.map_constants
    mapped = code_maps.payloads(constants.map.kind, numbers, block, bias, _CODE_EXPONENT)
    if not constants.map.mixed:
        return mapped
    exact_pairs, numbers = code_maps.exact_pairs(quarter), code_maps.exponential(numbers)
    for pair in range(0, len(block), 2):
        lanes = [lane for lane in range(4) if 8 * (pair // 4) + 2 * lane + pair // 2 % 2 in exact_pairs]
        if lanes:
            chosen = lane_idx() % 4 == lanes[0]
            for lane in lanes[1:]:
                chosen = chosen | (lane_idx() % 4 == lane)
            exact = code_maps.payloads("exponential", numbers, block[pair : pair + 2], bias, _CODE_EXPONENT)
            for i in (0, 1):
                mapped[pair + i] = when(chosen, exact[i], mapped[pair + i])
    return mapped


def _codes(low: Float32, high: Float32) -> Uint32:
    """Values of the codes of two scaled results of the map, times 2**-14, in float16."""
    return sum_clamped(truncated_pair(low, high), _HALF_STEP, _TOP) & Uint32(_CODES)


def _total(pairs: list[Uint32]) -> Float32:
    """The sum, which is exact in float16."""
    while len(pairs) > 1:
        pairs = [sum_of_halves(*pairs[i : i + 2]) for i in range(0, len(pairs), 2)]
    return total_of_halves(pairs[0])


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
        total, level = totals[row], rows.level[row] - Float32(_ROUNDER)
        stored = log2(total) + (level - constants.shift + Float32(-_CODE_EXPONENT - _LOG2_SIX))
        vanishes = (total == Float32(0.0)) | (stored < Float32(_MIN_STORED_EXPONENT)) | ~sees[row]
        overflows = stored >= Float32(_MAX_EXPONENT + 1)
        factors.append(when(vanishes | overflows, Float32(0.0), Float32(_UNIT) * reciprocal(total)))
        log = fused(rows.reference[row], constants.log2_scale, stored + constants.shift) * Float32(_LN_2)
        log = when(overflows, Float32(float("inf")), log)
        logs.append(when(vanishes, Float32(float("-inf")), log))
    return factors, logs
