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
    rounded_product,
    rounded_sum,
    when,
)

Int32, Int64 = cutlass.Int32, cutlass.Int64

_SIXTEENTHS = (4, 5, 6, 7, 8, 10, 12, 14, 16, 18, 20)
"""The multiples, in the reference's order: of equal errors the first counts."""
_ONE = _SIXTEENTHS.index(16)
_ORDER = (_ONE, *range(_ONE + 1, len(_SIXTEENTHS)), *reversed(range(_ONE)))
"""Order of evaluation."""
_LARGER_THAN_ONE = len(_SIXTEENTHS) - _ONE
_BITS = 5
_PACKED_INDICES = sum(index << (_BITS * place) for place, index in enumerate(_ORDER))
_PACKED_MULTIPLES = sum(_SIXTEENTHS[index] << (_BITS * place) for place, index in enumerate(_ORDER))

_INFINITY = float("inf")
_LARGEST_CODE = 6.0
_HALF_STEP_UNIT = 2.0**22  # Numbers from here to twice this are multiples of a half, the step of the smallest codes.


def _unpack(packed: int, place: Int32) -> Int32:
    return Int32((Int64(packed) >> Int64(place * _BITS)) & ((1 << _BITS) - 1))


def _error(pairs: list[Uint32], step: Float32) -> Float32:
    """Sum of squared differences of two blocks of 16, in the order of the reference.

    The codes of exact ties do not matter here, since both have the same error; elsewhere a quotient is farther from a
    midpoint than its rounding errors reach.
    """
    inverse = when(step == 0.0, Float32(0.0), Float32(1.0) / step)
    coarse = inverse * _HALF_STEP_UNIT

    def square(value: Float32) -> Float32:
        # Adding this number rounds to the step of the codes around the quotient: a half, one or two.
        rounder = larger(value * coarse, Float32(_HALF_STEP_UNIT))
        code = (value * inverse + rounder) - rounder
        difference = when(code > _LARGEST_CODE, Float32(_LARGEST_CODE), code) * step - value
        return rounded_product(difference, difference)

    def both(pair: Uint32) -> tuple[Float32, Float32]:
        magnitudes = pair & MAGNITUDES
        return square(low_value(magnitudes)), square(high_value(magnitudes))

    first, second = pairs[:8], pairs[8:]
    terms = []
    for one, other in zip(first, second, strict=True):
        terms += [rounded_sum(a, b) for a, b in zip(both(one), both(other), strict=True)]
    while len(terms) > 1:
        half = len(terms) // 2
        terms = [rounded_sum(terms[i], terms[half + i]) for i in range(half)]
    return terms[0]


@cute.jit
def best_scale(pairs: list[Uint32], largest: Uint32) -> Uint32:
    """E4M3 byte of the shared scale.

    Args:
      pairs: 16 pairs of bfloat16, eight of each block.
      largest: Bits of the largest magnitude.
    """
    amax = as_float(largest << 16)
    best, best_error, best_index = scale_of(amax), Float32(_INFINITY), Int32(_ONE)
    place = Int32(0)
    going_on = largest <= 0x7F80
    while going_on:
        candidate = scale_of(amax * (Float32(_unpack(_PACKED_MULTIPLES, place)) * (1.0 / 16.0)))
        index = _unpack(_PACKED_INDICES, place)
        step = from_e4m3(candidate)
        clipped = larger(amax - step * _LARGEST_CODE, Float32(0.0))
        going_on = (place < _LARGER_THAN_ONE) | (rounded_product(clipped, clipped) <= best_error)
        if going_on:
            error = _error(pairs, step)
            better = (error < best_error) | ((error == best_error) & (index < best_index) & (error < _INFINITY))
            best = when(better, candidate, best)
            best_index = when(better, index, best_index)
            best_error = when(better, error, best_error)
        place += 1
        going_on = going_on & (place < len(_ORDER))
    return best
