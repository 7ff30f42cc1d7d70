"""Element-wise reductions against Python and NumPy."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from cuda.emulator.instructions import reductions

_OPERATIONS = {
    "add": lambda a, b: a + b,
    "min": min,
    "max": max,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "inc": lambda a, b: 0 if a >= b else a + 1,
    "dec": lambda a, b: b if a == 0 or a > b else a - 1,
}
_TYPES = {"u32": "u4", "s32": "i4", "u64": "u8", "s64": "i8", "b32": "u4", "b64": "u8"}


@pytest.mark.parametrize(
    ("operation", "kind"), [(op, kind) for op, kinds in reductions.GLOBAL.items() for kind in kinds if kind in _TYPES]
)
def test_integers(operation, kind):
    rng = np.random.default_rng(0)
    old, new = (np.concatenate([rng.integers(0, 256, 128, np.uint8).view(_TYPES[kind]), c]) for c in _corners(kind))
    result = reductions.reduction(operation, kind)(old.view(np.uint8), new.view(np.uint8)).view(old.dtype)
    bits = 8 * old.dtype.itemsize
    for a, b, c in zip(old.tolist(), new.tolist(), result.tolist(), strict=True):
        assert (c - _OPERATIONS[operation](a, b)) % (1 << bits) == 0


def _corners(kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Pairs of small and extreme values."""
    info = np.iinfo(_TYPES[kind])
    values = np.array([0, 1, 2, info.max, info.min, info.max - 1], _TYPES[kind])
    return np.repeat(values, len(values)), np.tile(values, len(values))


def test_sums_of_float32_keep_subnormals_and_flush_for_ftz():
    old = np.array([1e-45, 1.5, np.inf, 3e38, -1e-39], np.float32)
    new = np.array([1e-45, 2.25, -np.inf, 3e38, 0.0], np.float32)
    kept = reductions.reduction("add", "f32")(old.view(np.uint8), new.view(np.uint8)).view(np.uint32)
    assert kept.tolist() == [2, 0x40700000, 0x7FFFFFFF, 0x7F800000, (old[4] + new[4]).view(np.uint32)]
    flushed = reductions.reduction("add", "f32_ftz")(old.view(np.uint8), new.view(np.uint8)).view(np.uint32)
    assert flushed.tolist() == [0, 0x40700000, 0x7FFFFFFF, 0x7F800000, 0]
    minus = np.array([-1e-45], np.float32).view(np.uint8)
    assert reductions.reduction("add", "f32_ftz")(minus, minus).view(np.uint32).tolist() == [0x80000000]


def test_sums_of_float64():
    old, new = np.array([1.0, 1e300]), np.array([2.0**-53, -1e300])
    assert reductions.reduction("add", "f64")(old.view(np.uint8), new.view(np.uint8)).view(np.float64).tolist() == [
        1,
        0,
    ]


@pytest.mark.parametrize(("kind", "dtype"), [("f16", np.float16), ("bf16", ml_dtypes.bfloat16)])
def test_sums_of_halves_are_rounded_once(kind, dtype):
    bits = np.arange(0, 1 << 16, 3, np.uint16)
    other = np.random.default_rng(1).integers(0, 1 << 16, len(bits)).astype(np.uint16)
    result = reductions.reduction("add", kind)(bits.view(np.uint8), other.view(np.uint8)).view(np.uint16)
    with np.errstate(invalid="ignore", over="ignore"):
        exact = bits.view(dtype).astype(np.float64) + other.view(dtype).astype(np.float64)
        expected = exact.astype(dtype)
    nan = np.isnan(exact)
    assert (result[nan] == 0x7FFF).all()
    np.testing.assert_array_equal(result[~nan], expected.view(np.uint16)[~nan])


@pytest.mark.parametrize(("kind", "one", "nan"), [("f16", 0x3C00, 0x7E00), ("bf16", 0x3F80, 0x7FC0)])
def test_extremes_of_halves(kind, one, nan):
    minus_one = one | 0x8000
    old = np.array([one, minus_one, 0x0000, 0x8000, nan, one, nan], np.uint16)
    new = np.array([minus_one, one, 0x8000, 0x0000, one, nan, nan], np.uint16)
    smallest = reductions.reduction("min", kind)(old.view(np.uint8), new.view(np.uint8)).view(np.uint16)
    largest = reductions.reduction("max", kind)(old.view(np.uint8), new.view(np.uint8)).view(np.uint16)
    assert smallest.tolist() == [minus_one, minus_one, 0x8000, 0x8000, one, one, 0x7FFF]
    assert largest.tolist() == [one, one, 0x0000, 0x0000, one, one, 0x7FFF]
