"""Maps from base-2 log score to E2M1 payload, scaled by 2**-14; docs/numerics.md has the contract.

A map takes ``xc = raw * log2_scale + bias``, of which a multiply-add gives any affine function straight from the raw
score.
"""

import dataclasses
from typing import Literal

import cutlass
from kernels.hopper.instructions import exp2, fused, signed_square_plus
from kernels.words import Float32, when

Int32 = cutlass.Int32

Kind = Literal["affine", "square", "exponential"]

_EXPONENT = -14
_SCALE, _ROOT = 2.0**_EXPONENT, 2.0 ** (_EXPONENT // 2)


@dataclasses.dataclass(frozen=True)
class Map:
    """What is known of a map when a kernel is compiled.

    Attributes:
      kind: Its form.
      mixed: Whether the exponential takes the place of the map in the published quarter of the pairs of keys.
    """

    kind: Kind
    mixed: bool = False


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


def apply(
    which: Map, constants: Constants, raw: list[Float32], bias: Float32, quarter: int, lane: Int32
) -> list[Float32]:
    """Payloads of a thread's scores of a block.

    Args:
      which: The map.
      constants: Its numbers.
      raw: Scores of the thread: keys 4 lane .. 4 lane + 3 of each 16 of the block.
      bias: Of the block.
      quarter: Which block of the tile it is.
      lane: Of the thread in its four.

    Returns:
      float32, to be rounded.
    """
    mapped = _simple(which.kind, constants, raw, bias)
    if not which.mixed:
        return mapped
    for pair in range(0, len(raw), 2):
        lanes = [t for t in range(4) if (2 * t + pair // 2 % 2) in (quarter, 4)]
        if lanes:
            chosen = lane == lanes[0]
            for other in lanes[1:]:
                chosen = chosen | (lane == other)
            exact = _simple(
                "exponential",
                dataclasses.replace(constants, slope=Float32(1.0), intercept=Float32(0.0)),
                raw[pair : pair + 2],
                bias,
            )
            for i in (0, 1):
                mapped[pair + i] = when(chosen, exact[i], mapped[pair + i])
    return mapped


def _simple(kind: Kind, constants: Constants, raw: list[Float32], bias: Float32) -> list[Float32]:
    if kind == "exponential":
        offset = bias + (constants.intercept + Float32(_EXPONENT))
        return [exp2(fused(score, constants.log2_scale, offset)) for score in raw]
    scale = Float32(_ROOT if kind == "square" else _SCALE)
    slope = constants.slope * scale
    factor, offset = slope * constants.log2_scale, fused(slope, bias, constants.intercept * scale)
    affine = [fused(score, factor, offset) for score in raw]
    if kind == "affine":
        return affine
    constant = constants.constant * Float32(_SCALE)
    return [signed_square_plus(y, constant) for y in affine]
