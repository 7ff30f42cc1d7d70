"""The library's quantising kernels on the emulator: no findings, and the same bytes for Hopper and for Blackwell.

The kernel of folded rows, which estimates before it works anything out, gives the bytes of the reference, too.
"""

import pathlib

import ml_dtypes
import numpy as np
import pytest

from cuda.emulator import Result, emulate
from jax_fp4attn.formats import quantize_nvfp4
from tests.emulator.kernels import quantizers
from tests.emulator.kernels.case import Case

_BUILD = pathlib.Path(__file__).parents[2] / "build" / "native"

pytestmark = pytest.mark.skipif(not quantizers.available(), reason="build/native has no kernels: make native")


def _run(case: Case, target: str, seed: int) -> Result:
    ptx = (_BUILD / f"kernels.{target}.ptx").read_text()
    return emulate(
        ptx,
        case.arguments,
        case.grid,
        block=case.block,
        shared_bytes=case.shared_bytes,
        entry=case.entry,
        seeds=[seed],
    )


@pytest.mark.parametrize("case", list(quantizers.cases()) if quantizers.available() else [], ids=str)
def test_hopper_and_blackwell_write_the_same_bytes(case: Case) -> None:
    hopper, blackwell = _run(case, "sm_90a", 0), _run(case, "sm_100f", 1)
    assert not hopper.findings and not blackwell.findings
    for one, other in zip(hopper.arrays[0], blackwell.arrays[0], strict=True):
        np.testing.assert_array_equal(one, other)


def _folded_rows(kind: str, rng: np.random.Generator) -> np.ndarray:
    """bfloat16 [128, 128]."""
    shape = (128, 128)
    values = rng.standard_normal(shape)
    row_sizes = np.exp2(rng.integers(-7, 12, (shape[0], 1)))
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    if kind == "small":
        values = values * 0.02
    elif kind == "of all sizes":
        values = values * np.exp2(rng.integers(-20, 20, shape))
    elif kind == "rows of all sizes":
        values = values * np.exp2(rng.integers(-30, 30, (shape[0], 1)))
    elif kind == "saturated":
        values = values * 4000
    elif kind == "coarse":
        values = np.round(values * 4) / 4
    elif kind == "equal":
        values = np.broadcast_to(values[:, :1], shape)
    elif kind == "codes":
        # Of several scales the error is 0.
        values = rng.choice(grid, shape) * row_sizes * rng.choice([-1, 1], shape)
    elif kind == "midpoints":
        values = rng.choice((grid[1:] + grid[:-1]) / 2, shape) * rng.integers(8, 16, (shape[0], 1)) * row_sizes
    elif kind == "one large":
        values[:, ::32] *= 50
    elif kind == "sparse":
        values = values * (rng.random(shape) < 0.05)
    elif kind == "special":
        for special in (np.nan, np.inf, -np.inf):
            values[rng.random(shape) < 0.003] = special
    return values.astype(ml_dtypes.bfloat16)


@pytest.mark.parametrize("ties", ["even", "toward_zero"])
@pytest.mark.parametrize(
    "kind",
    [
        "normal",
        "small",
        "of all sizes",
        "rows of all sizes",
        "saturated",
        "coarse",
        "equal",
        "codes",
        "midpoints",
        "one large",
        "sparse",
        "special",
    ],
)
def test_folded_rows_have_the_bytes_of_the_reference(kind: str, ties: str) -> None:
    source = _folded_rows(kind, np.random.default_rng(5))
    result = _run(quantizers.folded_rows(source, ties), "sm_90a", 0)
    assert not result.findings
    expected = quantize_nvfp4(source, fold="k64_mse", ties=ties).in_pages()
    _, codes, pages = result.arrays[0]
    np.testing.assert_array_equal(codes[0, 0], np.asarray(expected.codes))
    np.testing.assert_array_equal(pages[0, 0], np.asarray(expected.scales))
