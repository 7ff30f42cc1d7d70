"""Runs a case on the emulator and on a GPU, and compares what a launch has left."""

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from cuda.emulator import TensorMap, emulate
from tests.emulator import device
from tests.emulator.device import TiledMap
from tests.emulator.kernels.case import Case

ELEMENTS = {
    "uint8": "u8",
    "uint16": "u16",
    "uint32": "u32",
    "int32": "s32",
    "uint64": "u64",
    "float16": "f16",
    "bfloat16": "bf16",
    "float32": "f32",
    "16u4_align8b": "fp4_align8",
    "16u4_align16b": "fp4_align16",
}
SWIZZLES = {0: "none", 32: "32B", 64: "64B", 128: "128B"}


def tensor_map(map_: TiledMap) -> TensorMap:
    """The emulator's tensor map."""
    return TensorMap(
        map_.array,
        map_.dims,
        map_.strides,
        map_.box,
        ELEMENTS[map_.data_type],
        SWIZZLES[map_.swizzle],
        out_of_bounds="nan" if map_.nan_fill else "zero",
        element_strides=map_.element_strides or None,
    )


def on_emulator(case: Case, seeds: Iterable[int] = (0,), races: bool = True) -> list[list[np.ndarray]]:
    """Arrays after the launch, for each seed; a launch in which anything is found fails.

    Args:
      case: Launch.
      seeds: Schedules.
      races: Whether to look for races.
    """
    arguments = [tensor_map(x) if isinstance(x, TiledMap) else x for x in case.arguments]
    result = emulate(
        case.ptx,
        arguments,
        case.grid,
        block=case.block,
        cluster=case.cluster,
        shared_bytes=case.shared_bytes,
        seeds=seeds,
        races=races,
        entry=case.entry,
    )
    assert not result.findings, "\n".join(map(str, result.findings))
    return result.arrays


def on_device(case: Case) -> list[np.ndarray]:
    """Arrays after the launch on the first CUDA device."""
    copies = {id(array): array.copy() for array in case.buffers}
    arguments = []
    for argument in case.arguments:
        if isinstance(argument, TiledMap):
            argument = dataclasses.replace(argument, array=copies[id(argument.array)])
        arguments.append(copies.get(id(argument), argument))
    code = case.ptx if case.cubin is None else case.cubin.read_bytes()
    device.launch(code, case.entry, arguments, case.grid, case.block, case.shared_bytes, case.cluster)
    return list(copies.values())


def assert_expected(case: Case, arrays: Sequence[np.ndarray]) -> None:
    """Compares with what the case expects, and that all other arrays are as they were.

    Args:
      case: Launch.
      arrays: After it, as ``case.buffers``.
    """
    expected = dict(enumerate(case.buffers)) | case.expected if case.expected else {}
    for place, array in expected.items():
        assert_agree(case, place, arrays[place], array)


def assert_agree(case: Case, place: int, actual: np.ndarray, expected: np.ndarray) -> None:
    """Bit for bit.

    Args:
      case: Launch.
      place: Of the array.
      actual: After one launch.
      expected: After another, or by definition.
    """
    if place in case.unordered:
        actual, expected = np.sort(actual, None), np.sort(expected, None)
    np.testing.assert_array_equal(_bits(actual), _bits(expected), err_msg=f"{case.name}: array {place}")


def _bits(array: np.ndarray) -> np.ndarray:
    """The bytes of an array; the emulator does not model which NaN float32 arithmetic gives."""
    array = np.ascontiguousarray(array)
    if array.dtype == np.float32:
        array = np.where(np.isnan(array), np.float32(np.nan), array)
    return array.view(np.uint8)
