"""The handlers of the native library on XLA's CPU platform, with a stand-in for the driver below them."""

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import importlib.util
import itertools
import json
import os
import pathlib
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

import jax

ROOT = pathlib.Path(__file__).parents[3]
BUILT = ROOT / "build" / "native"
TARGETS = ("sm_90a", "sm_100f", "sm_103a")
NO_BUILD = "build/native is not there: run make native"

SYMBOLS = ("quantize", "quantize_for_training", "forward", "row_operands", "backward")
SYMBOLS += ("load_kernels", "launch_by_name")
STREAM = 0x57
MULTIPROCESSORS = 5  # of every device
LIMIT = 48 << 10  # bytes of shared memory that a kernel may have without an attribute

_HERE = pathlib.Path(__file__).parent
_CACHE = BUILT / "stand_in"


class UnavailableError(Exception):
    """Why handlers cannot be built here."""


def manifest(target: str = TARGETS[0]) -> dict[str, dict[str, Any]]:
    """The kernels of a target, by name."""
    kernels = json.loads((BUILT / f"kernels.{target}.json").read_text())["kernels"]
    return {kernel["name"]: kernel for kernel in kernels}


class Libraries(NamedTuple):
    driver: pathlib.Path
    handlers: pathlib.Path


def build(scratch: pathlib.Path) -> Libraries:
    """Both libraries, copied to a directory of the caller; compiled only when their sources have changed."""
    if not (BUILT / "libjax_fp4attn.so").is_file():
        raise UnavailableError(NO_BUILD)
    compilers = {"CC": os.environ.get("CC", "gcc"), "CXX": os.environ.get("CXX", "g++")}
    for compiler in compilers.values():
        if shutil.which(compiler) is None:
            raise UnavailableError(f"there is no compiler {compiler}")
    builder = _builder()
    try:
        headers = builder.driver_headers()
    except FileNotFoundError as error:
        raise UnavailableError(str(error)) from error

    inputs = [*(ROOT / "cuda" / "ffi").iterdir(), ROOT / "cuda" / "build.py", *_HERE.glob("*.*")]
    inputs += [BUILT / "kernel_table.inc", *BUILT.glob("*.cubin")]
    digest = hashlib.sha256(repr((compilers, jax.__version__, headers)).encode())
    for path in sorted(inputs):
        digest.update(path.read_bytes())
    with _locked(_CACHE):
        cached = _CACHE / digest.hexdigest()[:16]
        libraries = Libraries(cached / "libcuda.so", cached / "handlers.so")
        if not (cached / "finished").is_file():
            for outdated in _CACHE.glob("*/"):
                shutil.rmtree(outdated)
            cached.mkdir()
            _compile_driver(compilers["CC"], headers, libraries.driver)
            _compile_handlers(builder, libraries.handlers)
            (cached / "finished").touch()
        return Libraries(*(pathlib.Path(shutil.copy(library, scratch)) for library in libraries))


def _compile_driver(compiler: str, headers: pathlib.Path, library: pathlib.Path) -> None:
    flags = ("-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-isystem", headers)
    subprocess.run([compiler, *flags, _HERE / "libcuda.c", "-o", library], check=True)


def _compile_handlers(builder: ModuleType, library: pathlib.Path) -> None:
    """Links the handlers with the kernels and two more, at the limit of shared memory and just above it."""
    for cubin in BUILT.glob("*.cubin"):
        shutil.copy(cubin, library.parent)
    entry = next(iter(manifest().values()))["entry"]
    more = (f'    {{"{n}_bytes_over_the_limit", "{entry}", "p", 32, {LIMIT + n}, 3}},\n' for n in (0, 1))
    table = (BUILT / "kernel_table.inc").read_text()
    (library.parent / "kernel_table.inc").write_text(table.replace("};", "".join(more) + "};", 1))
    sources = [path for path in sorted((ROOT / "cuda" / "ffi").glob("*.cc")) if path.name != "handlers.cc"]
    builder.link([*sources, _HERE / "host_handlers.cc"], library.parent, library)


def _builder() -> ModuleType:
    """cuda/build.py, which imports its neighbours by their bare names."""
    spec = importlib.util.spec_from_file_location("_cuda_build", ROOT / "cuda" / "build.py")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(ROOT / "cuda"))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(ROOT / "cuda"))
        sys.modules.pop("tabulate", None)
    return module


