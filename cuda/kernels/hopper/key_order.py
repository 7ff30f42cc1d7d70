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
      run: Neighbouring keys.
      stride: From one run to the next one of the thread; runs of its row's four threads follow one another.
      accumulators: Where the scores of a thread's keys are, for each of its two rows.
    """

    run: int
    stride: int
    accumulators: tuple[tuple[int, ...], tuple[int, ...]]

    def of_row(self, values: list, row: int) -> list:
        """The values of one row, in the order of its keys."""
        return [values[i] for i in self.accumulators[row]]

    def count_below(self, key: Int32) -> Int32:
        """How many keys of a thread come before a key of the tile, counted from the thread's first one."""
        key = cutlass.min(cutlass.max(key, 0), 4 * KEYS)
        return key // self.stride * self.run + cutlass.min(key % self.stride, self.run)


def _interleaved(row: int) -> tuple[int, ...]:
    return tuple(i for group in range(KEYS // 4) for i in accumulators_of_group(group, row))


def _by_block(row: int) -> tuple[int, ...]:
    return tuple(4 * (key // 2) + 2 * row + key % 2 for key in range(KEYS))


INTERLEAVED = KeyOrder(4, 16, (_interleaved(0), _interleaved(1)))
BY_BLOCK = KeyOrder(KEYS, 4 * KEYS, (_by_block(0), _by_block(1)))
