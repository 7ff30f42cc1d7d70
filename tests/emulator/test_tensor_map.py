"""The rules of cuTensorMapEncodeTiled."""

from __future__ import annotations

import numpy as np
import pytest

from cuda.emulator.errors import DescriptorFaultError
from cuda.emulator.tensor_map import ELEMENTS, SWIZZLES, TensorMap

_ARRAY = np.zeros(1 << 16, np.uint8)
_VALID = {"dims": (64, 8, 4), "strides": (128, 1024), "box": (64, 8, 2), "element": "bf16", "swizzle": "128B"}


def _map(**changes) -> TensorMap:
    return TensorMap(_ARRAY, **(_VALID | changes))


def test_a_valid_map():
    tensor = _map(element_strides=(1, 3, 1), offset_bytes=48)
    assert tensor.rank == 3
    assert tensor.counts == (64, 3, 2)
    assert tensor.tile_bytes == 64 * 3 * 2 * 2
    tensor.bind(1 << 36)
    assert tensor.address == (1 << 36) + 48


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"element": "f8"}, "tensorDataType"),
        ({"swizzle": "96B"}, "swizzle must be one of"),
        ({"interleave": "64B"}, "interleave must be one of"),
        ({"out_of_bounds": "one"}, "oobFill"),
        ({"dims": (), "strides": (), "box": ()}, "tensorRank must be 1 to 5, not 0"),
        ({"dims": (8,) * 6, "strides": (16,) * 5, "box": (8,) * 6}, "tensorRank must be 1 to 5, not 6"),
        ({"strides": (128,)}, "globalStrides must have 2 entries"),
        ({"box": (64, 8)}, "boxDim must have 3 entries"),
        ({"element_strides": (1, 1)}, "elementStrides must have 3 entries"),
        ({"dims": (0, 8, 4)}, r"globalDim\[0\] must be 1 to 2\*\*32, not 0"),
        ({"dims": (64, (1 << 32) + 1, 4)}, r"globalDim\[1\] must be 1 to 2\*\*32"),
        ({"strides": (128, 1032)}, r"globalStrides\[1\] must be a multiple of 16 bytes, not 1032"),
        ({"strides": (128, 1 << 40)}, r"globalStrides\[1\] must be less than 2\*\*40"),
        ({"strides": (-128, 1024)}, r"globalStrides\[0\] must be less than"),
        ({"box": (64, 0, 2)}, r"boxDim\[1\] must be 1 to 256, not 0"),
        ({"box": (64, 257, 2)}, r"boxDim\[1\] must be 1 to 256, not 257"),
        ({"box": (60, 8, 2)}, r"boxDim\[0\] must be a multiple of 16 bytes, not 120"),
        ({"box": (72, 8, 2)}, r"boxDim\[0\] must be at most 128 bytes with swizzle 128B, not 144"),
        ({"box": (24, 8, 2), "swizzle": "32B"}, "at most 32 bytes"),
        ({"box": (40, 8, 2), "swizzle": "64B"}, "at most 64 bytes"),
        ({"box": (72, 8, 2), "swizzle": "128B_atom_64B"}, "at most 128 bytes"),
        ({"element_strides": (1, 0, 1)}, r"elementStrides\[1\] must be 1 to 8, not 0"),
        ({"element_strides": (1, 1, 9)}, r"elementStrides\[2\] must be 1 to 8, not 9"),
        ({"offset_bytes": 8}, "globalAddress must be a multiple of 16"),
        ({"element": "u32", "box": (32, 8, 2), "out_of_bounds": "nan"}, "needs a floating-point type, not u32"),
        ({"element": "fp4_align8", "dims": (63, 8, 4)}, r"globalDim\[0\] of fp4_align8 must be a multiple of 2"),
        ({"element": "fp4_align8", "out_of_bounds": "nan"}, "needs a floating-point type"),
        ({"element": "fp4_align8", "box": (48, 8, 2)}, r"boxDim\[0\] must be a multiple of 16 bytes, not 24"),
        ({"element": "fp4_align16", "dims": (192, 8, 4), "box": (128, 8, 2)}, "must be a multiple of 128, not 192"),
        ({"element": "fp4_align16", "dims": (256, 8, 4), "box": (64, 8, 2)}, "must be 128, not 64"),
        ({"element": "fp6_align16", "dims": (256, 8, 4), "strides": (208, 2080)}, "multiple of 32 bytes, not 208"),
        ({"element": "fp6_align16", "dims": (256, 8, 4), "box": (128, 8, 2), "swizzle": "64B"}, "at most 64 bytes"),
        (
            {"element": "fp6_align16", "dims": (256, 8, 4), "box": (128, 8, 2), "swizzle": "128B_atom_32B_flip_8B"},
            "swizzle of fp6_align16 must be one of none, 128B, 128B_atom_32B, 128B_atom_64B",
        ),
        (
            {"element": "fp4_align16", "dims": (256, 8, 4), "box": (128, 8, 2), "swizzle": "128B_atom_64B"},
            "swizzle of fp4_align16 must be one of none, 128B, 128B_atom_32B,",
        ),
        (
            {"element": "fp4_align16", "dims": (256, 8, 4), "box": (128, 8, 2), "offset_bytes": 16},
            "globalAddress must be a multiple of 32",
        ),
        (
            {"interleave": "16B", "dims": (64, 8), "strides": (128,), "box": (64, 8)},
            "tensorRank must be at least 3 with an interleaved layout",
        ),
        ({"interleave": "32B", "strides": (144, 1440)}, r"globalStrides\[0\] must be a multiple of 32"),
        ({"interleave": "32B"}, "swizzle must be 32B with interleave 32B"),
        (
            {"interleave": "16B", "element": "fp6_align16", "dims": (256, 8, 4), "box": (128, 8, 2)},
            "interleave must be none for fp6_align16",
        ),
    ],
)
def test_each_rule_is_enforced(changes, rule):
    with pytest.raises(DescriptorFaultError, match=rule):
        _map(**changes)


