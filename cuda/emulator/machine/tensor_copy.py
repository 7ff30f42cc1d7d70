"""Tiles of tensor maps between global and shared memory (PTX ISA, section Tensors).

A tile in shared memory is a sequence of rows of the innermost dimension; dimension 1 follows fastest. With a swizzle,
a row takes the whole span of the swizzle even if the box is narrower, and the permutation is that of the absolute
shared address: address bits 4.. are changed by bits 7.. (one bit for 32B, two for 64B, three for 128B).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..checks.races import Actor
from ..errors import DescriptorFaultError
from ..ptx.syntax import Instruction
from ..tensor_map import Swizzle, TensorMap
from .memory import CHUNK, GlobalMemory, SharedMemory

SHARED_ALIGNMENT = 128
_LINE_CHUNKS = 8  # chunks of the 128-byte lines whose number selects the permutation
_OUT_OF_BOUNDS_NAN = 0x7FF7  # in each 16 bits of an element
_TF32_NAN = 0x7FFFE000
_PADDED_STEP = 128  # of the first coordinate of the padded types


@dataclass(frozen=True)
class _Part:
    """The part of a tile that is inside of the tensor.

    Attributes:
      address: of its first byte in global memory.
      shape: of its bytes, innermost last.
      strides: of all dimensions but the last, in bytes.
      inside: where it is in the tile, or None when it is the whole tile.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    inside: tuple[slice, ...] | None


def load_tile(
    tensor: TensorMap,
    at: list[int],
    memory: GlobalMemory,
    shared: SharedMemory,
    offset: int,
    actor: Actor | None,
    instruction: Instruction,
) -> None:
    """Copy the tile at coordinates `at` (innermost first) to a byte offset of shared memory."""
    _check_coordinates(tensor, at, instruction)
    chunks = _chunks(tensor, offset)
    part = _part(tensor, at, instruction)
    values = _read_tile(tensor, part, memory, actor, instruction).reshape(*chunks.shape, CHUNK)
    if tensor.swizzle.flip:
        values = _flipped(chunks, values)
    shared.write_chunks(chunks, values, actor, instruction)


