"""Maps from base-2 log score to E2M1 payload; docs/numerics.md has the contract.

A map takes ``xc = raw * log2_scale + bias``, of which a multiply-add gives any affine function straight from the raw
score.
"""

import dataclasses
from collections.abc import Callable
from typing import Literal

from kernels.instructions import exp2, fused, signed_square_plus
from kernels.words import Float32

Kind = Literal["affine", "square", "exponential"]

_PAIRS = 16  # of keys in a block


@dataclasses.dataclass(frozen=True)
class Map:
    """What is known of a map when a kernel is compiled.

    Attributes:
      kind: Its form.
      mixed: Whether the exponential takes the place of the map in the published quarter of the pairs of keys.
      odd_tiles: Whether it does so in odd tiles of 128 query rows alone.
    """

    kind: Kind
    mixed: bool = False
    odd_tiles: bool = False


@dataclasses.dataclass(frozen=True)
class Constants:
    """Numbers of a map.

    Attributes:
      log2_scale: From a raw score to a base-2 log score.
      slope: Of the affine part.
      intercept: Likewise.
      constant: Added to the square.
    """

    log2_scale: Float32
    slope: Float32
    intercept: Float32
    constant: Float32


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """How a target computes with lists of values.

    Attributes:
      fused: ``value * factor + addend`` of values, factor and addend.
      squares_plus: ``value * abs(value) + addend`` of values and addend.
    """

    fused: Callable[[list[Float32], Float32, Float32], list[Float32]]
    squares_plus: Callable[[list[Float32], Float32], list[Float32]]


ONE_BY_ONE = Arithmetic(
    lambda values, factor, addend: [fused(value, factor, addend) for value in values],
    lambda values, addend: [signed_square_plus(value, addend) for value in values],
)


def exact_pairs(quarter: int) -> tuple[int, ...]:
    """The pairs of keys of a block that take the exponential where a map is mixed."""
    return tuple(pair for pair in range(_PAIRS) if pair % 8 in (quarter, 4))


def exponential(constants: Constants) -> Constants:
    """The numbers of the exponential that a mixed map has besides."""
    return dataclasses.replace(constants, slope=Float32(1.0), intercept=Float32(0.0))


def payloads(
    kind: Kind,
    constants: Constants,
    raw: list[Float32],
    bias: Float32,
    exponent: int = 0,
    arithmetic: Arithmetic = ONE_BY_ONE,
) -> list[Float32]:
    """Payloads of scores.

    Args:
      kind: Form of the map.
      constants: Its numbers.
      raw: Scores.
      bias: Of their block.
      exponent: An even number; the payloads are scaled by two to its power.
      arithmetic: Of the target.

    Returns:
      float32, to be rounded.
    """
    if kind == "exponential":
        offset = bias + (constants.intercept + Float32(exponent))
        return [exp2(x) for x in arithmetic.fused(raw, constants.log2_scale, offset)]
    scale = Float32(2.0 ** (exponent // 2 if kind == "square" else exponent))
    slope = constants.slope * scale
    factor, offset = slope * constants.log2_scale, fused(slope, bias, constants.intercept * scale)
    affine = arithmetic.fused(raw, factor, offset)
    if kind == "affine":
        return affine
    constant = constants.constant * Float32(2.0**exponent)
    return arithmetic.squares_plus(affine, constant)
