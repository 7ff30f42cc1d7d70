"""From a matrix descriptor to the 16-byte chunks of shared memory that it means.

The layouts are the canonical layouts of the PTX ISA ("Strides", "Canonical layouts" of tcgen05; "Shared Memory Matrix
Layout" of wgmma). With offsets in chunks, a K-major operand has chunk j of row r at

    start + r // 8 * stride + r % 8 * width + j           of `width` chunks a row, swizzled
    start + r // 8 * stride + r % 8 + j * leading         not swizzled

and an MN-major operand has chunk m of the k-th row of M or N at

    start + m % width + m // width * leading + k % 8 * width + k // 8 * stride       swizzled
    start + m * stride + k % 8 + k // 8 * leading                                    not swizzled

Swizzling replaces the low bits of the chunk within its row by their exclusive or with the row's number, both taken
from the absolute shared address, so that a descriptor may start inside a pattern.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ..checks.races import Actor
from ..errors import DescriptorFaultError
from ..machine.memory import CHUNK, SharedMemory
from ..ptx.syntax import Instruction
from .descriptors import MatrixDescriptor, Swizzle
from .formats import WIDTH, decode

_PERIOD = 64  # chunks after which every swizzling pattern repeats


def k_major_chunks(matrix: MatrixDescriptor, rows: int, chunks: int) -> np.ndarray:
    """(rows, chunks) chunk numbers of an operand whose K dimension is contiguous, for `chunks` * 16 bytes of K."""
    if matrix.swizzle.shift:
        raise DescriptorFaultError("32-byte atoms are for operands whose M or N dimension is contiguous")
    if matrix.absolute:
        return _split_rows(matrix, rows, chunks)
    width = matrix.swizzle.chunks
    if width > 1 and matrix.start % width + chunks > width:
        raise DescriptorFaultError(
            f"{chunks * CHUNK} bytes of K cross the end of a swizzled row of {width * CHUNK} bytes"
        )
    phase = matrix.start % _PERIOD
    index = _k_major(phase, matrix.leading, matrix.stride, matrix.swizzle, rows, chunks)
    return index + (matrix.start - phase)


def mn_major_chunks(matrix: MatrixDescriptor, chunks: int, k: int) -> np.ndarray:
    """(k, chunks) chunk numbers of an operand whose M or N dimension is contiguous, `chunks` * 16 bytes long."""
    if matrix.absolute:
        raise DescriptorFaultError("an absolute leading dimension is for operands whose K dimension is contiguous")
    phase = matrix.start % _PERIOD
    index = _mn_major(phase, matrix.leading, matrix.stride, matrix.swizzle, chunks, k)
    return index + (matrix.start - phase)


def _split_rows(matrix: MatrixDescriptor, rows: int, chunks: int) -> np.ndarray:
    """Absolute address mode: what does not fit into a row of 128 bytes goes on at the start of another buffer."""
    width = matrix.swizzle.chunks
    if width != 8 or matrix.leading % width:
        raise DescriptorFaultError("an absolute leading dimension needs 128-byte swizzling and an aligned address")
    at = np.arange(chunks) + matrix.start % width
    bases = np.where(at < width, matrix.start - matrix.start % width, matrix.leading) + at % width
    row = np.arange(rows)[:, None]
    return _swizzled(bases + row // 8 * matrix.stride + row % 8 * width, matrix.swizzle)


@lru_cache(maxsize=512)
def _k_major(start: int, leading: int, stride: int, swizzle: Swizzle, rows: int, chunks: int) -> np.ndarray:
    row, j = np.arange(rows)[:, None], np.arange(chunks)
    width = swizzle.chunks
    step = leading if width == 1 else 1
    return _swizzled(start + row // 8 * stride + row % 8 * width + j * step, swizzle)


@lru_cache(maxsize=512)
def _mn_major(start: int, leading: int, stride: int, swizzle: Swizzle, chunks: int, k: int) -> np.ndarray:
    row, m = np.arange(k)[:, None], np.arange(chunks)
    width = swizzle.chunks
    if width == 1:
        return start + m * stride + row % 8 + row // 8 * leading
    # 32-byte atoms repeat after 4 rows of 128 bytes, the others after 8.
    period = 4 if swizzle.shift else 8
    index = start + m % width + m // width * leading + row % period * width + row // period * stride
    return _swizzled(index, swizzle)


def _swizzled(index: np.ndarray, swizzle: Swizzle) -> np.ndarray:
    return index ^ ((index >> 3 & swizzle.mask) << swizzle.shift)


@dataclass(frozen=True, slots=True)
class SharedOperand:
    """An operand in shared memory.

    Attributes:
      chunks: (rows, chunks of K), or (K, chunks of rows) if `transposed`.
      element: format.
      packing: of the elements.
      transposed: M or N is contiguous.
    """

    chunks: np.ndarray
    element: str
    packing: str
    transposed: bool

    def read(self, shared: SharedMemory, actor: Actor | None, instruction: Instruction) -> np.ndarray:
        """(rows, K) float64."""
        raw = shared.read_chunks(self.chunks, actor, instruction)
        values = decode(raw.reshape(len(raw), -1), self.element, self.packing)
        return values.T if self.transposed else values


def shared_operand(
    matrix: MatrixDescriptor,
    element: str,
    rows: int,
    k_bytes: int,
    transposed: bool = False,
    packed: bool = False,
    window: slice = slice(None),
) -> SharedOperand:
    """The operand that a descriptor means.

    Args:
      matrix: its descriptor.
      element: format.
      rows: of M or N.
      k_bytes: of a row where K is contiguous; elements of 4 and 6 bits count as a byte unless `packed`.
      transposed: M or N is contiguous.
      packed: 4-bit elements lie two to a byte.
      window: the rows that are wanted; with `transposed`, whole chunks of them.
    """
    packing = "dense" if packed or WIDTH[element] >= 8 else "chunks"
    if not transposed:
        return SharedOperand(k_major_chunks(matrix, rows, k_bytes // CHUNK)[window], element, packing, False)
    size = max(8, WIDTH[element]) // 8
    if rows * size % CHUNK:
        raise DescriptorFaultError(f"{rows} contiguous elements of {element} do not fill 16-byte chunks")
    chunks = mn_major_chunks(matrix, rows * size // CHUNK, k_bytes // size)
    if window != slice(None):
        chunks = chunks[:, window.start * size // CHUNK : window.stop * size // CHUNK]
    return SharedOperand(chunks, element, packing, True)


def tensor_memory_operand(words: np.ndarray, element: str, packed: bool) -> np.ndarray:
    """(rows, K) float64 of an operand in tensor memory, from its words (columns, lanes).

    K runs along the columns, from the low bits of a word up; elements of 4 and 6 bits have a byte each unless `packed`.
    """
    raw = np.ascontiguousarray(words.T).view(np.uint8)
    return decode(raw, element, "dense" if packed or WIDTH[element] >= 8 else "bytes")
