"""The library's quantising kernels on the emulator: no findings, and the same bytes for Hopper and for Blackwell.

The kernel of folded rows, which estimates before it works anything out, gives the bytes of the reference, too.
"""

import pathlib

import jax
import ml_dtypes
import numpy as np
import pytest

from cuda.emulator import Output, Result, emulate
from jax_fp4attn import recipes, reference
from jax_fp4attn.config import OperatorConfig
from jax_fp4attn.formats import E2M1, E4M3, decode, encode, quantize_nvfp4, round_to
from tests.emulator.kernels import quantizers
from tests.emulator.kernels.case import Case
from tests.emulator.kernels.forward import Shape
from tests.emulator.kernels.hopper_backward import inputs
from tests.emulator.kernels.hopper_forward import LIBRARY

_BUILD = pathlib.Path(__file__).parents[2] / "build" / "native"

_MULTIPLES = np.array([4, 5, 6, 7, 8, 10, 12, 14, 16, 18, 20], np.float32) / 16
# Found by hill climbing.
_BEST_BY_THE_THIRD_ESTIMATE = (
    "3e853fe53ddf3f7a3f263e453f163f983f213e4a3f073fd93ed43f35402e3e0e400b3f523d0a3ece3f883f713e883ec13f2f3e843ff53f423f933d333e283fcf",
    "3ff63c583f61400b3e963f5a3f8b3f8f3f583f033ed23f5d40263e8b3fbb3f243e943ea13e7c3f093ee43e763d863f6d3fa03e2d3fb93f033e423f7f3f9b3f9e",
    "3e8b3f873fde3eed3fdf3f083f833f21400a3f4e3fa43e713f2a3f083fc63f223eda3f063f173f513f0d3f8a3f973eba3fe23f183ef03f3e40373f993ec53f94",
    "3f4a3ef03f123f233d9d3f553fcc3dc93f8c3f233fff3f223fa23fca3e393cf43fe93f4f3ec93f893e3a3fb13b9d3efe3e893e9b3edc3f933fae3fcc3eab3ec5",
)

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


def _errors(blocks: np.ndarray) -> np.ndarray:
    """Of every multiple for pairs of blocks [n, 32]; infinity where the multiple before it has the same scale."""
    errors, scales = [], []
    for multiple in _MULTIPLES:
        scales.append(np.asarray(encode(blocks.max(1) * multiple, E4M3, divisor=6.0)))
        step = np.asarray(decode(scales[-1], E4M3))[:, None]
        values = np.asarray(round_to(blocks, E2M1, divisor=step)) * step
        errors.append(((values - blocks).astype(np.float64) ** 2).sum(1))
    repeats = np.diff(np.array(scales, np.int32), axis=0, prepend=-1) == 0
    return np.where(repeats, np.inf, np.array(errors))


def _pairs_of_blocks(kind: str, rng: np.random.Generator) -> np.ndarray:
    """float32 [512, 32]; what has to be looked for comes from 20,000."""
    if kind == "best by the third estimate":
        words = np.array([[int(text[i : i + 4], 16) for i in range(0, 128, 4)] for text in _BEST_BY_THE_THIRD_ESTIMATE])
        found = words.astype(np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
    elif kind == "two close candidates":
        blocks = np.abs(rng.standard_normal((20_000, 32))).astype(ml_dtypes.bfloat16).astype(np.float32)
        best, second = np.sort(_errors(blocks), axis=0)[:2]
        found = blocks[np.argsort(second / best)[:512]]
    elif kind == "best by a small multiple":
        # Only where the largest multiples saturate: elsewhere the multiple twice as large is better.
        bits = rng.integers(0x4480, 0x4621, (20_000, 1)).astype(np.uint16)
        one, other, share = rng.random((3, len(bits), 1))
        levels = np.where(rng.random((len(bits), 32)) < share, one, other)
        levels[:, 0] = 1
        blocks = levels * bits.view(ml_dtypes.bfloat16).astype(np.float32)
        blocks = blocks.astype(ml_dtypes.bfloat16).astype(np.float32)
        best = _MULTIPLES[_errors(blocks).argmin(0)]
        scales = [np.asarray(encode(blocks.max(1) * m, E4M3, divisor=6.0)) for m in (best, 0.75)]
        found = blocks[scales[0] < scales[1]]
        assert len(found) > 100
    return np.resize(found, (512, 32))


def _folded_rows(kind: str, rng: np.random.Generator) -> np.ndarray:
    """bfloat16 [128, 128]."""
    shape = (128, 128)
    values = rng.standard_normal(shape)
    row_sizes = np.exp2(rng.integers(-7, 12, (shape[0], 1)))
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    if kind in ("best by the third estimate", "two close candidates", "best by a small multiple"):
        # [row, block, half, channel]
        halves = _pairs_of_blocks(kind, rng).reshape(shape[0], 4, 2, 16)
        values = halves.swapaxes(1, 2).reshape(shape)
    elif kind == "small":
        values = values * 0.02
    elif kind == "tiny":
        values = values * 0.012
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
        "two close candidates",
        "best by the third estimate",
        "best by a small multiple",
        "small",
        "tiny",
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


def test_rows_of_the_backward_have_the_bytes_of_the_reference_and_show_an_overflow() -> None:
    """g of the first key/value head is NaN, as an infinite cotangent makes it."""
    config = OperatorConfig(recipes.train, scale=0.125, is_causal=True, window=None)
    shape = Shape(2, 130, 130, 4, 2, 64)
    _, _, _, d_output, d_lse = inputs(shape)
    output = inputs(shape, seed=1)[0]
    d_output[0, 7, 1, 3] = np.inf
    lse = np.random.default_rng(0).standard_normal(d_lse.shape).astype(np.float32)
    lse[:, :, 77] = -np.inf
    scale = reference.gradient_scale(config, lse, d_output, d_lse, shape.K)
    expected = jax.jit(reference.row_operands, static_argnums=0)(config, output, lse, d_output, d_lse, scale)
    values = {
        "output": output.view(np.uint16),
        "output_gradient": d_output.view(np.uint16),
        "lse": lse,
        "lse_gradient": d_lse,
        "gradient_scale": np.asarray(scale),
        "published_rows": Output(np.zeros(expected.output_gradient.shape, np.uint8)),
        "columns": Output(np.zeros(expected.output_gradient_columns.shape, np.uint8)),
        "row_statistic": Output(np.zeros(expected.row_statistic.shape, np.float32)),
        "num_rows": shape.T,
        "num_heads": shape.N,
        "heads_a_group": 2,
        "multiplier": recipes.train.backward_multiplier,
    }
    (found,), findings = LIBRARY.run("publish_output_gradient_h64", (shape.N, 2, shape.B), values)
    assert not findings
    np.testing.assert_array_equal(np.isnan(np.asarray(scale)), [[True, False], [False, False]])
    np.testing.assert_array_equal(found["published_rows"], np.asarray(expected.output_gradient))
    np.testing.assert_array_equal(found["columns"], np.asarray(expected.output_gradient_columns))
    np.testing.assert_array_equal(found["row_statistic"], np.asarray(expected.row_statistic))
    assert (found["published_rows"][0, :2] == 0x7F).all() and np.isnan(found["row_statistic"][0, :2]).all()
    assert not found["published_rows"][0, 2:, 77].any() and not found["row_statistic"][0, 2:, 77].any()
