"""The order of keys in a tile for the first product.

The accumulators of a product and the 8-bit A operand of the next lie differently over the threads: of each row a thread
has columns ``8 i + 2 t + e`` of the one, and of each 32 columns ``4 t .. 4 t + 3`` and ``16 + 4 t .. 16 + 4 t + 3`` of
the other. Rows of the key tile are in an order such that a thread's scores are those of the keys whose probabilities it
has to provide. There are two:

| order | keys of a thread | values |
|---|---|---|
| interleaved | those of its columns of the A operand | in their own order |
| by block | block ``t`` of 32, whole, so that a thread finds its scale alone | moved likewise |
"""

import dataclasses

import cutlass

Int32 = cutlass.Int32

KEYS = 32
"""Of a tile and a row, in each of four threads."""


def key_of_row(row: Int32) -> Int32:
    """The key of a row of the tile in the interleaved order."""
    return row // 16 * 16 + row % 8 // 2 * 4 + row % 2 * 2 + row // 8 % 2


def key_of_row_by_block(row: Int32) -> Int32:
    """The key of a row of the tile in the order by block."""
    return row % 8 // 2 * KEYS + row // 8 * 2 + row % 2


def accumulators_of_group(group: int, row: int) -> list[int]:
    """In the interleaved order, the accumulators of one row whose keys are four consecutive ones, in this order.

    Args:
      group: Of 16 keys.
      row: 0 or 1.
    """
    return [4 * (2 * group + half) + 2 * row + element for element in (0, 1) for half in (0, 1)]


@dataclasses.dataclass(frozen=True)
class KeyOrder:
    """Which keys a thread has.

    Attributes:
      keys: Of thread 0 of a row's four.
      distance: From them to those of the next thread.
      accumulators: Where the scores of these keys are, for each of the thread's two rows.
    """

    keys: tuple[int, ...]
    distance: int
    accumulators: tuple[tuple[int, ...], tuple[int, ...]]

    def of_row(self, values: list, row: int) -> list:
        """The values of one row, in the order of its keys."""
        return [values[i] for i in self.accumulators[row]]


def _interleaved(row: int) -> tuple[int, ...]:
    return tuple(i for group in range(KEYS // 4) for i in accumulators_of_group(group, row))


def _by_block(row: int) -> tuple[int, ...]:
    return tuple(4 * (key // 2) + 2 * row + key % 2 for key in range(KEYS))


INTERLEAVED = KeyOrder(
    tuple(16 * group + i for group in range(KEYS // 4) for i in range(4)), 4, (_interleaved(0), _interleaved(1))
)
BY_BLOCK = KeyOrder(tuple(range(KEYS)), KEYS, (_by_block(0), _by_block(1)))
