"""Eight-bit copies of a tile, row by row and transposed.

A thread has 16 channels of four consecutive rows.
"""

from collections.abc import Callable

import cutlass
from kernels import transpose
from kernels.words import Float32, Uint32, bytes_of, high_value, low_value, pair_of, product_of_pairs

Int32, Int64, Pointer = cutlass.Int32, cutlass.Int64, cutlass.Pointer

BLOCK = 16
ROWS_A_THREAD = 4

Encode = Callable[[Float32, Float32], Uint32]


def encode_pair(pair: Uint32, multiplier: Uint32, encode: Encode) -> Uint32:
    """Bytes of a pair of channels times a power of two, in the low half.

    Args:
      pair: bfloat16 pair.
      multiplier: From :func:`pair_multiplier`.
      encode: Conversion of two numbers to bytes.
    """
    # Exact in bfloat16, but for what becomes zero or saturates in eight bits all the same.
    scaled = product_of_pairs(pair, multiplier)
    return encode(low_value(scaled), high_value(scaled))


def pair_multiplier(multiplier: Float32) -> Uint32:
    """A power of two, for both halves of a pair."""
    return pair_of(multiplier, multiplier)


def encode_row(pairs: list[Uint32], multiplier: Uint32, encode: Encode) -> list[Uint32]:
    """Bytes of each pair of channels, see :func:`encode_pair`."""
    return [encode_pair(pair, multiplier, encode) for pair in pairs]


def put_columns(turned: cutlass.Array, four_rows: Int32, block: Int32, rows: list[list[Uint32]]) -> None:
    """Writes encoded rows to the transposed tile in shared memory."""
    for pair in range(BLOCK // 2):
        transpose.put_four_rows(turned, four_rows, block * BLOCK + 2 * pair, [row[pair] for row in rows])


def put_columns_of_two_rows(turned: cutlass.Array, two_rows: Int32, block: Int32, rows: list[list[Uint32]]) -> None:
    """The same for threads that have two rows."""
    for pair in range(BLOCK // 2):
        transpose.put_two_rows(turned, two_rows, block * BLOCK + 2 * pair, [row[pair] for row in rows])


def store_row(target: Pointer, row: list[Uint32]) -> None:
    """Writes the 16 bytes of an encoded row.

    Args:
      target: Their place, as words.
      row: From :func:`encode_row`.
    """
    words = [bytes_of(row[i], row[i + 1], 0x5410) for i in range(0, len(row), 2)]
    target.store(cutlass.Vector.from_elements(words, Uint32), alignment=16)