def read_source(
    tensor: TensorMap, at: list[int], shared: SharedMemory, offset: int, actor: Actor | None, instruction: Instruction
) -> np.ndarray | None:
    """What a store of the tile at coordinates `at` reads: the bytes inside of the tensor, or None."""
    _check_coordinates(tensor, at, instruction)
    _check_store(tensor, instruction)
    part = _part(tensor, at, instruction, store=True)
    if part is None:
        return None
    chunks = _chunks(tensor, offset)
    if part.inside is None:
        return _packed(tensor, shared.read_chunks(chunks, actor, instruction)).reshape(part.shape)
    # What is clipped is not read.
    inner, group = part.inside[-1], tensor.element.group_bytes or CHUNK
    used = (*part.inside[:-1], slice(inner.start // group, inner.stop // group))
    chunks = chunks.reshape(*tensor.counts[:0:-1], -1)[used]
    return _packed(tensor, shared.read_chunks(chunks, actor, instruction))


def write_destination(
    tensor: TensorMap, at: list[int], values: np.ndarray | None, memory: GlobalMemory, actor, instruction: Instruction
) -> None:
    """Store what `read_source` returned."""
    part = _part(tensor, at, instruction, store=True)
    if part is not None:
        memory.write_window(part.address, part.strides, values, actor, instruction)


def reduce_destination(
    tensor: TensorMap,
    at: list[int],
    values: np.ndarray | None,
    function: Callable[[np.ndarray, np.ndarray], np.ndarray],
    memory: GlobalMemory,
    actor: Actor | None,
    instruction: Instruction,
) -> None:
    """Replace the tile in global memory by `function` of its bytes and of what `read_source` returned."""
    part = _part(tensor, at, instruction, store=True)
    if part is not None and values is not None:
        memory.update_window(
            part.address, part.shape, part.strides, lambda old: function(old, values), actor, instruction
        )


def _check_coordinates(tensor: TensorMap, at: list[int], instruction: Instruction) -> None:
    if len(at) != tensor.rank:
        raise DescriptorFaultError(f"{instruction.where}: {len(at)} coordinates for a tensor map of rank {tensor.rank}")
    name = tensor.element.name
    if tensor.element.padded and at[0] % _PADDED_STEP:
        raise DescriptorFaultError(
            f"{instruction.where}: the first coordinate {at[0]} of {name} is no multiple of {_PADDED_STEP}"
        )
    if at[0] * tensor.element.bits % (8 * CHUNK) and not tensor.element.padded:
        # Not in the documentation; an H200 raises "illegal instruction".
        raise DescriptorFaultError(
            f"{instruction.where}: the first coordinate {at[0]} of {name} is no multiple of {CHUNK} bytes"
        )


def _check_store(tensor: TensorMap, instruction: Instruction) -> None:
    if tensor.element.name == "fp4_align16" or tensor.swizzle.flip:
        what = tensor.swizzle.name if tensor.swizzle.flip else tensor.element.name
        raise DescriptorFaultError(f"{instruction.where}: tensor maps with {what} cannot be stored to")


def _part(tensor: TensorMap, at: list[int], instruction: Instruction, store: bool = False) -> _Part | None:
    """What is inside of the tensor, or None when nothing is.

    A store writes the last 16 bytes of a row as a whole, elements out of bounds among them. This is not in the
    documentation; it was measured on an H200 with elements of 1, 2, 4 and 8 bytes, for reductions, too.
    """
    element, address = tensor.element, tensor.address
    if address is None:
        raise DescriptorFaultError(f"{instruction.where}: the tensor map is not bound to an address")
    shape, strides, inside, whole = [], [], [], True
    dims = tensor.dims
    if store and not element.padded:
        unit = 8 * CHUNK // element.bits
        dims = (-(-dims[0] // unit) * unit, *dims[1:])
    for i, (start, dim, count) in enumerate(zip(at, dims, tensor.counts, strict=True)):
        step = tensor.element_strides[i] if i else 1
        low = max(0, -(start // step)) if start < 0 else 0
        high = min(count, -(-(dim - start) // step))
        if low >= high:
            return None
        whole = whole and low == 0 and high == count
        size = element.bits if i == 0 else tensor.strides[i - 1] * 8
        address += (start + low * step) * size // 8
        scale = element.bits if i == 0 else 8
        shape.append((high - low) * scale // 8)
        inside.append(slice(low * scale // 8, high * scale // 8))
        if i:
            strides.append(tensor.strides[i - 1] * step)
    return _Part(address, tuple(shape[::-1]), tuple(strides[::-1]), None if whole else tuple(inside[::-1]))


def _read_tile(tensor: TensorMap, part: _Part | None, memory: GlobalMemory, actor, instruction) -> np.ndarray:
    """The bytes of a tile as they are in shared memory before the swizzle."""
    if part is None:
        values = _outside(tensor)
    else:
        values = memory.read_window(part.address, part.shape, part.strides, actor, instruction)
        if tensor.element.name.startswith("tf32"):
            values = _rounded_to_tf32(values)
        if part.inside is not None:
            tile = _outside(tensor)
            tile[part.inside] = values
            values = tile
    if not tensor.element.padded:
        return values
    groups = values.reshape(-1, tensor.element.group_bytes)
    padded = np.full((len(groups), CHUNK), 0xCD, np.uint8)
    padded[:, : tensor.element.group_bytes] = groups
    return padded


def _outside(tensor: TensorMap) -> np.ndarray:
    """A tile of out-of-bounds elements."""
    shape = (*tensor.counts[:0:-1], tensor.element.bytes(tensor.counts[0]))
    if not tensor.fill_nan:
        return np.zeros(shape, np.uint8)
    return np.full((*shape[:-1], shape[-1] // 2), _OUT_OF_BOUNDS_NAN, np.uint16).view(np.uint8)


def _rounded_to_tf32(values: np.ndarray) -> np.ndarray:
    """float32 rounded to nearest, ties to even, as the element type tf32 does on the way to shared memory."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    magnitude = bits & 0x7FFFFFFF
    rounded = bits + 0xFFF + (bits >> 13 & 1) & 0xFFFFE000
    rounded = np.where(magnitude >= 0x7F800000, bits, rounded)
    return np.where(magnitude > 0x7F800000, np.uint32(_TF32_NAN), rounded).astype(np.uint32).view(np.uint8)


def _packed(tensor: TensorMap, values: np.ndarray) -> np.ndarray:
    """Chunks of shared memory as they are in global memory: (..., chunks, 16) to (..., bytes)."""
    if not tensor.element.padded:
        return values.reshape(*values.shape[:-2], -1)
    # 16 values of 6 bits, one in the low bits of each byte, to 12 bytes.
    quads = (values & 0x3F).astype(np.uint32).reshape(*values.shape[:-1], 4, 4)
    words = quads[..., 0] | quads[..., 1] << 6 | quads[..., 2] << 12 | quads[..., 3] << 18
    three = np.ascontiguousarray(words).view(np.uint8).reshape(*words.shape, 4)[..., :3]
    return three.reshape(*values.shape[:-2], -1)


def _flipped(chunks: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The 8-byte halves of each chunk exchanged in odd lines."""
    odd = (chunks // _LINE_CHUNKS & 1).astype(bool)
    return np.where(odd[..., None], np.roll(values, CHUNK // 2, axis=-1), values)


def _chunks(tensor: TensorMap, offset: int) -> np.ndarray:
    """(rows, chunks of a row) numbers of the 16-byte chunks of a tile at a byte offset of shared memory."""
    chunks = tensor.shared_chunks.get(offset)
    if chunks is None:
        row = tensor.element.shared_bytes(tensor.counts[0])
        pitch = max(row, tensor.swizzle.span)
        rows = int(np.prod(tensor.counts[1:]))
        linear = (offset + np.arange(rows)[:, None] * pitch) // CHUNK + np.arange(row // CHUNK)
        chunks = tensor.shared_chunks[offset] = swizzled(linear, tensor.swizzle)
    return chunks


def swizzled(chunks: np.ndarray, swizzle: Swizzle) -> np.ndarray:
    """Where the swizzle moves 16-byte chunks of shared memory."""
    if swizzle.span == 0:
        return chunks
    atoms = swizzle.span // swizzle.atom
    return chunks ^ (chunks // _LINE_CHUNKS & (atoms - 1)) * (swizzle.atom // CHUNK)
