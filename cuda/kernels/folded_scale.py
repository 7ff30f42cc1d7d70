"""The scale that two NVFP4 blocks of a row share: of eleven multiples of their joint ``amax / 6`` the best by error.

The reference's choice is reproduced bit for bit: the same differences, which are exact, squared and added in the same
order. A candidate below ``amax / 6`` clips the largest element at least, and from the moment that this alone is worse
than the best error so far, no smaller candidate needs to be tried.
"""

import cutlass
import cutlass.cute as cute
from kernels.nvfp4 import scale_of
from kernels.words import (
    MAGNITUDES,
    Float32,
    Uint32,
    as_float,
    from_e4m3,
    high_value,
    larger,
    low_value,
    reciprocal,
    rounded_product,
    smaller,
    when,
)

Int32, Int64 = cutlass.Int32, cutlass.Int64

_SIXTEENTHS = (4, 5, 6, 7, 8, 10, 12, 14, 16, 18, 20)
"""The multiples, in the reference's order: of equal errors the first counts."""
_ONE = _SIXTEENTHS.index(16)
_ORDER = (_ONE, *range(_ONE + 1, len(_SIXTEENTHS)), *reversed(range(_ONE)))
"""Order of evaluation."""
_BITS = 5
_PACKED_ORDER, _PACKED_SIXTEENTHS = (
    sum(value << (_BITS * place) for place, value in enumerate(values)) for values in (_ORDER, _SIXTEENTHS)
)

_INFINITY = float("inf")
_BLOCK = 16
_LARGEST_CODE = 6.0
_SMALLEST_NORMAL, _LARGEST_SCALE = 2.0**-6, 448.0
_HALF_STEP_UNIT = 2.0**22  # Numbers from here to twice this are multiples of a half, the step of the smallest codes.
_JUST_ABOVE = 1.0 + 2.0**-18  # A quotient of 2 or 4 must reach its binade even if the reciprocal is rounded down.


def _unpack(packed: int, place: Int32) -> Int32:
    return Int32((Int64(packed) >> Int64(place * _BITS)) & ((1 << _BITS) - 1))


def _magnitudes(pairs: list[Uint32]) -> list[Float32]:
    values = []
    for pair in pairs:
        magnitudes = pair & MAGNITUDES
        values += [low_value(magnitudes), high_value(magnitudes)]
    return values


def _sum_of_squares(magnitudes: list[Float32], step: Float32, clips: bool) -> Float32:
    """Squared differences of two blocks of 16, added in the order of the reference.

    The codes of exact ties do not matter here, since both have the same error; elsewhere a quotient is farther from a
    midpoint than its rounding errors reach, with a reciprocal that is off by several units in the last place.
    Differences have at most 8 significant bits wherever candidates differ, so that their squares are exact, and adding
    one is rounded once.

    Args:
      magnitudes: Of 32 values, block by block.
      step: Value of the scale.
      clips: Whether quotients may exceed the largest code by so much that they would round to a larger one.
    """
    inverse = when(step == 0.0, Float32(0.0), reciprocal(step))
    coarse = inverse * (_HALF_STEP_UNIT * _JUST_ABOVE)

    def difference(value: Float32) -> Float32:
        # Adding this number rounds to the step of the codes around the quotient: a half, one or two.
        rounder = larger(value * coarse, Float32(_HALF_STEP_UNIT))
        code = (value * inverse + rounder) - rounder
        if clips:
            code = smaller(code, Float32(_LARGEST_CODE))
        return code * step - value

    def sum_from(start: int, stride: int) -> Float32:
        # By halves, as the reference: the sum of the terms start, start + stride, ... Depth first, for few registers.
        if stride == _BLOCK:
            one, other = (difference(magnitudes[i]) for i in (start, start + _BLOCK))
            return rounded_product(one, one) + other * other
        return sum_from(start, 2 * stride) + sum_from(start + stride, 2 * stride)

    return sum_from(0, 1)


@cute.jit
def _error(magnitudes: list[Float32], step: Float32, index: Int32) -> Float32:
    error = Float32(0.0)
    # From amax / 6 on, a rounded scale leaves quotients below 6.4, unless it is subnormal or saturated.
    if (index >= _ONE) & (step >= _SMALLEST_NORMAL) & (step < _LARGEST_SCALE):
        error = _sum_of_squares(magnitudes, step, clips=False)
    else:
        error = _sum_of_squares(magnitudes, step, clips=True)
    return error


@cute.jit
def best_scale(pairs: list[Uint32], largest: Uint32) -> Uint32:
    """E4M3 byte of the shared scale.

    Args:
      pairs: 16 pairs of bfloat16, eight of each block.
      largest: Bits of the largest magnitude.
    """
    magnitudes = _magnitudes(pairs)
    amax = as_float(largest << 16)
    best_error, best_index = Float32(_INFINITY), Int32(_ONE)
    place = Int32(0)
    going_on = largest <= 0x7F80
    while going_on:
        index = _unpack(_PACKED_ORDER, place)
        step = from_e4m3(_candidate(amax, index))
        clipped = larger(amax - step * _LARGEST_CODE, Float32(0.0))
        going_on = (index >= _ONE) | (rounded_product(clipped, clipped) <= best_error)
        if going_on:
            error = _error(magnitudes, step, index)
            better = (error < best_error) | ((error == best_error) & (index < best_index) & (error < _INFINITY))
            best_index = when(better, index, best_index)
            best_error = when(better, error, best_error)
        place += 1
        going_on = going_on & (place < len(_ORDER))
    return _candidate(amax, best_index)


def _candidate(amax: Float32, index: Int32) -> Uint32:
    multiple = Float32(_unpack(_PACKED_SIXTEENTHS, index)) * (1.0 / 16.0)
    return scale_of(amax * multiple)
