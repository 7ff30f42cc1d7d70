"""The order of keys in a tile for the first product.

The accumulators of a product and the 8-bit A operand of the next lie differently over the threads: a thread has columns
``8 i + 2 t + e`` of the one and ``16 g + 4 t .. 4 t + 3`` of the other. So row ``8 h + 2 t + e`` of each 16 rows of the
key tile holds key ``4 t + 2 e + h``. Then a thread's scores are those of the keys whose probabilities it has to
provide, and values stay in their own order.
"""

import cutlass

Int32 = cutlass.Int32


def key_of_row(row: Int32) -> Int32:
    """The key of a row of the tile."""
    return row // 16 * 16 + row % 8 // 2 * 4 + row % 2 * 2 + row // 8 % 2


def key_of_accumulator(index: int) -> int:
    """The key of an accumulator of either row, for the thread at 0 of its four; the others are 4, 8 and 12 further."""
    column, element = index // 4, index % 2
    return column // 2 * 16 + 2 * element + column % 2


def accumulators_of_group(group: int, row: int) -> list[int]:
    """The accumulators of one row whose keys are four consecutive ones, in this order.

    Args:
      group: Of 16 keys.
      row: 0 or 1.
    """
    return [4 * (2 * group + half) + 2 * row + element for element in (0, 1) for half in (0, 1)]
