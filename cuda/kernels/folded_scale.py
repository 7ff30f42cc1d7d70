"""The scale that two NVFP4 blocks of a row share: of eleven multiples of their joint ``amax / 6`` the best by error.

The reference's choice is reproduced bit for bit. Every thread estimates the errors of its candidates in pairs of
float16, with a bound on how far the estimates are off; where that leaves more than one candidate, the lanes of the warp
work out its errors together, exactly as the reference does. A candidate below ``amax / 6`` clips the largest element at
least, and from the moment that this alone is worse than the best error so far, no smaller candidate needs to be tried.
"""

import functools

import cutlass
import cutlass.cute as cute
from cutlass.cute.arch import clz, lane_idx, shuffle_sync, shuffle_sync_bfly, vote_ballot_sync, warp_idx
from cutlass.experimental import primitives
from kernels import half_quotients, shared
from kernels.instructions import fused, fused_halves, product_of_halves, sum_of_halves, values_of_halves
from kernels.nvfp4 import nearest_scale, scale_of
from kernels.words import (
    Float32,
    Uint16,
    Uint32,
    as_bits,
    as_float,
    from_e4m3,
    larger,
    reciprocal,
    rounded_product,
    smaller,
    view,
    when,
)

Int32, Int64 = cutlass.Int32, cutlass.Int64

_SIXTEENTHS = (4, 5, 6, 7, 8, 10, 12, 14, 16, 18, 20)
"""The multiples, in the reference's order: of equal errors the first counts, which has the smaller scale."""
_ALWAYS_TRIED = (12, 14, 16, 18, 20)
"""A smaller multiple has a larger error than its double, unless their scales are subnormal or saturate."""
_TRIED_AT_NEED = (10, 8, 7, 6, 5, 4)
_BITS = 5
_PACKED, _PACKED_AT_NEED = (
    sum(value << (_BITS * place) for place, value in enumerate(values)) for values in (_SIXTEENTHS, _TRIED_AT_NEED)
)

_INFINITY = 0x7F800000
_LARGEST_CODE = 6.0
_LEAST_SEARCHED, _LAST_SEARCHED = 0x3B9A, 0x4621
"""Outside these magnitudes all candidates have one scale, zero or 448."""
_SCALE = 0x7F  # Bits of a key that hold the scale.

# Six roundings to float16 and the loss of those bits to the scale put an estimate at most 0.295 % off, and products and
# magnitudes below the range of float16 add less than 2^-19.
_RATIO, _SLACK = 1.006, 2.0**-18

_BLOCK = 16
_PAIRS = 16
_HALF_STEP_UNIT = 2.0**22  # Numbers from here to twice this are multiples of a half, the step of the smallest codes.
_JUST_ABOVE = 1.0 + 2.0**-18  # A quotient of 2 or 4 must reach its binade even if the reciprocal is rounded down.


