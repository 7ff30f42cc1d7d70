"""Output and log-sum-exp of a warpgroup's rows, from registers to global memory."""

import cutlass
import cutlass.cute as cute
from cutlass.cute.arch import lane_idx
from kernels.words import Float32, Uint32, pair_of, when

Int32, Int64, Boolean, Pointer = cutlass.Int32, cutlass.Int64, cutlass.Boolean, cutlass.Pointer


def sum_over_four(value: Float32) -> Float32:
    """Sum over the four threads that share a row."""
    for offset in (1, 2):
        value = value + cute.arch.shuffle_sync_bfly(value, offset=offset)
    return value


def _transposed(words: list[Uint32]) -> list[Uint32]:
    """Word i of thread t becomes word t of thread i, among the four threads of a row."""
    lane = lane_idx() % 4
    for distance in (1, 2):
        upper = (lane & distance) != 0
        result = list(words)
        for i in range(4):
            if i & distance:
                continue
            j = i | distance
            sent = when(upper, words[i], words[j])
            received = cute.arch.shuffle_sync_bfly(sent, offset=distance)
            result[i] = when(upper, received, words[i])
            result[j] = when(upper, words[j], received)
        words = result
    return words


@cute.jit
def _store(target: Pointer, words: list[Uint32], there: Boolean) -> None:
    if there:
        target.store(cutlass.Vector.from_elements(words, Uint32), alignment=16)


def store_output(
    output: Pointer,
    accumulators: list[Float32],
    factors: list[Float32],
    rows: list[Int32],
    num_rows: Int32,
    num_heads: Int32,
    head: Int32,
    batch: Int32,
    head_size: int,
) -> None:
    """Writes two rows of bfloat16.

    Args:
      output: bfloat16 [B, num_rows, num_heads, head_size], as words.
      accumulators: Of the second product.
      factors: Of each row; zero selects zero whatever the accumulators hold.
      rows: The rows.
      num_rows: Rows that there are.
      num_heads: Heads.
      head: Head.
      batch: Batch entry.
      head_size: 64 or 128.
    """
    for row in (0, 1):
        factor = factors[row]
        empty = factor == Float32(0.0)
        start = ((Int64(batch) * num_rows + rows[row]) * num_heads + head) * (head_size // 2)
        for group in range(head_size // 32):
            words = []
            for column in range(4 * group, 4 * group + 4):
                low, high = (accumulators[4 * column + 2 * row + e] * factor for e in (0, 1))
                words.append(when(empty, Uint32(0), pair_of(low, high)))
            words = _transposed(words)
            _store(output + (start + group * 16 + lane_idx() % 4 * 4), words, rows[row] < num_rows)


@cute.jit
def store_lse(lse: Pointer, value: Float32, row: Int32, num_rows: Int32, head_index: Int64) -> None:
    """Writes the log-sum-exp of a row, by one of its four threads.

    Args:
      lse: float32 [B, N, num_rows].
      value: Natural log.
      row: The row.
      num_rows: Rows that there are.
      head_index: Of batch entry and head.
    """
    if (lane_idx() % 4 == 0) & (row < num_rows):
        (lse + (head_index * num_rows + row)).store(value)
