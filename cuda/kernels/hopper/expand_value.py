"""Value from MXFP4 to E5M2, with one more power of two for each tile.

E5M2 holds an E2M1 code times a power of two exactly over 28 octaves. The largest scale of a tile goes to the top of
that range; blocks whose scale is more than 2**27 times smaller round.

Keys come in the order by block of :mod:`kernels.hopper.key_order`: of each 16 places, those from 4 t on have keys of
block t.
"""

import cutlass
import cutlass.cute as cute
from cutlass.cute.arch import block_idx, thread_idx
from cutlass.experimental import primitives
from kernels import shared, tile
from kernels.hopper.nvfp4_values import HIGH_MAGNITUDES, LOW_MAGNITUDES
from kernels.instructions import exp2, four_e5m2
from kernels.words import Float32, Uint32, load_if, view, when

Int32, Int64, Pointer, Constexpr = cutlass.Int32, cutlass.Int64, cutlass.Pointer, cutlass.Constexpr

TOP_EXPONENT = 12
"""Of the factor of the codes with the largest scale; 6 * 2**12 is in E5M2's range."""
_BIAS = 127
_NAN_BYTE = 255
_KEYS = 32
_BLOCKS = tile.ROWS // _KEYS
_PARTS = _KEYS // 8


@cute.jit
def _largest_byte(word: Uint32, scratch: cutlass.Array, threads: Constexpr) -> Int32:
    """The largest byte, NaN's left out, of all words of the thread block."""
    largest = Int32(0)
    for i in cutlass.range_constexpr(4):
        byte = Int32(word >> (8 * i) & 0xFF)
        largest = cutlass.max(largest, when(byte == _NAN_BYTE, Int32(0), byte))
    for distance in cutlass.range_constexpr(5):
        largest = cutlass.max(largest, cute.arch.shuffle_sync_bfly(largest, offset=1 << distance))
    thread, _, _ = thread_idx()
    if thread % 32 == 0:
        view(scratch.data_ptr(thread // 32), Int32).store(largest)
    primitives.barrier_cta_sync(0)
    for warp in cutlass.range_constexpr(threads // 32):
        largest = cutlass.max(largest, view(scratch.data_ptr(warp), Int32).load())
    return largest


def _value(codes: Uint32, index: int, factor: Float32) -> Float32:
    """The value of a code of a word."""
    code = (
        "{ .reg .b32 l, h, b; .reg .b16 t; "
        f"mov.b32 l, {LOW_MAGNITUDES:#x}; mov.b32 h, {HIGH_MAGNITUDES:#x}; prmt.b32 b, l, h, {{$r0}}; "
        "shl.b32 b, b, 8; cvt.u16.u32 t, b; cvt.f32.f16 {$w0}, t; }"
    )
    magnitude = primitives.inline_ptx(code, write_only_types=[Float32], read_only_args=[codes >> (4 * index) & 7])
    sign = codes << (28 - 4 * index) & Uint32(0x80000000)
    signed = primitives.inline_ptx(
        "{ .reg .b32 t; mov.b32 t, {$r0}; or.b32 t, t, {$r1}; mov.b32 {$w0}, t; }",
        write_only_types=[Float32],
        read_only_args=[magnitude, sign],
    )
    return signed * factor


def _bytes_of_part(codes: Pointer, scales: Uint32, largest: Int32) -> tuple[list[Uint32], list[Uint32]]:
    """The first four and the last four of eight keys of each block, whose codes are four words apart."""
    low, high = [], []
    for block in range(_BLOCKS):
        byte = Int32(scales >> (block * 8) & 0xFF)
        power = exp2(Float32(byte - largest + TOP_EXPONENT))
        factor = when(byte == _NAN_BYTE, Float32(float("nan")), power)
        (word,) = load_if(cutlass.Boolean(True), codes + 4 * block, 1)
        values = [_value(word, i, factor) for i in range(8)]
        low.append(four_e5m2(*values[:4]))
        high.append(four_e5m2(*values[4:]))
    return low, high


@cute.kernel
def expand_value(
    codes: Pointer,
    pages: Pointer,
    values: Pointer,
    exponents: Pointer,
    num_keys: Int32,
    num_heads: Int32,
    head_size: Constexpr,
) -> None:
    """Expands a tile.

    Args:
      codes: uint8 [B, num_heads, head_size, 64 tiles].
      pages: uint8 [B, num_heads, 1, tiles, 512].
      values: E5M2 [B, num_heads, head_size, 128 tiles]; place 16 w + 4 t + j of a tile has key 32 t + 4 w + j.
      exponents: int32 [B, num_heads, tiles]; two to their power times the values are the MXFP4 values.
      num_keys: Keys.
      num_heads: Heads.
      head_size: 64 or 128.
    """
    head_index, key_tile, batch = block_idx()
    thread, _, _ = thread_idx()
    tiles = (num_keys + tile.ROWS - 1) // tile.ROWS
    head = Int64(batch) * num_heads + head_index
    codes, pages, values = (view(pointer, Uint32) for pointer in (codes, pages, values))
    exponents = view(exponents, Int32)
    threads = 2 * head_size
    scratch = shared.words(8)

    page = pages + (head * tiles + key_tile) * 128
    word = load_if(thread < 128, page + thread, 1)[0]
    largest = _largest_byte(word, scratch, threads)
    if thread == 0:
        (exponents + (head * tiles + key_tile)).store(largest - (_BIAS + TOP_EXPONENT))
    # A thread has eight keys of each block, which are 32 neighbouring places.
    for step in cutlass.range_constexpr(head_size * _PARTS // threads):
        index = step * threads + thread
        channel, part = index // _PARTS, index % _PARTS
        scales = load_if(cutlass.Boolean(True), page + (channel % 32 * 4 + channel // 32), 1)[0]
        row = head * head_size + channel
        place = codes + (row * (tiles * 16) + key_tile * 16 + part)
        low, high = _bytes_of_part(place, scales, largest)
        target = values + (row * (tiles * 32) + key_tile * 32 + part * 8)
        for start, words in ((0, low), (4, high)):
            (target + start).store(cutlass.Vector.from_elements(words, Uint32), alignment=16)