def allocate(threads: int) -> cutlass.Array:
    """Shared memory through which the lanes of each warp see the two blocks of one of them."""
    return shared.words(threads // 32 * _PAIRS)


@cute.jit
def best_scale(
    pairs: list[Uint32],
    magnitudes: list[Uint32],
    unit: Uint32,
    largest: Uint32,
    half_step: Uint32,
    exchange: cutlass.Array,
) -> Uint32:
    """E4M3 byte of the shared scale; all lanes of a warp call this together.

    Args:
      pairs: 16 pairs of bfloat16, eight of each block.
      magnitudes: In the unit, from :func:`kernels.half_quotients.in_units`.
      unit: From :func:`kernels.half_quotients.unit_of`.
      largest: Bits of the largest magnitude.
      half_step: From :func:`kernels.half_quotients.half_step_of`.
      exchange: From :func:`allocate`.
    """
    amax = as_float(largest << 16)
    searched = (largest >= _LEAST_SEARCHED) & (largest <= _LAST_SEARCHED)
    # The three smallest keys: estimated errors, as integers, whose last bits are the scale.
    first, second, third, best = Uint32(0), Uint32(_INFINITY), Uint32(_INFINITY), Uint32(0)
    if searched:
        keys = []
        for sixteenths in _ALWAYS_TRIED:
            scale = nearest_scale(amax * (sixteenths / 16.0 / 6.0))
            keys.append(_key(magnitudes, scale, unit, half_step))
        first = functools.reduce(cutlass.min, keys)
        second = _smallest_above(first, keys)
        third = _smallest_above(second, keys)
        place, scale = Int32(0), nearest_scale(amax * (_TRIED_AT_NEED[0] / 16.0 / 6.0))
        going_on = _may_be_best(scale, amax, unit, first)
        while going_on:
            first, second, third = _insert(_key(magnitudes, scale, unit, half_step), first, second, third)
            place += 1
            scale = scale_of(amax * _multiple(_PACKED_AT_NEED, place))
            going_on = (place < len(_TRIED_AT_NEED)) & _may_be_best(scale, amax, unit, first)
        best = first & _SCALE
    else:
        best = scale_of(amax)
    limit = as_bits(_limit(first))
    return _settle(pairs, amax, second <= limit, third <= limit, first, second, best, exchange)


def _smallest_above(least: Uint32, keys: list[Uint32]) -> Uint32:
    """The smallest key above another one, or infinity; above infinity the smallest of all."""
    # Differences of keys that are not above it wrap around.
    beyond = least + 1
    distance = Uint32(_INFINITY) - beyond
    for key in keys:
        distance = cutlass.min(distance, key - beyond)
    return beyond + distance


def _multiple(packed: int, place: Int32) -> Float32:
    sixteenths = Int32((Int64(packed) >> Int64(place * _BITS)) & ((1 << _BITS) - 1))
    return Float32(sixteenths) * (1.0 / 16.0)


def _may_be_best(scale: Uint32, amax: Float32, unit: Uint32, key: Uint32) -> cutlass.Boolean:
    """Whether the clipped part of the largest magnitude alone leaves a candidate a chance against a key."""
    reciprocal_of_unit = as_float((Uint32(2 * 127 << 7) - unit) << 16)
    clipped = larger(amax - from_e4m3(scale) * _LARGEST_CODE, Float32(0.0)) * reciprocal_of_unit
    return clipped * clipped <= _limit(key)


def _limit(key: Uint32) -> Float32:
    """What no estimate exceeds whose error is at most that of a key."""
    return fused(as_float(key), Float32(_RATIO), Float32(_SLACK))


def _insert(key: Uint32, first: Uint32, second: Uint32, third: Uint32) -> tuple[Uint32, Uint32, Uint32]:
    """Puts a key in its place among the smallest; a scale that is the best one already does not count twice."""
    key = when(key == first, Uint32(_INFINITY), key)
    third = cutlass.min(third, cutlass.max(second, key))
    second = cutlass.min(second, cutlass.max(first, key))
    return cutlass.min(first, key), second, third


def _key(magnitudes: list[Uint32], scale: Uint32, unit: Uint32, half_step: Uint32) -> Uint32:
    value = from_e4m3(scale)
    inverse, step = half_quotients.inverse_of(value, unit), half_quotients.step_of(value, unit)
    sums: list[Uint32] = []
    for i, magnitude in enumerate(magnitudes):
        code = half_quotients.rounded(product_of_halves(magnitude, inverse), half_step)
        difference = fused_halves(code, step, magnitude)
        if i < 4:
            sums.append(product_of_halves(difference, difference))
        else:
            sums[i % 4] = fused_halves(difference, difference, sums[i % 4])
    total = sum_of_halves(sum_of_halves(sums[0], sums[1]), sum_of_halves(sums[2], sums[3]))
    low, high = values_of_halves(total)
    return (as_bits(low + high) & Uint32(0xFFFFFF80)) | scale


@cute.jit
def _settle(
    pairs: list[Uint32],
    amax: Float32,
    contested: cutlass.Boolean,
    by_many: cutlass.Boolean,
    first: Uint32,
    second: Uint32,
    scale: Uint32,
    exchange: cutlass.Array,
) -> Uint32:
    """Decides by the exact errors wherever a lane's estimates do not, one lane after the other.

    Each half of the warp works out the error of one candidate.

    Args:
      pairs: Of the two blocks.
      amax: Their largest magnitude.
      contested: Whether there is anything to decide.
      by_many: Whether it may be any candidate, and not only that of one of two keys.
      first: A key.
      second: Another.
      scale: The result where there is nothing to decide.
      exchange: From :func:`allocate`.
    """
    lane = lane_idx()
    half, element = lane // _BLOCK, lane % _BLOCK
    place = warp_idx() * _PAIRS
    waiting = Uint32(vote_ballot_sync(contested))
    while waiting != 0:
        owner = Int32(31) - Int32(clz(waiting))
        waiting = waiting ^ (Uint32(1) << Uint32(owner))
        if lane == owner:
            for start in cutlass.range_constexpr(0, _PAIRS, 4):
                words = cutlass.Vector.from_elements(pairs[start : start + 4], Uint32)
                view(exchange.data_ptr(place + start), Uint32).store(words, alignment=16)
        primitives.bar_warp_sync(0xFFFFFFFF)
        values = [(view(exchange.data_ptr(place), Uint16) + (element + block)).load() for block in (0, _BLOCK)]
        primitives.bar_warp_sync(0xFFFFFFFF)
        magnitudes = [as_float((Uint32(value) & 0x7FFF) << 16) for value in values]

        number = when(by_many, Uint32(len(_SIXTEENTHS)), Uint32(0))
        choice = shuffle_sync((first & _SCALE) | ((second & _SCALE) << 8) | (number << 16), owner)
        amax_of_owner = shuffle_sync(amax, owner)
        best = (choice >> Uint32(8 * half)) & _SCALE
        error = _exact_error(magnitudes, from_e4m3(best))
        index = Int32(0)
        while index < Int32(choice >> 16):
            place_of_half = cutlass.min(index + half, Int32(len(_SIXTEENTHS) - 1))
            candidate = scale_of(amax_of_owner * _multiple(_PACKED, place_of_half))
            error, best = _better(error, best, _exact_error(magnitudes, from_e4m3(candidate)), candidate)
            index += 2
        error, best = _better(
            error, best, shuffle_sync_bfly(error, offset=_BLOCK), shuffle_sync_bfly(best, offset=_BLOCK)
        )
        scale = when(lane == owner, best, scale)
    return scale


def _better(error: Float32, scale: Uint32, other_error: Float32, other_scale: Uint32) -> tuple[Float32, Uint32]:
    better = (other_error < error) | ((other_error == error) & (other_scale < scale))
    return smaller(error, other_error), when(better, other_scale, scale)


def _exact_error(magnitudes: list[Float32], step: Float32) -> Float32:
    """Sum of the squared differences of the values of half a warp, in the order of the reference.

    The codes of exact ties do not matter here, since both have the same error; elsewhere a quotient is farther from a
    midpoint than its rounding errors reach, with a reciprocal that is off by several units in the last place.
    Differences have so few significant bits that their squares are exact.

    Args:
      magnitudes: One of each block.
      step: Value of the scale.
    """
    inverse = when(step == 0.0, Float32(0.0), reciprocal(step))
    coarse = inverse * (_HALF_STEP_UNIT * _JUST_ABOVE)

    def difference(value: Float32) -> Float32:
        # Adding this number rounds to the step of the codes around the quotient: a half, one or two.
        rounder = larger(value * coarse, Float32(_HALF_STEP_UNIT))
        code = smaller((value * inverse + rounder) - rounder, Float32(_LARGEST_CODE))
        return code * step - value

    one, other = (difference(value) for value in magnitudes)
    error = rounded_product(one, one) + other * other
    for offset in (8, 4, 2, 1):
        error = error + shuffle_sync_bfly(error, offset=offset)
    return error
