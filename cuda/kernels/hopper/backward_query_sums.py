"""The gradient of the query: sums over key tiles in float32, and their conversion at the end.

The sums of a tile of 64 queries lie as accumulators do: float32 [tiles, 2 warpgroups of head_size / 2 channels,
head_size / 16, 128 threads, 4], so that a warp adds to contiguous memory.

With head size 64 each thread adds its own. With 128 a warpgroup leaves its accumulators in shared memory, and a thread
of the producer's warpgroup (:mod:`kernels.hopper.backward_adder`) has the copy engine add them while the warps go on:
additions by the threads stand in the way of whatever else they read or write.
"""

import cutlass
import cutlass.cute as cute
from cutlass.cute.arch import block_idx, thread_idx
from cutlass.experimental import primitives
from kernels import ring, tile
from kernels.hopper import backward_ring, epilogue
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

STAGES = 2
"""Tiles of a consumer in the ring of the copy engine; at least 2, since one is left before the last is handed over."""
_WARPS, _THREADS = 4, 128  # of a warpgroup
_TWICE_BIAS = 254 << 23


def inverse_scale(gradient_scale: Pointer, group: Int64) -> Float32:
    """The reciprocal of the power of two of a key/value head, exactly.

    Args:
      gradient_scale: float32 [B, K].
      group: Index of batch entry and key/value head.
    """
    return as_float(Uint32(_TWICE_BIAS) - load_if(Boolean(True), view(gradient_scale, Uint32) + group, 1)[0])


def by_copy_engine(head_size: int) -> bool:
    """Whether the copy engine adds."""
    return head_size == 128


def place_of(consumer: Int32, index: Int32) -> ring.Place:
    """Where the tile of this number of a consumer goes."""
    return ring.Place(consumer * STAGES + index % STAGES, index // STAGES & 1)


@cute.jit
def add(
    sums: Pointer,
    sums_ring: ring.Ring | None,
    index: Int32,
    accumulators: list[Float32],
    query_tile: Int32,
    warp: Int32,
    head_size: Constexpr,
) -> None:
    """Adds half of the channels of a tile, or leaves them for :func:`hand_over`.

    Args:
      sums: float32 [B, N, T', head_size].
      sums_ring: Of the copy engine; None if threads add.
      index: Of the tile, of those that the warpgroup adds.
      accumulators: Of this thread, with ``head_size / 2`` columns.
      query_tile: Tile, counted from the first one of the array.
      warp: Index of the warp in the thread block; the warpgroups after the first have a half of the channels each.
      head_size: 64 or 128.
    """
    if cutlass.const_expr(sums_ring is None):
        _add_by_threads(sums, accumulators, query_tile, warp, head_size)
    else:
        at = place_of(_half(warp), index)
        ring.wait(sums_ring.empty(at.stage), at.parity ^ 1)
        target = view(sums_ring.stage(at.stage), Float32) + thread_idx()[0] % _THREADS * 4
        for start in cutlass.range_constexpr(0, len(accumulators), 4):
            four = cutlass.Vector.from_elements(accumulators[start : start + 4], Float32)
            (target + start * _THREADS).store(four, alignment=16)


@cute.jit
def hand_over(sums_ring: ring.Ring | None, index: Int32, warp: Int32) -> None:
    """Has the copy engine add what :func:`add` has left, if it is to add; a fence must come between."""
    if cutlass.const_expr(sums_ring is not None):
        backward_ring.arrive(sums_ring.full(place_of(_half(warp), index).stage))


def _add_by_threads(sums: Pointer, accumulators: list[Float32], query_tile: Int32, warp: Int32, head_size: int) -> None:
    target = sums + (offset_of_half(query_tile, _half(warp), head_size) + thread_idx()[0] % _THREADS * 4)
    for start in range(0, len(accumulators), 4):
        primitives.inline_ptx(
            "red.relaxed.gpu.global.add.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
            read_only_args=[target + start * _THREADS, *accumulators[start : start + 4]],
        )


def _half(warp: Int32) -> Int32:
    return warp // _WARPS - 1


def offset_of_half(query_tile: Int32, half: Int32, head_size: int) -> Int64:
    """Of half of the channels of a tile, in the sums."""
    return (Int64(query_tile) * 2 + half) * (QUERIES * head_size // 2)


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
