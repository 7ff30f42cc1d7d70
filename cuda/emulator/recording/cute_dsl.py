"""Records what the host code of a CuTe DSL function launches, on a machine without a GPU.

Call `prepare` before cutlass is imported, compile with `cute.compile`, and give the result to `record` with a `pointer`
for each array. CuTe DSL's runtime library is replaced by one that hands the launches to Python.
"""

from __future__ import annotations

import ctypes
import os
import pathlib
import shutil
import struct
import subprocess
import sys
from typing import Any

from ..ptx.parser import parse
from .descriptor import DESCRIPTOR_BYTES, decode
from .launch import Encoding, Parameter, RecordedLaunch, address_of, place_of

_RUNTIME = "CUTE_DSL_LIBS"
_CLUSTER, _PREFERRED_CLUSTER = 4, 11  # cudaLaunchAttributeID
# The kernels that were looked up, once a process each; a handle is a place in it, from 1.
_ENTRIES: list[str] = []
_MARK = b"tensor map of cuTensorMapEncodeTiled".ljust(DESCRIPTOR_BYTES - 8)


class _Configuration(ctypes.Structure):
    """cudaLaunchConfig_t."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_size_t),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    )


class _Attribute(ctypes.Structure):
    """cudaLaunchAttribute."""

    _fields_ = (("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_uint * 16))


_LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p))
_ENCODE = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_uint,
    ctypes.c_void_p,
    ctypes.POINTER(ctypes.c_uint64),
    ctypes.POINTER(ctypes.c_uint64),
    ctypes.POINTER(ctypes.c_uint32),
    ctypes.POINTER(ctypes.c_uint32),
    *[ctypes.c_int] * 4,
)
_FIND_KERNEL = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_void_p), ctypes.c_char_p)


def prepare(target: str, folder: pathlib.Path) -> None:
    """Makes CuTe DSL compile for a target and call the recording runtime. Call it before cutlass is imported.

    Args:
      target: such as "sm_100a".
      folder: for the runtime and the compiler's files; must exist.

    Raises:
      FileNotFoundError: there is no C compiler.
    """
    if "cutlass" in sys.modules:
        raise RuntimeError("cutlass is imported already, and has read its settings")
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise FileNotFoundError("no C compiler on the path")
    library = folder / "recording_runtime.so"
    source = pathlib.Path(__file__).with_name("runtime.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source], check=True)
    os.environ |= {
        "CUTE_DSL_ARCH": target,
        "CUTE_DSL_KEEP": "ptx",
        "CUTE_DSL_DUMP_DIR": str(folder),
        _RUNTIME: str(library),
    }


def pointer(type_: Any, array: int, assumed_align: int = 16) -> Any:
    """A pointer to array number `array`, for `record`."""
    import cutlass
    from cutlass.cute.runtime import make_ptr

    return make_ptr(type_, address_of(array), cutlass.AddressSpace.gmem, assumed_align=assumed_align)


def record(compiled: Any, *arguments: Any) -> list[RecordedLaunch]:
    """Calls what `cute.compile` returned, and returns its launches, none of which happens."""
    # Asked of the CUDA runtime otherwise; a device is needed for the kernels to be looked up.
    vars(compiled)["num_devices"] = 1
    recorder = _Recorder(compiled.__ptx__)
    with recorder:
        compiled(*arguments)
    return recorder.launches


class _Recorder:
    """The functions that the runtime calls while it is the context."""

    def __init__(self, ptx: str) -> None:
        self.ptx = ptx
        self.launches: list[RecordedLaunch] = []
        self._encodings: list[Encoding] = []
        self._error: BaseException | None = None
        self._library = ctypes.CDLL(os.environ[_RUNTIME])
        self._functions = (
            _LAUNCH(self._guarded(self._launch)),
            _ENCODE(self._guarded(self._encode)),
            _FIND_KERNEL(self._guarded(self._find_kernel)),
        )

    def __enter__(self) -> None:
        self._library.register_functions(*self._functions)

    def __exit__(self, *exception: object) -> None:
        if self._error is not None:
            raise self._error

    def _guarded(self, function: Any) -> Any:
        def call(*arguments: Any) -> int:
            try:
                function(*arguments)
            except BaseException as error:
                self._error = error
                return 1
            return 0

        return call

    def _find_kernel(self, kernel: Any, name: bytes) -> None:
        _ENTRIES.append(name.decode())
        kernel[0] = len(_ENTRIES)

    def _encode(self, map_, data_type, rank, address, dims, strides, box, element_strides, *modes) -> None:
        place = place_of(address)
        if place is None:
            raise ValueError(f"a tensor map of address {address:#x}, which is no array of this recording")
        sizes = tuple(dims[:rank]), tuple(strides[: rank - 1]), tuple(box[:rank]), tuple(element_strides[:rank])
        self._encodings.append(Encoding(place, data_type, *sizes, *modes))
        ctypes.memmove(map_, _MARK + struct.pack("<Q", len(self._encodings) - 1), DESCRIPTOR_BYTES)

    def _launch(self, configuration: int, kernel: int, addresses: Any) -> None:
        launch = _Configuration.from_address(configuration)
        size = ctypes.sizeof(_Attribute)
        attributes = [_Attribute.from_address(launch.attributes + size * i) for i in range(launch.attribute_count)]
        if any(attribute.id == _PREFERRED_CLUSTER for attribute in attributes):
            raise NotImplementedError("launches with a preferred cluster size")
        clusters = [tuple(attribute.value[:3]) for attribute in attributes if attribute.id == _CLUSTER]
        entry = _ENTRIES[kernel - 1]
        declared = parse(self.ptx, entry).parameters
        self.launches.append(
            RecordedLaunch(
                self.ptx,
                entry,
                tuple(
                    self._parameter(ctypes.string_at(addresses[i], parameter.size), parameter.offset)
                    for i, parameter in enumerate(declared)
                ),
                grid=tuple(launch.grid),
                block=tuple(launch.block),
                cluster=clusters[0] if clusters else (1, 1, 1),
                shared_bytes=launch.shared_bytes,
            )
        )

    def _parameter(self, raw: bytes, at: int) -> Parameter:
        """A parameter at byte `at` of the parameter space, with its addresses and tensor maps found."""
        encoding = self._tensor_map(raw) if len(raw) == DESCRIPTOR_BYTES else None
        if encoding is not None:
            return Parameter(raw, tensor_maps={0: encoding})
        words = range(-at % 8, len(raw) - 7, 8)
        places = {offset: place_of(int.from_bytes(raw[offset : offset + 8], "little")) for offset in words}
        return Parameter(raw, {offset: place for offset, place in places.items() if place is not None})

    def _tensor_map(self, raw: bytes) -> Encoding | None:
        if raw.startswith(_MARK):
            return self._encodings[int.from_bytes(raw[len(_MARK) :], "little")]
        return decode(raw)