def test_the_bound_address_must_be_aligned():
    with pytest.raises(DescriptorFaultError, match="multiple of 16"):
        _map().bind((1 << 36) + 8)


def test_interleaved_and_im2col_maps_are_refused():
    with pytest.raises(NotImplementedError, match="NC/8HWC8"):
        _map(interleave="16B")
    with pytest.raises(NotImplementedError, match="im2col"):
        TensorMap.im2col(_ARRAY, (8, 8, 8))


_INTEGERS = ("u8", "u16", "u32", "s32", "u64", "s64")
_FLOATS = ("f16", "f32", "f64", "bf16", "f32_ftz", "tf32", "tf32_ftz")
_DATA_TYPES = (*_INTEGERS, *_FLOATS, "fp4_align8", "fp4_align16", "fp6_align16")


@pytest.mark.parametrize(("code", "name"), list(enumerate(_DATA_TYPES)))
def test_encode_arguments_by_data_type(code, name):
    dims, box = (256, 4, 9, 9, 9), (128 if code > 13 else 32 if code == 13 else 16, 2, 9, 9, 9)
    tensor = TensorMap.from_encode_arguments(
        _ARRAY, code, 2, dims, (2048, 9, 9, 9), box, (1, 2, 9, 9, 9), 0, 0, 2, 0, offset_bytes=64
    )
    assert tensor.element is ELEMENTS[name]
    assert (tensor.dims, tensor.strides, tensor.box) == (dims[:2], (2048,), box[:2])
    assert (tensor.element_strides, tensor.offset_bytes) == ((1, 2), 64)


@pytest.mark.parametrize(
    ("code", "name"),
    list(enumerate(["none", "32B", "64B", "128B", "128B_atom_32B", "128B_atom_32B_flip_8B", "128B_atom_64B"])),
)
def test_encode_arguments_by_swizzle(code, name):
    tensor = TensorMap.from_encode_arguments(_ARRAY, 9, 1, (64,), (), (16,), (1,), 0, code, 0, 1)
    assert tensor.swizzle is SWIZZLES[name]
    assert tensor.fill_nan


@pytest.mark.parametrize(
    ("place", "value", "rule"),
    [
        (0, 16, "tensorDataType 16"),
        (6, 3, "interleave 3"),
        (7, 7, "swizzle 7"),
        (8, 4, "l2Promotion 4"),
        (9, 2, "oobFill 2"),
    ],
)
def test_encode_arguments_out_of_range(place, value, rule):
    arguments = [9, 1, (64,), (), (16,), (1,), 0, 0, 0, 0]
    arguments[place] = value
    with pytest.raises(DescriptorFaultError, match=rule):
        TensorMap.from_encode_arguments(_ARRAY, *arguments)


def test_for_array():
    tensor = TensorMap.for_array(np.zeros((3, 5, 48), np.float16), (32, 5, 1), "64B")
    assert (tensor.dims, tensor.strides, tensor.element.name) == ((48, 5, 3), (96, 480), "f16")
    packed = TensorMap.for_array(np.zeros((6, 64), np.uint8), (128, 2), "64B", element="fp4_align8")
    assert (packed.dims, packed.strides, packed.tile_bytes) == ((128, 6), (64,), 128)
    assert TensorMap.for_array(np.zeros(64, np.float32), (16,)).dims == (64,)


def test_for_array_wants_a_known_contiguous_array():
    with pytest.raises(ValueError, match="C-contiguous"):
        TensorMap.for_array(np.zeros((8, 64), np.float32).T, (8, 8))
    with pytest.raises(ValueError, match="element type"):
        TensorMap.for_array(np.zeros((8, 64), np.complex64), (8, 8))
