"""What the steps hand to one another: shapes and dtypes, zeros in the padding, and which array repeats which."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import ml_dtypes
import numpy as np
import pytest

from jax_fp4attn import recipes, reference
from jax_fp4attn.config import OperatorConfig, Visibility
from jax_fp4attn.formats import E4M3, E5M2, BlockScaled, decode
from tests import oracles
from tests.formats.oracles import assert_same_bytes, sum_of_neighbours
from tests.shapes import COMPILER_OPTIONS

BATCH, HEADS, KV_HEADS = 2, 4, 2

RECIPES = {
    "train": recipes.train,
    "square": recipes.square,
    "accurate": recipes.accurate,
    "nvfp4_pv": recipes.nvfp4_pv,
    "bf16": recipes.bf16,
    "amax": dataclasses.replace(recipes.train, qk_tensor_scale="amax"),
    "represented": dataclasses.replace(recipes.train, backward_qk="represented"),
}


class Sizes(NamedTuple):
    """T, S and H, and what they are padded to."""

    queries: int
    keys: int
    head_size: int
    padded_queries: int
    padded_keys: int
    padded_head_size: int


SIZES = {
    "tiles": Sizes(128, 256, 64, 128, 256, 64),
    "one": Sizes(1, 1, 128, 128, 128, 128),
    "tails": Sizes(130, 287, 80, 256, 384, 128),
    "head_size_256": Sizes(33, 65, 200, 128, 128, 256),
}


# Every recipe and every size, not every pair of them: each is a program to compile.
CASES = [
    *(("train", sizes) for sizes in SIZES),
    *((recipe, "tails") for recipe in RECIPES if recipe != "train"),
    ("square", "tiles"),
    ("bf16", "one"),
]


class Case(NamedTuple):
    """A recipe and sizes, the inputs, and everything that is published."""

    config: OperatorConfig
    sizes: Sizes
    inputs: tuple[jax.Array, ...]  # query, key, value, output, lse, their cotangents
    training: reference.TrainingOperands
    forward: reference.Operands
    scale: jax.Array
    rows: reference.RowOperands


@functools.partial(jax.jit, static_argnums=0, compiler_options=COMPILER_OPTIONS)
def publish(config, query, key, value, output, lse, d_output, d_lse):
    scale = reference.gradient_scale(config, lse, d_output, d_lse, KV_HEADS)
    return (
        reference.quantize_for_training(config, query, key, value, Visibility()),
        reference.quantize_operands(config, query, key, value, Visibility()),
        scale,
        reference.row_operands(config, output, lse, d_output, d_lse, scale),
    )


@pytest.fixture(name="case", scope="module", params=CASES, ids="-".join)
def _case(request):
    recipe, sizes = RECIPES[request.param[0]], SIZES[request.param[1]]
    rng = np.random.default_rng(0)

    def draw(length, heads):
        return rng.standard_normal((BATCH, length, heads, sizes.head_size)).astype(ml_dtypes.bfloat16)

    query, key, value = draw(sizes.queries, HEADS), draw(sizes.keys, KV_HEADS), draw(sizes.keys, KV_HEADS)
    output, d_output = draw(sizes.queries, HEADS), draw(sizes.queries, HEADS)
    lse, d_lse = (rng.standard_normal((BATCH, HEADS, sizes.queries)).astype(np.float32) for _ in range(2))
    # The last row of two heads does not contribute, whatever it and its cotangents hold.
    lse[:, 0, -1], lse[:, 1, -1], d_lse[:, :2, -1] = -np.inf, np.inf, np.nan
    output[:, -1, :2], d_output[:, -1, :2] = np.nan, np.nan
    config = OperatorConfig(recipe, scale=0.125, is_causal=False, window=None)
    inputs = (query, key, value, output, lse, d_output, d_lse)
    return Case(config, sizes, inputs, *publish(config, *inputs))


def described(x):
    """dtype and shape of an array, or of codes and pages."""
    if isinstance(x, BlockScaled):
        assert x.scale_layout == "pages"
        return described(x.codes), described(x.scales)
    return x.dtype.name, x.shape


def pages(*batch, rows, blocks):
    return "uint8", (*batch, -(-rows // 128), blocks // 4, 512)


class TestShapes:
    def test_scores(self, case):
        queries, keys, head_size = case.sizes.queries, *case.sizes[4:]
        for x, heads, rows in ((case.forward.query, HEADS, queries), (case.forward.key, KV_HEADS, keys)):
            shape = (BATCH, heads, rows)
            if case.config.recipe.qk_format == "bf16":
                assert described(x) == ("bfloat16", (*shape, head_size))
                continue
            scales = pages(BATCH, heads, rows=rows, blocks=head_size // 16)
            assert described(x) == (("uint8", (*shape, head_size // 2)), scales)
            assert x.block_size == 16
            tensor_scale = None if x.tensor_scale is None else x.tensor_scale.shape
            assert tensor_scale == ((BATCH, heads, 1, 1) if case.config.recipe.qk_tensor_scale == "amax" else None)

    def test_values_lie_along_their_keys(self, case):
        keys, head_size = case.sizes[4:]
        shape, recipe = (BATCH, KV_HEADS, head_size), case.config.recipe
        actual = described(case.forward.value)
        if recipe.v_format in ("bf16", "e4m3"):
            assert actual == ("bfloat16" if recipe.v_format == "bf16" else "uint8", (*shape, keys))
            return
        blocks = keys // (32 if recipe.v_format == "mxfp4" else 16)
        assert actual == (
            ("uint8", (*shape, keys // 2)),
            pages(BATCH, KV_HEADS, rows=head_size, blocks=blocks),
        )

    def test_of_the_backward(self, case):
        queries, keys, head_size = case.sizes[3:]
        dtype = "bfloat16" if case.config.recipe.backward == "bf16" else "uint8"
        operands = case.training.for_backward()
        assert described(operands.value) == (dtype, (BATCH, KV_HEADS, keys, head_size))
        if case.config.recipe.backward_qk == "represented":
            assert operands.query is operands.key is None
        else:
            assert described(operands.query) == (dtype, (BATCH, HEADS, head_size, queries))
            assert described(operands.key) == (dtype, (BATCH, KV_HEADS, head_size, keys))
        assert described(case.rows.output_gradient) == (dtype, (BATCH, HEADS, queries, head_size))
        assert described(case.rows.output_gradient_columns) == (dtype, (BATCH, HEADS, head_size, queries))
        assert described(case.rows.row_statistic) == ("float32", (BATCH, HEADS, case.sizes.queries))
        assert described(case.scale) == ("float32", (BATCH, KV_HEADS))


def bits(x):
    """An array as integers, so that -0 is not 0."""
    x = np.asarray(x)
    return x.view(np.dtype(f"uint{8 * x.itemsize}"))


def assert_zero_behind(x, rows, columns):
    """Asserts that all bits of [B, N, rows', columns'] are zero behind rows and columns."""
    assert not bits(x)[:, :, rows:].any()
    assert not bits(x)[..., columns:].any()


def assert_block_scaled_zero_behind(x, rows, columns, scaled_columns):
    assert_zero_behind(x.codes, rows, -(-columns // 2))
    scales = x.in_rows().scales
    assert_zero_behind(scales, rows, -(-scaled_columns // x.block_size))
    # Nor is there anything in the pages behind the last row and the last block.
    assert np.sum(x.scales, dtype=int) == np.sum(scales, dtype=int)


class TestPadding:
    def test_of_scores_is_zero(self, case):
        recipe, (queries, keys, head_size) = case.config.recipe, case.sizes[:3]
        # A folded scale is stored for both of its blocks, of which one may be padding.
        scaled = head_size if recipe.qk_scale_fold == "none" else case.sizes.padded_head_size
        for x, length in ((case.forward.query, queries), (case.forward.key, keys)):
            if isinstance(x, BlockScaled):
                assert_block_scaled_zero_behind(x, length, head_size, scaled)
            else:
                assert_zero_behind(x, length, head_size)

    def test_of_values_is_zero(self, case):
        x, _, keys, head_size = case.forward.value, *case.sizes[:3]
        if isinstance(x, BlockScaled):
            assert_block_scaled_zero_behind(x, head_size, keys, keys)
        else:
            assert_zero_behind(x, head_size, keys)

    def test_of_the_backward_is_zero(self, case):
        queries, keys, head_size = case.sizes[:3]
        operands = case.training.for_backward()
        assert_zero_behind(operands.value, keys, head_size)
        if operands.query is not None:
            assert_zero_behind(operands.query, head_size, queries)
            assert_zero_behind(operands.key, head_size, keys)
        assert_zero_behind(case.rows.output_gradient, queries, head_size)

    def test_rows_that_do_not_contribute_are_zero(self, case):
        last = case.sizes.queries - 1
        assert not bits(case.rows.output_gradient)[:, :2, last].any()
        assert not bits(case.rows.row_statistic)[:, :2, last].any()
        assert bits(case.rows.output_gradient)[:, 2:, last].any()


class TestAgreement:
    def test_training_has_the_operands_of_the_forward(self, case):
        assert_same_bytes(case.training.forward, case.forward)
        operands = case.training.for_backward()
        assert operands.score_query is case.training.forward.query
        assert operands.score_key is case.training.forward.key

    def test_columns_are_rows_transposed(self, case):
        transposed = np.swapaxes(bits(case.rows.output_gradient), 2, 3)
        np.testing.assert_array_equal(bits(case.rows.output_gradient_columns), transposed)

    def test_values_are_those_of_the_inputs(self, case):
        recipe, (queries, keys, head_size) = case.config.recipe, case.sizes[:3]
        operands = case.training.for_backward()

        def values(x):
            return oracles.float64(x) if recipe.backward == "bf16" else oracles.float64(decode(x, E4M3))

        def expected(x):
            x = np.swapaxes(oracles.float64(x), 1, 2)
            return x if recipe.backward == "bf16" else oracles.e4m3(recipe.backward_multiplier * x)

        query, key, value = case.inputs[:3]
        np.testing.assert_array_equal(values(operands.value)[:, :, :keys, :head_size], expected(value))
        if operands.query is not None:
            rows = np.swapaxes(values(operands.query), 2, 3)[:, :, :queries, :head_size]
            np.testing.assert_array_equal(rows, expected(query))
            np.testing.assert_array_equal(
                np.swapaxes(values(operands.key), 2, 3)[:, :, :keys, :head_size], expected(key)
            )

    def test_statistic_is_the_sum_of_neighbours_from_the_rounded_gradient(self, case):
        recipe, (queries, _, head_size) = case.config.recipe, case.sizes[:3]
        output, lse, _, d_lse = case.inputs[3:]
        rows = case.rows.output_gradient[:, :, :queries]
        rounded = np.float32(rows if recipe.backward == "bf16" else decode(rows, E5M2))
        output = np.pad(np.swapaxes(np.float32(output), 1, 2), [(0, 0)] * 3 + [(0, rounded.shape[3] - head_size)])
        m = np.float32(recipe.backward_multiplier if recipe.backward == "fp8" else 1)
        scale = np.repeat(np.asarray(case.scale), HEADS // KV_HEADS, axis=1)[..., None]
        expected = m * m * scale * np.asarray(d_lse) - m * sum_of_neighbours(output * rounded)
        np.testing.assert_array_equal(case.rows.row_statistic, np.where(np.isinf(lse), 0, expected))
