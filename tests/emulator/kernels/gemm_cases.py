"""Launches of the compiled matrix products."""

import functools
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

import ml_dtypes
import numpy as np

from tests.emulator.device import TiledMap
from tests.emulator.kernels import compile as compiler
from tests.emulator.kernels.case import Case
from tests.emulator.tensor_core.truncated_sums import chain_of_sums

_ROOT = pathlib.Path(__file__).parents[3]
_DEFAULT = _ROOT / "build" / "calibration"
_DTYPES = {
    "bf16": ml_dtypes.bfloat16,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "f32": np.float32,
}

# M, N, K: tiles and their multiples, and tails of each.
SHAPES = (
    (128, 128, 64),
    (128, 128, 128),
    (256, 256, 192),
    (1, 1, 1),
    (31, 33, 31),
    (33, 31, 257),
    (129, 97, 65),
    (127, 129, 127),
    (384, 64, 448),
    (64, 300, 72),
    (200, 72, 129),
    (260, 130, 36),
)
KERNELS = ("gemm_bf16", "gemm_bf16_to_bf16", "gemm_e4m3", "gemm_e5m2_e4m3", "gemm_e4m3_registers")


@functools.cache
def folder() -> pathlib.Path:
    """Of compiled kernels: the one that EMULATOR_KERNELS names, build/calibration, or one that is compiled now.

    Raises:
      ImportError: there are no compiled kernels of the present sources, and no compiler.
    """
    ready = pathlib.Path(os.environ.get("EMULATOR_KERNELS", _DEFAULT))
    manifest = ready / compiler.MANIFEST
    if manifest.exists() and json.loads(manifest.read_text())["sources"] == compiler.sources_digest():
        return ready
    if importlib.util.find_spec("cutlass") is None:
        raise ImportError(f"{ready} has no kernels of these sources, and nvidia-cutlass-dsl is not installed")
    compiled = tempfile.mkdtemp()
    # In a process of its own, because the compiler keeps the target that it was imported with.
    command = [sys.executable, "-m", "tests.emulator.kernels.compile", compiled]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    return pathlib.Path(compiled)


def _pitched(rows: int, columns: int, dtype: Any) -> np.ndarray:
    """Zeros whose rows are a multiple of 16 bytes, with room behind the columns."""
    step = 16 // np.dtype(dtype).itemsize
    return np.zeros((rows, (columns + step) // step * step), dtype)


def _map(array: np.ndarray, columns: int, description: dict[str, Any]) -> TiledMap:
    return TiledMap(
        array,
        description["dtype"],
        (columns, len(array)),
        (array.strides[0],),
        tuple(description["box"]),
        description["swizzle"],
    )


def case(path: pathlib.Path, name: str, shape: tuple[int, int, int], ctas: int, exact: bool = True) -> Case:
    """One product.

    Args:
      path: From :func:`folder`.
      name: Of the kernel.
      shape: M, N, K.
      ctas: Of the grid.
      exact: Whether all sums are exact, from small integers; if not, every instruction truncates.
    """
    kernel = json.loads((path / compiler.MANIFEST).read_text())["kernels"][name]
    m, n, k = shape
    types = [_DTYPES[kind] for kind in kernel["types"]]
    rng = np.random.default_rng([*shape, KERNELS.index(name)])
    arrays = [_pitched(*size, dtype) for size, dtype in zip(((m, k), (n, k), (m, n)), types, strict=True)]
    for array, columns in zip(arrays[:2], (k, k), strict=True):
        size = (len(array), columns)
        array[:, :columns] = rng.integers(-4, 5, size) if exact else rng.standard_normal(size)
        # The tensor map must keep this out.
        array[:, columns:] = 1
    arrays[2][:] = -7
    a, b = (array[:, :k].astype(np.float64) for array in arrays[:2])
    expected = arrays[2].copy()
    expected[:, :n] = a @ b.T if exact else chain_of_sums(a, b, *kernel["types"][:2])
    # A store writes whole units of 16 bytes, here with products of the zeros that loads put out of bounds.
    unit = 16 // expected.itemsize
    expected[:, n : -(-n // unit) * unit] = 0
    bits = {2: np.uint16, 4: np.uint32}[expected.itemsize]
    expected, arrays[2] = expected.view(bits), arrays[2].view(bits)
    maps = [
        _map(array, columns, description)
        for array, columns, description in zip(arrays, (k, k, n), kernel["parameters"], strict=False)
    ]
    return Case(
        f"{name}_{m}x{n}x{k}",
        (path / f"{name}.ptx").read_text(),
        (*maps, np.int32(m), np.int32(n), np.int32(k)),
        {2: expected},
        grid=(ctas, 1, 1),
        block=(kernel["threads"], 1, 1),
        shared_bytes=kernel["shared_bytes"],
        cubin=path / f"{name}.cubin",
        entry=kernel["entry"],
    )
