"""The gradient of the query: sums over key tiles in float32, and their conversion at the end.

The sums of a tile of 64 queries lie as accumulators do: float32 [tiles, head_size / 64 parts, 8, 128 threads, 4], so
that a part of 64 channels is contiguous, where a warpgroup leaves it and where the copy engine adds it
(:mod:`kernels.hopper.backward_query_products`).
"""

import cutlass
import cutlass.cute as cute
from cutlass.cute.arch import block_idx, thread_idx
from kernels import tile
from kernels.hopper import epilogue
from kernels.hopper.backward_prepare import contributes
from kernels.hopper.backward_queries import QUERIES
from kernels.words import Float32, Uint32, as_float, load_if, view, when

Int32, Int64, Boolean, Pointer, Constexpr = (
    cutlass.Int32,
    cutlass.Int64,
    cutlass.Boolean,
    cutlass.Pointer,
    cutlass.Constexpr,
)

_THREADS = 128  # of a warpgroup
_TWICE_BIAS = 254 << 23


def inverse_scale(gradient_scale: Pointer, group: Int64) -> Float32:
    """The reciprocal of the power of two of a key/value head, exactly.

    Args:
      gradient_scale: float32 [B, K].
      group: Index of batch entry and key/value head.
    """
    return as_float(Uint32(_TWICE_BIAS) - load_if(Boolean(True), view(gradient_scale, Uint32) + group, 1)[0])


def offset_of(query_tile: Int32, head_size: int) -> Int64:
    """Of a tile, in the sums."""
    return Int64(query_tile) * (QUERIES * head_size)


def store(target: Pointer, accumulators: list[Float32]) -> None:
    """Leaves a part of a tile in shared memory; a fence must follow.

    Args:
      target: Of the part.
      accumulators: Of this thread, with 64 columns.
    """
    place = view(target, Float32) + thread_idx()[0] % _THREADS * 4
    for start in range(0, len(accumulators), 4):
        four = cutlass.Vector.from_elements(accumulators[start : start + 4], Float32)
        (place + start * _THREADS).store(four, alignment=16)


@cute.kernel
def backward_finish_query(
    sums: Pointer,
    lse: Pointer,
    gradient_scale: Pointer,
    query_gradient: Pointer,
    num_rows: Int32,
    num_heads: Int32,
    heads_a_group: Int32,
    unit: Float32,
    head_size: Constexpr,
) -> None:
    """Converts a tile of 64 rows of a head, by 128 threads.

    Args:
      sums: float32 [B, N, T', head_size], see above.
      lse: float32 [B, N, num_rows].
      gradient_scale: float32 [B, N / heads_a_group].
      query_gradient: bfloat16 [B, num_rows, N, head_size].
      num_rows: Rows of a head.
      num_heads: Heads.
      heads_a_group: Query heads of a key/value head.
      unit: Factor of the gradient without its scale.
      head_size: 64 or 128.
    """
    head, query_tile, batch = block_idx()
    thread, _, _ = thread_idx()
    head_index = Int64(batch) * num_heads + head
    padded_tiles = (num_rows + tile.ROWS - 1) // tile.ROWS * (tile.ROWS // QUERIES)
    source = view(sums, Uint32) + ((head_index * padded_tiles + query_tile) * (QUERIES * head_size) + thread * 4)
    accumulators = []
    for step in cutlass.range_constexpr(head_size // 8):
        accumulators += [as_float(word) for word in load_if(Boolean(True), source + step * (4 * _THREADS), 4)]
    group = Int64(batch) * (num_heads // heads_a_group) + head // heads_a_group
    factor = unit * inverse_scale(gradient_scale, group)
    rows = [query_tile * QUERIES + (thread // 32 * 16 + thread % 32 // 4 + 8 * i) for i in (0, 1)]
    factors = [
        when(contributes(view(lse, Uint32), row < num_rows, head_index * num_rows + row), factor, Float32(0.0))
        for row in rows
    ]
    epilogue.store_output(
        view(query_gradient, Uint32), accumulators, factors, rows, num_rows, num_heads, head, batch, head_size
    )
