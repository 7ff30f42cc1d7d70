"""The query rows of a warpgroup, from NVFP4 in global memory to float16 in shared memory."""

import cutlass
import cutlass.cute as cute
from cutlass.cute.arch import thread_idx
from kernels import tile
from kernels.hopper import warpgroup
from kernels.hopper.nvfp4_values import factor_of, values_of_word
from kernels.words import Uint32, load_if, view

Int32, Int64, Pointer = cutlass.Int32, cutlass.Int64, cutlass.Pointer

_THREADS_A_ROW = 2
_CHUNK = 16  # bytes


def load(
    codes: Pointer, pages: Pointer, target: Pointer, head: Int64, first_row: Int32, num_rows: Int32, head_size: int
) -> None:
    """Expands 64 rows; the warpgroup's barrier must follow before a product reads them.

    Args:
      codes: uint8 [B, N, num_rows, head_size / 2], as words.
      pages: uint8 [B, N, tiles, head_size / 64, 512], as words.
      target: Shared memory of head_size / 64 parts of 64 rows of 128 bytes.
      head: Index of batch entry and head.
      first_row: Of the 64.
      num_rows: Rows there are; the others are zero.
      head_size: 64 or 128.
    """
    thread = thread_idx()[0] % 128
    row, part = thread // _THREADS_A_ROW, thread % _THREADS_A_ROW
    query = first_row + row
    valid = query < num_rows
    blocks = head_size // 16 // _THREADS_A_ROW
    tiles = (num_rows + tile.ROWS - 1) // tile.ROWS
    start = (head * num_rows + query) * (head_size // 8) + part * (2 * blocks)
    words = [word for i in range(0, 2 * blocks, 4) for word in load_if(valid, codes + (start + i), 4)]
    first_block = part * blocks
    page = (head * tiles + query // tile.ROWS) * (head_size // 64) + first_block // 4
    scales = load_if(valid, pages + (page * 128 + query % 32 * 4 + query % tile.ROWS // 32), 1)[0]
    scales = scales >> (first_block % 4 * 8)
    for i in range(blocks):
        factor = factor_of(scales >> (8 * i) & 0xFF)
        for half in (0, 1):
            channel = (first_block + i) * 16 + half * 8
            chunk = channel % 64 // 8 ^ row % 8
            place = channel // 64 * (warpgroup.ROWS * warpgroup.SWIZZLE_BYTES) + row * warpgroup.SWIZZLE_BYTES
            part_of_row = cutlass.Vector.from_elements(values_of_word(words[2 * i + half], factor), Uint32)
            view(target + (place + chunk * _CHUNK), Uint32).store(part_of_row, alignment=16)
    cute.arch.fence_view_async_shared()
