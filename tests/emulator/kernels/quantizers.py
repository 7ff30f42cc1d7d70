"""Launches of the library's own quantising kernels, as cuda/ffi makes them."""

import json
import pathlib
from collections.abc import Iterator

import ml_dtypes
import numpy as np

from tests.emulator.kernels.case import Case

_ROOT = pathlib.Path(__file__).parents[3]
_CUBIN = _ROOT / "build" / "native" / "kernels.sm_90a.cubin"
_MANIFEST = _ROOT / "cuda" / "manifest" / "kernels.sm_90a.json"

_PREFIXES = ("quantize_", "publish_")
_ROWS_A_TILE, _PAGE_BYTES = 128, 512
_NULL = np.uint64(0)
# Batch, rows, heads.
_SHAPES = ((1, 128, 1), (2, 130, 2), (1, 3, 3))
_MULTIPLIER = np.float32(0.25)


def available() -> bool:
    """Whether the kernels have been built."""
    return _CUBIN.exists()


def cases() -> Iterator[Case]:
    """Every kernel on a few shapes, with and without lengths and segments."""
    ptx = _CUBIN.with_suffix(".ptx").read_text()
    for kernel in json.loads(_MANIFEST.read_text())["kernels"]:
        if not kernel["name"].startswith(_PREFIXES):
            continue
        for i, shape in enumerate(_SHAPES):
            rng = np.random.default_rng([i, 11])
            name = kernel["name"]
            arguments = _arguments(name, shape, limited=i == 1, rng=rng)
            yield Case(
                f"{name}_{'x'.join(map(str, shape))}",
                ptx,
                arguments,
                {},
                grid=(shape[2], _tiles(shape[1]), shape[0]),
                block=(kernel["threads"], 1, 1),
                shared_bytes=kernel["shared_bytes"],
                cubin=_CUBIN,
                entry=kernel["entry"],
            )


def folded_rows(source: np.ndarray, ties: str) -> Case:
    """The kernel that shares scales between the halves of a row.

    Args:
      source: bfloat16 [128, 128].
      ties: "even" or "toward_zero".
    """
    name = "quantize_folded_rows_h128"
    (kernel,) = (k for k in json.loads(_MANIFEST.read_text())["kernels"] if k["name"] == name)
    rows, channels = source.shape
    codes = np.zeros((1, 1, rows, channels // 2), np.uint8)
    pages = np.zeros((1, 1, 1, channels // 64, _PAGE_BYTES), np.uint8)
    sizes = (np.int32(rows), np.int32(1), np.int32(rows))
    rule = (np.int32(ties == "toward_zero"), _MULTIPLIER)
    return Case(
        name,
        _CUBIN.with_suffix(".ptx").read_text(),
        (source.view(np.uint16)[None, :, None], codes, pages, _NULL, _NULL, _NULL, *sizes, *rule),
        {},
        block=(kernel["threads"], 1, 1),
        shared_bytes=kernel["shared_bytes"],
        cubin=_CUBIN,
        entry=kernel["entry"],
    )


def _tiles(rows: int) -> int:
    return -(-rows // _ROWS_A_TILE)


def _source(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Normal numbers of many scales, with zeros, infinities and a NaN among them."""
    values = rng.standard_normal(shape) * 2.0 ** rng.integers(-20, 20, (*shape[:-1], 1))
    values[rng.random(shape) < 0.02] = 0
    flat = values.reshape(-1)
    flat[rng.integers(0, flat.size, 3)] = np.inf, -np.inf, np.nan
    flat[:32] = 0
    return values.astype(ml_dtypes.bfloat16).view(np.uint16)


def _arguments(name: str, shape: tuple[int, int, int], limited: bool, rng: np.random.Generator) -> tuple:
    batch, rows, heads = shape
    h = 64 if "_h64" in name else 128
    padded = _tiles(rows) * _ROWS_A_TILE
    sizes = (np.int32(rows), np.int32(heads))

    def results(*extents: int) -> np.ndarray:
        return np.zeros((batch, heads, *extents), np.uint8)

    lengths = rng.integers(0, rows + 1, batch).astype(np.int32) if limited else _NULL
    segments = rng.integers(0, 3, (batch, rows)).astype(np.int32) if limited else _NULL
    source = _source(rng, batch, rows, heads, h)
    columns, value_rows = results(h, padded), results(padded, h)
    pages = results(_tiles(rows), h // 64, _PAGE_BYTES)
    if name.startswith("quantize_value_e4m3"):
        optional = value_rows if "with_rows" in name else _NULL
        return (source, columns, optional, lengths, segments, *sizes, np.float32(64), _MULTIPLIER)
    if name.startswith("quantize_value_mxfp4"):
        codes, pages = results(h, padded // 2), results(1, _tiles(rows), _PAGE_BYTES)
        optional = value_rows if "with_rows" in name else _NULL
        order = rng.permutation(rows).astype(np.int32) if "ordered" in name else _NULL
        rule = (np.int32(32 if limited else 1), np.int32(65), np.int32(1))
        return (source, codes, pages, optional, lengths, segments, order, *sizes, *rule, _MULTIPLIER)
    if name.startswith("publish_output_gradient"):
        gradient = _source(rng, batch, rows, heads, h)
        lse, lse_gradient = rng.standard_normal((2, batch, heads, rows)).astype(np.float32)
        lse[..., -1] = -np.inf
        scale = 2.0 ** rng.integers(-3, 4, (batch, heads)).astype(np.float32)
        statistic = np.zeros((batch, heads, rows), np.float32)
        arrays = (source, gradient, lse, lse_gradient, scale, value_rows, columns, statistic)
        return (*arrays, *sizes, np.int32(1), _MULTIPLIER)
    optional = columns if "with_columns" in name else _NULL
    code_rows = rows if limited else padded
    codes = results(code_rows, h // 2)
    rule = (np.int32(code_rows), np.int32(limited), _MULTIPLIER)
    return (source, codes, pages, optional, lengths, segments, *sizes, *rule)
