"""Runs PTX or a cubin on the first CUDA device through the driver, with NumPy arrays as arguments."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_LOG_BYTES = 1 << 14
_MAJOR, _MINOR = 75, 76
_MAX_DYNAMIC_SHARED = 8
_NON_PORTABLE_CLUSTER = 14
_CLUSTER_DIMENSION = 4
_ERROR_LOG, _ERROR_LOG_BYTES = 5, 6

DATA_TYPES = (
    "uint8", "uint16", "uint32", "int32", "uint64", "int64", "float16", "float32", "float64", "bfloat16",
    "float32_ftz", "tfloat32", "tfloat32_ftz", "16u4_align8b", "16u4_align16b", "16u6_align16b",
)  # fmt: skip
SWIZZLES = (0, 32, 64, 128)


class DeviceError(RuntimeError):
    """A call of the driver that failed."""


@dataclass(frozen=True)
class TiledMap:
    """A tiled tensor map (128 bytes, by value) of an array, which is copied to the device and back.

    Attributes:
      array: C-contiguous; the map starts at its first byte. Arguments that name the same array share it.
      data_type: of DATA_TYPES.
      dims: elements along each dimension, the fastest first.
      strides: bytes, for all dimensions but the first.
      box: elements along each dimension.
      swizzle: bytes of the swizzle span, of SWIZZLES.
      element_strides: ones unless given.
      nan_fill: what is out of bounds is read as NaN instead of zero.
    """

    array: np.ndarray
    data_type: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int = 0
    element_strides: tuple[int, ...] = ()
    nan_fill: bool = False


class _LaunchAttribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_uint * 16)]


class _LaunchConfig(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_LaunchAttribute)),
        ("count", ctypes.c_uint),
    ]


@functools.cache
def _driver() -> ctypes.CDLL:
    """The driver, with the first device's primary context current in this thread."""
    driver = ctypes.CDLL("libcuda.so.1")
    _check(driver, driver.cuInit(0))
    device = ctypes.c_int()
    _check(driver, driver.cuDeviceGet(ctypes.byref(device), 0))
    context = ctypes.c_void_p()
    _check(driver, driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
    driver.context = context
    return driver


def _check(driver: ctypes.CDLL, status: int, log: str = "") -> None:
    if status:
        name = ctypes.c_char_p()
        driver.cuGetErrorName(status, ctypes.byref(name))
        raise DeviceError(f"{(name.value or b'?').decode()} ({status})" + (f"\n{log}" if log else ""))


def capability() -> tuple[int, int]:
    """The compute capability of the first device."""
    driver = _driver()
    device, value = ctypes.c_int(), ctypes.c_int()
    _check(driver, driver.cuDeviceGet(ctypes.byref(device), 0))
    numbers = []
    for attribute in (_MAJOR, _MINOR):
        _check(driver, driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device))
        numbers.append(value.value)
    return numbers[0], numbers[1]


@functools.lru_cache(maxsize=256)
def _function(code: str | bytes, entry: str) -> ctypes.c_void_p:
    driver = _driver()
    image = code.encode() + b"\0" if isinstance(code, str) else code
    log = ctypes.create_string_buffer(_LOG_BYTES)
    options = (ctypes.c_int * 2)(_ERROR_LOG, _ERROR_LOG_BYTES)
    values = (ctypes.c_void_p * 2)(ctypes.addressof(log), _LOG_BYTES)
    module = ctypes.c_void_p()
    status = driver.cuModuleLoadDataEx(ctypes.byref(module), ctypes.c_char_p(image), 2, options, values)
    _check(driver, status, log.value.decode(errors="replace"))
    function = ctypes.c_void_p()
    _check(driver, driver.cuModuleGetFunction(ctypes.byref(function), module, entry.encode()))
    return function


class _Buffers:
    """Arrays on the device, one for each distinct NumPy array."""

    def __init__(self, driver: ctypes.CDLL) -> None:
        self.driver = driver
        self.arrays: dict[int, tuple[np.ndarray, ctypes.c_uint64]] = {}

    def address(self, array: np.ndarray) -> int:
        if id(array) not in self.arrays:
            if not array.flags.c_contiguous or not array.flags.writeable:
                raise ValueError("arrays must be C-contiguous and writeable")
            pointer = ctypes.c_uint64()
            _check(self.driver, self.driver.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(max(array.nbytes, 1))))
            self.arrays[id(array)] = (array, pointer)
            host = ctypes.c_void_p(array.ctypes.data)
            _check(self.driver, self.driver.cuMemcpyHtoD_v2(pointer, host, ctypes.c_size_t(array.nbytes)))
        return self.arrays[id(array)][1].value

    def copy_back(self) -> None:
        for array, pointer in self.arrays.values():
            host = ctypes.c_void_p(array.ctypes.data)
            _check(self.driver, self.driver.cuMemcpyDtoH_v2(host, pointer, ctypes.c_size_t(array.nbytes)))

    def free(self) -> None:
        for _, pointer in self.arrays.values():
            self.driver.cuMemFree_v2(pointer)


