"""The maximum of the scores that a thread has of each of its two rows.

As integers: of those the maximum of three is one instruction, and it takes as long as that of two floats. Negative
floats are in the opposite order, so where a row has nothing else the minimum of the integers is what is wanted. That is
looked for only if some thread of the warp needs it.
"""

from collections.abc import Callable

import cutlass
import cutlass.cute as cute
from kernels.words import Float32, Uint32, as_bits, as_float, when

Int32 = cutlass.Int32


@cute.jit
def of_rows(first: list[Float32], second: list[Float32]) -> list[Float32]:
    """The maximum of each list, or NaN if it holds one.

    Args:
      first: Scores of a row; a NaN among them must not have its sign set. That of wgmma, 0x7FFFFFFF, has not.
      second: Of the other row, likewise.
    """
    bits = [[Int32(as_bits(value)) for value in row] for row in (first, second)]
    found = [_reduced(row, cutlass.max) for row in bits]
    if cute.arch.vote_any_sync((found[0] | found[1]) < 0):
        least = [_reduced(row, cutlass.min) for row in bits]
        found = [when(one < 0, other, one) for one, other in zip(found, least, strict=True)]
    return [as_float(Uint32(value)) for value in found]


def _reduced(values: list[Int32], choose: Callable[[Int32, Int32], Int32]) -> Int32:
    """By threes, which the assembler makes one instruction."""
    while len(values) > 1:
        threes = [values[i : i + 3] for i in range(0, len(values) - len(values) % 3, 3)]
        rest = values[len(values) - len(values) % 3 :] if len(values) > 2 else []
        pairs = [values] if len(values) == 2 else []
        values = [choose(choose(a, b), c) for a, b, c in threes] + [choose(a, b) for a, b in pairs] + rest
    return values[0]
