"""Tiles between global and shared memory, against a reference that moves one element at a time."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from cuda.emulator.errors import DescriptorFaultError, MemoryFaultError
from cuda.emulator.machine.memory import SHARED_BASE, GlobalMemory, SharedMemory
from cuda.emulator.machine.tensor_copy import load_tile, read_source, reduce_destination, write_destination
from cuda.emulator.ptx.syntax import Instruction
from cuda.emulator.tensor_map import TensorMap

_INSTRUCTION = Instruction("test", (), None, False, 7, "test;", 0)
_UNTOUCHED = 0xCD
_SPANS = {"none": 0, "32B": 32, "64B": 64}  # all others have 128


def _place(linear: int, swizzle: str) -> int:
    """Where the byte of an unswizzled address is: 16-byte columns permuted by the number of the 128-byte line."""
    line, column, byte = linear // 128, linear // 16 % 8, linear % 16
    if swizzle in ("32B", "64B", "128B"):
        column ^= line % {"32B": 2, "64B": 4, "128B": 8}[swizzle]
    elif swizzle.startswith("128B_atom_32B"):
        column = (column // 2 ^ line % 4) * 2 + column % 2
    elif swizzle == "128B_atom_64B":
        column = (column // 4 ^ line % 2) * 4 + column % 4
    if swizzle.endswith("flip_8B") and line % 2:
        byte ^= 8
    return line * 128 + column * 16 + byte


def _elements(tensor: TensorMap, at: list[int], width: int = 0):
    """Each element's offset in the unswizzled tile, and its byte offset in the array or None.

    `width` is the size of the innermost dimension if it is not the map's.
    """
    size = tensor.element.bits // 8
    counts = [-(-n // s) for n, s in zip(tensor.box, tensor.element_strides, strict=True)]
    counts[0] = tensor.box[0]
    pitch = max(counts[0] * size, _SPANS.get(tensor.swizzle.name, 128))
    for row, outer in enumerate(itertools.product(*(range(n) for n in counts[:0:-1]))):
        place = [c + i * s for c, i, s in zip(at[1:], outer[::-1], tensor.element_strides[1:], strict=True)]
        rows_inside = all(0 <= c < d for c, d in zip(place, tensor.dims[1:], strict=True))
        for i in range(counts[0]):
            inside = rows_inside and 0 <= at[0] + i < (width or tensor.dims[0])
            offset = (at[0] + i) * size + sum(c * s for c, s in zip(place, tensor.strides, strict=True))
            yield row * pitch + i * size, offset + tensor.offset_bytes if inside else None


def _image(tensor: TensorMap, at: list[int], offset: int, nbytes: int, fill: bytes) -> np.ndarray:
    image = np.full(SHARED_BASE + nbytes, _UNTOUCHED, np.uint8)
    source, size = tensor.array.reshape(-1).view(np.uint8), tensor.element.bits // 8
    for linear, where in _elements(tensor, at):
        for byte in range(size):
            value = fill[byte] if where is None else source[where + byte]
            image[_place(offset + linear + byte, tensor.swizzle.name)] = value
    return image


def _loaded(tensor: TensorMap, at: list[int], offset: int = SHARED_BASE, nbytes: int = 1 << 14) -> np.ndarray:
    memory, shared = GlobalMemory(), SharedMemory(0, nbytes)
    tensor.bind(memory.bind(tensor.array))
    load_tile(tensor, at, memory, shared, offset, None, _INSTRUCTION)
    assert (shared.data[shared.written == 0] == _UNTOUCHED).all()
    return shared.data


def _random(shape, dtype=np.uint8, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    shape = (shape,) if isinstance(shape, int) else shape
    return rng.integers(0, 256, (*shape[:-1], shape[-1] * np.dtype(dtype).itemsize), np.uint8).view(dtype)


# Array shape (pitch last), type, dims, box, coordinates: within, before and past the tensor.
_TILES = [
    ((100,), "u32", (90,), (64,), ((0,), (-4,), (80,), (92,), (-64,), (8,))),
    ((9, 40), "u16", (37, 9), (16, 4), ((0, 0), (-8, -2), (32, 7), (8, 20), (-104, 3))),
    ((4, 5, 32), "u8", (30, 5, 4), (16, 3, 2), ((0, 0, 0), (16, 4, -1), (-16, -2, 3))),
    ((2, 3, 3, 8), "f32", (7, 3, 3, 2), (8, 2, 2, 2), ((0, 0, 0, 0), (-4, 2, -1, 1))),
    ((2, 2, 2, 3, 4), "u64", (3, 3, 2, 2, 2), (2, 2, 2, 1, 2), ((0, 0, 0, 0, 0), (2, -1, 1, 1, -1))),
]


@pytest.mark.parametrize(("shape", "element", "dims", "box", "places"), _TILES, ids=[f"{len(t[2])}d" for t in _TILES])
def test_tiles_of_every_rank(shape, element, dims, box, places):
    dtype = {"u8": np.uint8, "u16": np.uint16, "u32": np.uint32, "f32": np.float32, "u64": np.uint64}[element]
    array = _random(shape, dtype)
    tensor = TensorMap(array, dims, array.strides[-2::-1], box, element)
    for at in places:
        np.testing.assert_array_equal(
            _loaded(tensor, list(at)), _image(tensor, list(at), SHARED_BASE, 1 << 14, bytes(8)), err_msg=str(at)
        )


@pytest.mark.parametrize("start", [0, 128, 384, 896])
@pytest.mark.parametrize(
    ("swizzle", "columns"),
    [
        ("32B", 16),
        ("64B", 32),
        ("128B", 64),
        ("128B_atom_32B", 64),
        ("128B_atom_32B_flip_8B", 64),
        ("128B_atom_64B", 64),
        ("64B", 16),
        ("128B", 8),
        ("128B_atom_32B", 16),
    ],
)
def test_swizzles_follow_the_absolute_address(swizzle, columns, start):
    array = _random((20, 72), np.uint16, seed=1)
    tensor = TensorMap(array, (65, 20), (144,), (columns, 11), "bf16", swizzle)
    for at in ([0, 0], [-8, 12], [32, -4]):
        image = _image(tensor, at, SHARED_BASE + start, 1 << 14, bytes(2))
        np.testing.assert_array_equal(_loaded(tensor, at, SHARED_BASE + start), image)


def test_element_strides_and_offset():
    array = _random((30, 40), np.uint16, seed=2)
    tensor = TensorMap(array, (30, 28), (80,), (32, 13), "u16", "64B", element_strides=(5, 3), offset_bytes=160)
    assert tensor.tile_bytes == 32 * 5 * 2
    for at in ([0, 1], [-8, -5], [16, 20], [0, 27]):
        np.testing.assert_array_equal(_loaded(tensor, at), _image(tensor, at, SHARED_BASE, 1 << 14, bytes(2)))


@pytest.mark.parametrize(("element", "size"), [("bf16", 2), ("f16", 2), ("f32", 4), ("f64", 8)])
def test_nan_outside(element, size):
    array = _random((6, 16), f"u{size}", seed=3)
    tensor = TensorMap(array, (15, 6), array.strides[-2::-1], (8, 4), element, out_of_bounds="nan")
    fill = b"\xf7\x7f" * (size // 2)
    for at in ([-8, 4], [8, -1], [24, 0]):
        np.testing.assert_array_equal(_loaded(tensor, at), _image(tensor, at, SHARED_BASE, 1 << 14, fill))


def test_tf32_rounds_to_nearest_even():
    bits = [0x3F801000, 0x3F803000, 0x3F801001, 0xBF800FFF, 0x7F7FFFFF, 0xFF800000, 0x7F800001, 0x00001000]
    expected = [0x3F800000, 0x3F804000, 0x3F802000, 0xBF800000, 0x7F800000, 0xFF800000, 0x7FFFE000, 0x00000000]
    tensor = TensorMap(np.array(bits, np.uint32), (8,), (), (8,), "tf32")
    tile = _loaded(tensor, [0])[SHARED_BASE : SHARED_BASE + 32].view(np.uint32)
    assert [hex(x) for x in tile] == [hex(x) for x in expected]
    plain = TensorMap(np.array(bits, np.uint32), (8,), (), (8,), "f32_ftz")
    assert _loaded(plain, [0])[SHARED_BASE : SHARED_BASE + 32].view(np.uint32).tolist() == bits


def test_packed_fp4():
    array = _random((5, 32), seed=4)
    tensor = TensorMap(array, (60, 5), (32,), (32, 4), "fp4_align8", "32B")
    bytewise = TensorMap(array, (30, 5), (32,), (16, 4), "u8", "32B")
    assert tensor.tile_bytes == 64
    for at in ([0, 0], [-32, 3], [32, -1]):
        np.testing.assert_array_equal(_loaded(tensor, at), _loaded(bytewise, [at[0] // 2, at[1]]))
    with pytest.raises(DescriptorFaultError, match="first coordinate 8 of fp4_align8 is no multiple of 16 bytes"):
        _loaded(tensor, [8, 0])


@pytest.mark.parametrize(("element", "group"), [("fp4_align16", 8), ("fp6_align16", 12)])
@pytest.mark.parametrize("swizzle", ["none", "128B", "128B_atom_32B"])
def test_padded_elements(element, group, swizzle):
    array = _random((5, 16 * group), seed=5)
    tensor = TensorMap(array, (256, 5), (16 * group,), (128, 3), element, swizzle)
    assert tensor.tile_bytes == 3 * 8 * group
    for at in ([0, 0], [128, 3], [-128, 1], [256, -1]):
        data = _loaded(tensor, at)
        for row in range(3):
            for i in range(8):
                inside = 0 <= at[0] < 256 and 0 <= at[1] + row < 5
                start = at[0] * group // 16 + i * group
                expected = array[at[1] + row, start : start + group] if inside else np.zeros(group, np.uint8)
                chunk = _place(SHARED_BASE + row * 128 + i * 16, swizzle)
                np.testing.assert_array_equal(data[chunk : chunk + group], expected)
    with pytest.raises(DescriptorFaultError, match="no multiple of 128"):
        _loaded(tensor, [64, 0])


@pytest.mark.parametrize("swizzle", ["none", "32B", "128B", "128B_atom_32B", "128B_atom_64B"])
@pytest.mark.parametrize("at", [[0, 0, 0], [8, 3, 1], [24, 6, 0], [32, 0, 1], [40, 0, 0], [0, 9, 0]])
def test_stores_clip_but_complete_16_bytes(swizzle, at):
    array = _random((3, 8, 40), np.uint16, seed=6)
    tensor = TensorMap(array, (37, 7, 3), array.strides[-2::-1], (16, 4, 2), "u16", swizzle, element_strides=(1, 2, 1))
    image = _random(1 << 13, seed=7)
    memory, shared = GlobalMemory(), SharedMemory(0, 1 << 13)
    target = array.copy()
    tensor.bind(memory.bind(target))
    shared.data[SHARED_BASE:], shared.written[:] = image, 1
    offset = SHARED_BASE + 256
    values = read_source(tensor, at, shared, offset, None, _INSTRUCTION)
    write_destination(tensor, at, values, memory, None, _INSTRUCTION)
    expected = array.copy().reshape(-1).view(np.uint8)
    for linear, where in _elements(tensor, at, width=40):
        if where is not None:
            for byte in range(2):
                expected[where + byte] = image[_place(offset + linear + byte, swizzle) - SHARED_BASE]
    np.testing.assert_array_equal(target.reshape(-1).view(np.uint8), expected)


def test_a_store_does_not_read_what_is_clipped():
    array = np.zeros((8, 16), np.uint16)
    tensor = TensorMap(array, (16, 8), (32,), (16, 4), "u16", "32B")
    memory, shared = GlobalMemory(), SharedMemory(0, 1024)
    tensor.bind(memory.bind(array))
    shared.written[SHARED_BASE : SHARED_BASE + 64] = 1
    read_source(tensor, [0, 6], shared, SHARED_BASE, None, _INSTRUCTION)
    assert read_source(tensor, [0, 8], shared, SHARED_BASE, None, _INSTRUCTION) is None
    with pytest.raises(MemoryFaultError, match="byte 64, which was never written"):
        read_source(tensor, [0, 5], shared, SHARED_BASE, None, _INSTRUCTION)


def test_six_bit_stores_drop_the_padding():
    array = np.zeros((2, 192), np.uint8)
    tensor = TensorMap(array, (256, 2), (192,), (128, 2), "fp6_align16", "128B")
    memory, shared = GlobalMemory(), SharedMemory(0, 1024)
    tensor.bind(memory.bind(array))
    codes = _random(256, seed=8).reshape(2, 128)
    for row, column in itertools.product(range(2), range(128)):
        shared.data[_place(SHARED_BASE + row * 128 + column, "128B")] = codes[row, column]
    shared.written[:] = 1
    values = read_source(tensor, [128, 1], shared, SHARED_BASE, None, _INSTRUCTION)
    write_destination(tensor, [128, 1], values, memory, None, _INSTRUCTION)
    bits = ((codes[0, :, None] >> np.arange(6)) & 1).reshape(-1)
    np.testing.assert_array_equal(array[1, 96:], np.packbits(bits, bitorder="little"))
    assert not array[0].any() and not array[1, :96].any()


def test_maps_that_cannot_be_stored_to():
    shared = SharedMemory(0, 1024)
    padded = TensorMap(np.zeros((2, 64), np.uint8), (128, 2), (64,), (128, 2), "fp4_align16")
    flipped = TensorMap(np.zeros((2, 64), np.uint8), (64, 2), (64,), (64, 2), "u8", "128B_atom_32B_flip_8B")
    for tensor in (padded, flipped):
        tensor.bind(1 << 36)
        with pytest.raises(DescriptorFaultError, match="cannot be stored to"):
            read_source(tensor, [0, 0], shared, SHARED_BASE, None, _INSTRUCTION)


def test_reductions_touch_what_stores_do():
    array = np.arange(40, dtype=np.uint32).reshape(5, 8)
    tensor = TensorMap(array, (7, 5), (32,), (4, 2), "u32")
    memory, shared = GlobalMemory(), SharedMemory(0, 1024)
    target = array.copy()
    tensor.bind(memory.bind(target))
    shared.data[SHARED_BASE : SHARED_BASE + 32].view(np.uint32)[:] = np.arange(8) * 1000
    shared.written[:] = 1
    values = read_source(tensor, [4, 4], shared, SHARED_BASE, None, _INSTRUCTION)

    def add(old, new):
        return (old.view(np.uint32) + np.ascontiguousarray(new).view(np.uint32)).view(np.uint8)

    reduce_destination(tensor, [4, 4], values, add, memory, None, _INSTRUCTION)
    expected = array.copy()
    expected[4, 4:] += np.array([0, 1000, 2000, 3000], np.uint32)
    np.testing.assert_array_equal(target, expected)


def test_faults():
    array = np.zeros((4, 32), np.uint8)
    unbound = TensorMap(array, (32, 4), (32,), (16, 2), "u8")
    with pytest.raises(DescriptorFaultError, match="not bound"):
        load_tile(unbound, [0, 0], GlobalMemory(), SharedMemory(0, 1024), SHARED_BASE, None, _INSTRUCTION)
    with pytest.raises(DescriptorFaultError, match="3 coordinates for a tensor map of rank 2"):
        _loaded(unbound, [0, 0, 0])
    beyond = TensorMap(array, (32, 5), (32,), (16, 2), "u8")
    with pytest.raises(MemoryFaultError, match=r"reaches bytes 96\.\.143 of buffer 1, which has 128"):
        _loaded(beyond, [0, 3])
    with pytest.raises(MemoryFaultError, match="shared bytes"):
        _loaded(unbound, [0, 0], offset=SHARED_BASE + 1024, nbytes=1024)
    memory = GlobalMemory()
    unbound.bind(memory.bind(array, written=False))
    with pytest.raises(MemoryFaultError, match="never written"):
        load_tile(unbound, [0, 0], memory, SharedMemory(0, 1024), SHARED_BASE, None, _INSTRUCTION)