def _aligned(size: int, alignment: int = 64) -> tuple[ctypes.Array, int]:
    """A buffer of zeros and an aligned address inside it."""
    buffer = ctypes.create_string_buffer(size + alignment)
    address = ctypes.addressof(buffer)
    return buffer, address + (-address) % alignment


def _encode(driver: ctypes.CDLL, tensor: TiledMap, address: int) -> bytes:
    rank = len(tensor.dims)
    buffer, place = _aligned(128)
    element_strides = tensor.element_strides or (1,) * rank
    status = driver.cuTensorMapEncodeTiled(
        ctypes.c_void_p(place),
        ctypes.c_int(DATA_TYPES.index(tensor.data_type)),
        ctypes.c_uint32(rank),
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * rank)(*tensor.dims),
        (ctypes.c_uint64 * max(rank - 1, 1))(*tensor.strides),
        (ctypes.c_uint32 * rank)(*tensor.box),
        (ctypes.c_uint32 * rank)(*element_strides),
        ctypes.c_int(0),
        ctypes.c_int(SWIZZLES.index(tensor.swizzle)),
        ctypes.c_int(0),
        ctypes.c_int(int(tensor.nan_fill)),
    )
    _check(driver, status, str(tensor))
    encoded = ctypes.string_at(place, 128)
    del buffer
    return encoded


def _parameter(driver: ctypes.CDLL, buffers: _Buffers, argument) -> bytes:
    if isinstance(argument, np.ndarray):
        return buffers.address(argument).to_bytes(8, "little")
    if isinstance(argument, TiledMap):
        return _encode(driver, argument, buffers.address(argument.array))
    if isinstance(argument, np.generic):
        return argument.tobytes()
    if isinstance(argument, int):
        return (argument & (1 << 64) - 1).to_bytes(8, "little")
    if isinstance(argument, bytes):
        return argument
    raise TypeError(f"argument of type {type(argument).__name__}")


def launch(
    code: str | bytes,
    entry: str,
    arguments: Sequence[np.ndarray | np.generic | int | bytes | TiledMap],
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    shared_bytes: int = 0,
    cluster: tuple[int, int, int] = (1, 1, 1),
) -> None:
    """Runs a kernel and waits for it.

    Args:
      code: PTX text, or a cubin.
      entry: the name of the kernel.
      arguments: one for each parameter. Arrays are passed as pointers to copies on the device, which are copied back
        into them; ints are passed as 4 or 8 bytes, as the parameter has; bytes are passed by value.
      grid, block, cluster: x, y and z.
      shared_bytes: dynamic shared memory.
    """
    driver = _driver()
    _check(driver, driver.cuCtxSetCurrent(driver.context))
    function = _function(code, entry)
    if shared_bytes > 48 << 10:
        _check(driver, driver.cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED, shared_bytes))
    size = cluster[0] * cluster[1] * cluster[2]
    if size > 8:
        _check(driver, driver.cuFuncSetAttribute(function, _NON_PORTABLE_CLUSTER, 1))
    attribute = _LaunchAttribute(id=_CLUSTER_DIMENSION)
    attribute.value[:3] = cluster
    config = _LaunchConfig(
        grid=grid,
        block=block,
        shared_bytes=shared_bytes,
        stream=None,
        attributes=ctypes.pointer(attribute),
        count=int(size > 1),
    )
    buffers = _Buffers(driver)
    try:
        places = []
        for argument in arguments:
            value = _parameter(driver, buffers, argument)
            buffer, place = _aligned(max(len(value), 8))
            ctypes.memmove(place, value, len(value))
            places.append((buffer, place))
        pointers = (ctypes.c_void_p * max(len(places), 1))(*(place for _, place in places))
        _check(driver, driver.cuLaunchKernelEx(ctypes.byref(config), function, pointers, None))
        _check(driver, driver.cuCtxSynchronize())
        buffers.copy_back()
    finally:
        buffers.free()