@contextlib.contextmanager
def _locked(directory: pathlib.Path) -> Iterator[None]:
    """Lets one process at a time into a directory."""
    directory.mkdir(exist_ok=True)
    with (directory / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class TensorMap(NamedTuple):
    """The arguments of cuTensorMapEncodeTiled, innermost dimensions first; enumerators are numbers."""

    element: str
    data: int
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    steps: tuple[int, ...]
    interleave: int
    swizzle: str
    promotion: int
    fill: int

    @classmethod
    def of_call(cls, call: dict[str, Any]) -> "TensorMap":
        lists = {name: tuple(call[name]) for name in ("extents", "strides", "box", "steps")}
        numbers = {name: call[name] for name in ("data", "interleave", "promotion", "fill")}
        return cls(element=_ELEMENTS[call["type"]], swizzle=_SWIZZLES[call["swizzle"]], **lists, **numbers)

    def in_manifest(self) -> str:
        """The type of the parameter that takes it, as the manifest has it."""
        return f"tensor_map({self.element}, {'x'.join(map(str, self.box))}, {self.swizzle})"


# Of cuda.h.
_ELEMENTS = {0: "u8", 6: "f16", 9: "bf16"}
_SWIZZLES = {0: "none", 1: "32B", 2: "64B", 3: "128B"}


class Launch(NamedTuple):
    kernel: str
    grid: tuple[int, int, int]
    parameters: dict[str, int | float | TensorMap]


class Driver:
    """The stand-in: a device of some compute capability, and the calls that it got."""

    def __init__(self, path: pathlib.Path):
        self._library = ctypes.CDLL(str(path))
        self._library.stand_in_take.restype = ctypes.c_char_p

    def pretend(self, capability: tuple[int, int] = (9, 0), device: int = 0) -> None:
        """Takes another device; no call fails any more."""
        self._library.stand_in_pretend(*capability, device)

    def fail(self, call: str, code: int) -> None:
        self._library.stand_in_fail(call.encode(), code)

    def take(self, call: str | None = None) -> list[dict[str, Any]]:
        """The calls, or those of one function, since it was last asked."""
        calls = [json.loads(line) for line in self._library.stand_in_take().decode().splitlines()]
        return [found for found in calls if call in (None, found["call"])]

    def launches(self) -> list[Launch]:
        """The launches among the calls, each checked against the manifest."""
        calls = self.take()
        maps = {call["number"]: TensorMap.of_call(call) for call in calls if call["call"] == "cuTensorMapEncodeTiled"}
        return [_launch(call, maps) for call in calls if call["call"] == "cuLaunchKernelEx"]


@functools.cache
def _kernels_by_entry() -> dict[str, dict[str, Any]]:
    return {kernel["entry"]: kernel for target in TARGETS for kernel in manifest(target).values()}


def _launch(call: dict[str, Any], maps: dict[int, TensorMap]) -> Launch:
    kernel = _kernels_by_entry()[call["entry"]]
    assert call["block"] == [kernel["threads"], 1, 1]
    assert call["shared_bytes"] == kernel["shared_bytes"]
    assert call["stream"] == STREAM
    assert (call["attributes"], call["cluster"]) == (0, None)
    kinds = parameters_of(kernel)
    assert call["parameter_bytes"] == [PARAMETER_BYTES.get(kind, TENSOR_MAP_BYTES) for kind in kinds.values()]
    values = {}
    for (name, kind), bits in zip(kinds.items(), call["parameters"], strict=True):
        if kind in _READ:
            values[name] = _READ[kind](bits)
        else:
            values[name] = maps[bits]
            assert maps[bits].in_manifest() == kind
    return Launch(kernel["name"], tuple(call["grid"]), values)


def parameters_of(kernel: dict[str, Any]) -> dict[str, str]:
    """Types of a kernel's parameters, by name."""
    # A type may have commas in parentheses.
    return dict(re.findall(r"(\w+): (\w+(?:\([^)]*\))?)", kernel["parameters"]))


PARAMETER_BYTES = {"pointer": 8, "int32": 4, "float32": 4}
TENSOR_MAP_BYTES = 128

_READ = {
    "pointer": int,
    "int32": lambda bits: struct.unpack("<i", struct.pack("<I", bits))[0],
    "float32": lambda bits: struct.unpack("<f", struct.pack("<I", bits))[0],
}

_copies = itertools.count()


class Handlers:
    """A copy of the handlers that has loaded nothing yet, as in a new process.

    Its custom calls are named after the symbols, with a number of its own.

    Args:
      library: The library.
      driver: What it finds as the CUDA driver.
    """

    def __init__(self, library: pathlib.Path, driver: pathlib.Path):
        self._suffix = f"_{next(_copies)}"
        self._library = ctypes.CDLL(shutil.copy(library, library.with_name(f"handlers{self._suffix}.so")))
        self._library.stand_in_driver(str(driver).encode())
        for symbol in SYMBOLS:
            self.register(symbol, symbol + self._suffix)

    def register(self, symbol: str, name: str) -> None:
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(self._library, symbol)), platform="cpu")

    def call(self, symbol: str, operands: Any = (), results: Any = (), **attributes: Any) -> list[jax.Array]:
        # XLA drops a call whose results are all empty, unless it is said to have a side effect. A call that fails must
        # have none: JAX would raise its error once more when the process ends.
        has_side_effect = all(0 in result.shape for result in results)
        function = jax.ffi.ffi_call(symbol + self._suffix, list(results), has_side_effect=has_side_effect)
        return jax.block_until_ready(function(*operands, **attributes))
