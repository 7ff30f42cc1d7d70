"""Direct-P on Hopper: E2M1 codes with power-of-two scales, as the E5M2 operand of the second product.

A thread has the scores of one block of 32 keys, in each of two rows. It finds the exponent of the scale from the
largest score, maps the scores, and rounds. The map's result is scaled by 2**-14: there the steps of E2M1 are
multiples of 2**9 of float16's bits, subnormal code included, so that the code is the rounded upper part of the bits,
and the bits without the rest are the code's value. One multiplication by a power of two in float16 brings it to the
block's scale, and the upper byte of that is E5M2.

Exponents are kept as they come out of the rounding, in the low bits of float32 numbers between 2**23 and 2**24: their
differences are exact as floats and as integers.

Probabilities are relative to the largest scale of their row in the tile, which leaves blocks up to 2**16 smaller exact;
smaller ones are cut, and those 2**20 smaller are zero. Across tiles nothing is lost: each tile's product is added in
float32 with a factor of its own.
"""

import dataclasses
import functools
import operator

import cutlass
import cutlass.cute as cute
from cutlass.cute.arch import lane_idx
from kernels import code_maps
from kernels.hopper import maximum
from kernels.hopper.key_order import BY_BLOCK, KEYS
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

KEY_ORDER = BY_BLOCK
P_KIND = "e5m2"
_LOG2_SIX = 2.584962500721156
_LN_2 = 0.6931471805599453
_MAX_EXPONENT, _MIN_STORED_EXPONENT = 127.0, -126.0
_ROUNDER = 12582912.0  # 1.5 * 2**23
_CODES = 0x0E000E00
_TOP = 0x0FFF0FFF  # still code 7
_CODE_EXPONENT = -14  # of the scaled codes in float16
_FACTOR_EXPONENT = 30  # of float16, for the block with the largest scale; the largest there is
_UNIT = 2.0**-15 / 6  # probabilities are doubled, totals 2**-14 times the codes, and V leaves out a sixth
_RESCALE_AT = 20.0  # octaves by which a scale may exceed that of the first tile


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
      half_step: Of the scaled codes, for two, from :func:`kernels.half_quotients.half_step_of`.
    """

    log2_scale: Float32
    block_offset: Float32
    shift: Float32
    margin: Float32
    map_constants: code_maps.Constants
    map: cutlass.Constexpr[code_maps.Map]
    anchor_keys: cutlass.Constexpr[int]
    half_step: Uint32


@dataclasses.dataclass(frozen=True)
class Rows:
    """What is known of the two rows of a thread after some tiles.

    Attributes:
      total: Sum of the scaled codes of this thread's blocks, times 2**-14, relative to the level.
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
    blocks = [KEY_ORDER.of_row(scores, row) for row in (0, 1)]
    highest = maximum.of_rows(*blocks)
    if cutlass.const_expr(constants.anchor_keys > 0):
        if key_tile == 0:
            reference = [_anchor_of(value, constants) for value in highest]
    exponents = [_exponent(*pair, constants) for pair in zip(highest, reference, strict=True)]
    top = [_over_four(exponent) for exponent in exponents]
    level = [when(is_first, new, old) for new, old in zip(top, level, strict=True)]
    grown = [new - old > Float32(_RESCALE_AT) for new, old in zip(top, level, strict=True)]
    if cute.arch.vote_any_sync(grown[0] | grown[1]):
        new_level = [larger(old, new) for old, new in zip(level, top, strict=True)]
        shrink = [exp2(old - new) for old, new in zip(level, new_level, strict=True)]
        accumulators = [value * shrink[i // 2 % 2] for i, value in enumerate(accumulators)]
        total = [value * factor for value, factor in zip(total, shrink, strict=True)]
        level = new_level
    found = [_probabilities(*row, constants) for row in zip(blocks, exponents, top, reference, strict=True)]
    total = [
        fused(exp2(exponent - base), codes, old)
        for exponent, base, (_, codes), old in zip(exponents, level, found, total, strict=True)
    ]
    words = [words for words, _ in found]
    p = [words[row][i] for step in range(0, KEYS // 4, 2) for i in (step, step + 1) for row in (0, 1)]
    factors = [exp2(new - old + Float32(value_exponent)) for new, old in zip(top, level, strict=True)]
    return p, factors, accumulators, Rows(total, level, reference)


def _anchor_of(highest: Float32, constants: Constants) -> Float32:
    """The maximum over the leading blocks plus the margin; zero for a row that sees none of their keys."""
    leads = lane_idx() % 4 < constants.anchor_keys // KEYS
    anchor = _over_four(when(leads, highest, Float32(float("-inf"))))
    return when(anchor == Float32(float("-inf")), Float32(0.0), anchor + constants.margin)


def _over_four(value: Float32) -> Float32:
    """Maximum over the four threads that share a row."""
    for offset in (1, 2):
        value = larger_or_nan(value, cute.arch.shuffle_sync_bfly(value, offset=offset))
    return value


def _exponent(highest: Float32, reference: Float32, constants: Constants) -> Float32:
    """Exponent of a block from its largest score, rounded in the order in which the reference rounds."""
    if constants.anchor_keys:
        highest = highest - reference
    log_max = fused(highest, constants.log2_scale, constants.block_offset)
    clamped = larger_or_nan(smaller_or_nan(log_max, Float32(_MAX_EXPONENT)), _lowest(constants))
    return sum_rounded_down(clamped, Float32(_ROUNDER))


def _lowest(constants: Constants) -> Float32:
    """The exponent of a block that nobody sees."""
    return constants.shift + Float32(_MIN_STORED_EXPONENT)


def _probabilities(
    block: list[Float32], exponent: Float32, top: Float32, reference: Float32, constants: Constants
) -> tuple[list[Uint32], Float32]:
    """Four probabilities a word, in the order of the keys, and the sum of the scaled codes."""
    below_top = _FACTOR_EXPONENT - Int32(as_bits(top))
    factor = cutlass.max(Int32(as_bits(exponent)) + below_top, 0)
    factors = multiply_add(Uint32(factor), Uint32(1 << 26 | 1 << 10), Uint32(0))
    mapped = _mapped(block, _bias(exponent, reference, constants), constants)
    codes = [_codes(*mapped[i : i + 2], constants.half_step) for i in range(0, KEYS, 2)]
    scaled = [product_of_halves(pair, factors) for pair in codes]
    return [bytes_of(*scaled[i : i + 2], 0x7531) for i in range(0, len(scaled), 2)], _total(codes)


def _bias(exponent: Float32, reference: Float32, constants: Constants) -> Float32:
    """What a base-2 log score needs to become the logarithm of the wanted code."""
    bias = Float32(_LOG2_SIX) - (exponent - Float32(_ROUNDER))
    if constants.anchor_keys:
        bias = fused(-reference, constants.log2_scale, bias)
    return bias


def _mapped(block: list[Float32], bias: Float32, constants: Constants) -> list[Float32]:
    """Payloads of a block, times 2**-14."""
    kind, numbers = constants.map.kind, constants.map_constants
    if not constants.map.mixed:
        return code_maps.payloads(kind, numbers, block, bias, _CODE_EXPONENT)
    mapped = []
    for start in range(0, KEYS, 2):
        pair = block[start : start + 2]
        quarters = [quarter for quarter in range(4) if start // 2 in code_maps.exact_pairs(quarter)]
        usual = code_maps.payloads(kind, numbers, pair, bias, _CODE_EXPONENT)
        if quarters:
            exact = code_maps.payloads("exponential", code_maps.exponential(numbers), pair, bias, _CODE_EXPONENT)
            chosen = functools.reduce(operator.or_, [lane_idx() % 4 == quarter for quarter in quarters])
            usual = [when(chosen, *values) for values in zip(exact, usual, strict=True)]
        mapped += usual
    return mapped


def _codes(low: Float32, high: Float32, half_step: Uint32) -> Uint32:
    """Values of the codes of two scaled results of the map, times 2**-14, in float16."""
    return sum_clamped(truncated_pair(low, high), half_step, _TOP) & Uint32(_CODES)


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
