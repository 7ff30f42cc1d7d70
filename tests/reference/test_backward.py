"""Gradients of every recipe against the float64 straight-through oracle, and against exact attention."""

import dataclasses

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jax_fp4attn import recipes, reference
from jax_fp4attn.config import OperatorConfig
from tests import oracles, shapes
from tests.assertions import cosine, relative_l2
from tests.reference.agreement import assert_gradients_agree, input_gradients, straight_through
from tests.shapes import SHAPES, Shape

CAUSAL = Shape((2,), 128, 128, 2, 2, 64)


class TestRecipes:
    @pytest.mark.parametrize(
        "changes",
        [
            {"backward_qk": "represented"},
            {"backward_qk": "represented", "backward": "bf16"},
            {"backward_multiplier": 0.5, "backward_p_lift_bits": 3},
            {"output_gradient_scale": "unit", "backward_lse_correction": 0.25},
        ],
        ids=lambda changes: "-".join(changes),
    )
    def test_fields_that_no_named_recipe_sets(self, changes):
        recipe = dataclasses.replace(recipes.train, **changes)
        inputs = shapes.normal(Shape((1,), 40, 150, 2, 1, 64), seed=1)
        result = shapes.evaluate(inputs, recipe=recipe)
        assert_gradients_agree(result, straight_through(recipe, inputs, result, rounded=True))

    def test_a_rebuilt_probability_stops_at_one(self):
        # Direct-P's code for a row's only key may stand for less than its exponential, and lse is then too small.
        inputs = shapes.normal(Shape((1,), 40, 40, 2, 1, 64), seed=7)
        options = {"local_window_size": (0, 0)}
        result = shapes.evaluate(inputs, recipe=recipes.square, **options)
        call = shapes.oracle_call(inputs, **options)
        raw = oracles.raw_scores(recipes.square, call).max(-1)
        lse = np.swapaxes(result.lse, 1, 2) + recipes.square.backward_lse_correction
        assert np.mean(np.exp(raw * call.scale - lse) > 1.1) > 0.1
        assert_gradients_agree(result, straight_through(recipes.square, inputs, result, rounded=True, **options))
        largest = np.abs(oracles.float64(inputs.d_output)).sum(2, keepdims=True)
        assert (np.abs(oracles.float64(result.d_value)) <= largest * (1 + 2**-3)).all()  # E5M2

    def test_bfloat16_accumulation_rounds_dq_at_every_tile(self):
        inputs = shapes.normal(Shape((1,), 40, 400, 2, 1, 64))
        float32, per_tile = (
            shapes.evaluate(inputs, recipe=dataclasses.replace(recipes.train_unit_gradient_scale, dq_accumulation=how))
            for how in ("float32", "bfloat16_per_tile")
        )
        np.testing.assert_array_equal(float32.d_key, per_tile.d_key)
        error = relative_l2(per_tile.d_query, float32.d_query)
        assert 1e-4 < error < 2**-8


class TestTrainingRecipe:
    @pytest.mark.parametrize("std", [1e-3, 1e-8, 1e6])
    def test_the_magnitude_of_the_cotangent_does_not_matter(self, std):
        # A power of two near `std`, so that the gradient scale undoes it exactly.
        factor = 2.0 ** round(np.log2(std))
        inputs = shapes.normal(CAUSAL)
        result = shapes.evaluate(inputs, recipe=recipes.train, is_causal=True)
        scaled = inputs._replace(
            d_output=(factor * inputs.d_output.astype(np.float32)).astype(ml_dtypes.bfloat16),
            d_lse=(factor * inputs.d_lse).astype(np.float32),
        )
        from_scaled = shapes.evaluate(scaled, recipe=recipes.train, is_causal=True)
        for small, one in zip(input_gradients(from_scaled), input_gradients(result), strict=True):
            np.testing.assert_array_equal(oracles.float64(small), factor * oracles.float64(one))

    def test_an_unscaled_cotangent_underflows_where_a_scaled_one_does_not(self):
        inputs = shapes.normal(CAUSAL)
        inputs = inputs._replace(
            d_output=(1e-8 * inputs.d_output.astype(np.float32)).astype(ml_dtypes.bfloat16),
            d_lse=np.zeros_like(inputs.d_lse),
        )
        unit = dataclasses.replace(recipes.train, output_gradient_scale="unit")
        assert not shapes.evaluate(inputs, recipe=unit, is_causal=True).d_value.any()
        assert shapes.evaluate(inputs, recipe=recipes.train, is_causal=True).d_value.any()

    def test_each_batch_entry_and_key_value_head_has_its_own_gradient_scale(self):
        inputs = shapes.normal(CAUSAL)
        factors = np.array([[1, 2.0**-30], [2.0**-60, 2.0**20]])[:, None, :]
        scaled = inputs._replace(
            d_output=(factors[..., None] * oracles.float64(inputs.d_output)).astype(ml_dtypes.bfloat16),
            d_lse=(factors * inputs.d_lse).astype(np.float32),
        )
        one, many = (shapes.evaluate(x, recipe=recipes.train, is_causal=True) for x in (inputs, scaled))
        for x, y in zip(input_gradients(one), input_gradients(many), strict=True):
            np.testing.assert_array_equal(factors[..., None] * oracles.float64(x), oracles.float64(y))

    def test_the_gradient_scale_is_that_of_rounded_cotangents(self):
        config = OperatorConfig(recipes.train, scale=0.125, is_causal=True, window=None)
        zeros, just_below_two = jnp.zeros((1, 2, 8)), jnp.full((1, 8, 2, 64), 1.9999, jnp.float32)
        assert reference.gradient_scale(config, zeros, just_below_two, zeros, 1).tolist() == [[0.5]]

    @pytest.mark.parametrize("cotangent", [np.inf, -np.inf, np.nan, 2.0**101])
    @pytest.mark.parametrize("of", ["d_output", "d_lse"])
    def test_an_overflow_is_not_hidden(self, of, cotangent):
        """Saturated, it would be a finite gradient, and the rest of the head's would vanish beside it."""
        inputs = shapes.normal(CAUSAL)
        spoiled = np.array(getattr(inputs, of))
        spoiled[1, 5, 0] = cotangent
        clean, result = (
            shapes.evaluate(x, recipe=recipes.train, is_causal=True) for x in (inputs, inputs._replace(**{of: spoiled}))
        )
        for x, y in zip(input_gradients(clean), input_gradients(result), strict=True):
            x, y = (oracles.float64(value) for value in (x, y))
            # Of the kv head, and of no other batch entry or head.
            assert np.isnan(y[1, :, 0]).all()
            np.testing.assert_array_equal(y[0], x[0])
            np.testing.assert_array_equal(y[1, :, 1], x[1, :, 1])

    def test_the_largest_cotangents(self):
        inputs = shapes.normal(CAUSAL)
        factor = 2.0**98 / np.abs(oracles.float64(inputs.d_output)).max()
        factor = 2.0 ** np.floor(np.log2(factor))
        large = inputs._replace(
            d_output=(factor * oracles.float64(inputs.d_output)).astype(ml_dtypes.bfloat16),
            d_lse=(factor * inputs.d_lse).astype(np.float32),
        )
        one, many = (shapes.evaluate(x, recipe=recipes.train, is_causal=True) for x in (inputs, large))
        for x, y in zip(input_gradients(one), input_gradients(many), strict=True):
            np.testing.assert_array_equal(factor * oracles.float64(x), oracles.float64(y))

    def test_zero_cotangents_give_exact_zeros(self):
        inputs = shapes.normal(CAUSAL)
        inputs = inputs._replace(d_output=np.zeros_like(inputs.d_output), d_lse=np.zeros_like(inputs.d_lse))
        for gradient in input_gradients(shapes.evaluate(inputs, recipe=recipes.train, is_causal=True)):
            np.testing.assert_array_equal(gradient, 0)

    def test_gradient_of_the_lse_alone(self):
        inputs = shapes.normal(CAUSAL)
        inputs = inputs._replace(d_output=np.zeros_like(inputs.d_output))
        result = shapes.evaluate(inputs, recipe=recipes.train, is_causal=True)
        np.testing.assert_array_equal(result.d_value, 0)
        call = shapes.oracle_call(inputs, is_causal=True)
        exact = oracles.exact_gradients(call, inputs.d_output, inputs.d_lse)
        assert relative_l2(result.d_query, exact.query) < 0.15  # NVFP4 scores
        assert relative_l2(result.d_key, exact.key) < 0.15
        rounded = straight_through(recipes.train, inputs, result, rounded=True, is_causal=True)
        assert relative_l2(result.d_query, oracles.bfloat16(rounded.query)) < 4e-3
        # It takes part in the gradient scale: without, dS would saturate.
        huge = shapes.evaluate(inputs._replace(d_lse=inputs.d_lse * 2**30), recipe=recipes.train, is_causal=True)
        np.testing.assert_array_equal(oracles.float64(huge.d_key), 2**30 * oracles.float64(result.d_key))

    def test_float32_inputs_have_float32_gradients_with_bfloat16_values(self):
        inputs = shapes.normal(SHAPES["mqa"]).astype(np.float32)
        for gradient in input_gradients(shapes.evaluate(inputs, recipe=recipes.train, is_causal=True)):
            assert gradient.dtype == np.float32
            np.testing.assert_array_equal(oracles.float64(gradient), oracles.bfloat16(oracles.float64(gradient)))

    def test_a_second_run_gives_the_same_bits(self):
        inputs = shapes.normal(CAUSAL)
        first, second = (shapes.evaluate(inputs, recipe=recipes.train, is_causal=True) for _ in range(2))
        for x, y in zip(first[:5], second[:5], strict=True):
            np.testing.assert_array_equal(x, y)


class TestExact:
    """Inputs on which no step rounds: the gradient is then the exact one, to the bfloat16 of the result."""

    def test_one_visible_key_a_row(self):
        # P is 1: dQ and dK vanish and dV is dO itself, to the three bits of E5M2.
        inputs = self._grid_inputs(Shape((1,), 32, 32, 2, 2, 64))
        for name in (
            "train",
            "fp8_pv",
        ):  # with 4-bit V the output differs from the backward's V, so dS would not vanish
            result = shapes.evaluate(inputs, recipe=recipes.named()[name], local_window_size=(0, 0))
            np.testing.assert_array_equal(oracles.float64(result.d_value), oracles.float64(inputs.d_output))
            np.testing.assert_array_equal(result.d_query, 0)
            np.testing.assert_array_equal(result.d_key, 0)

    @pytest.mark.parametrize("visible", [2, 64])
    def test_equal_keys_in_powers_of_two(self, visible):
        # Equal scores: P = 1 / visible exactly, and dV sums few dyadic numbers.
        inputs = self._grid_inputs(Shape((1,), 16, visible, 2, 1, 64))
        # An eighth of the grid: dS would leave E4M3 with the values themselves.
        inputs = inputs._replace(key=np.repeat(inputs.key[:, :1], visible, 1), value=inputs.value / 8)
        result = shapes.evaluate(inputs, recipe=recipes.train)
        exact = oracles.exact_gradients(shapes.oracle_call(inputs), inputs.d_output)
        output = oracles.exact_forward(shapes.oracle_call(inputs)).output
        np.testing.assert_array_equal(oracles.float64(result.output), oracles.bfloat16(output))
        np.testing.assert_array_equal(oracles.float64(result.d_value), oracles.bfloat16(exact.value))
        # dS sums 64 products and rounds to E4M3, the only step here that is not exact.
        assert relative_l2(result.d_key, exact.key) < 0.03

    def test_two_keys_with_dyadic_gradients(self):
        # Two equal keys, P = 1/2, V = ±1 in channel 0: dS = ±dO / 2 * scale, all of them dyadic.
        query = np.full((1, 4, 1, 64), 6, np.float32)
        key = np.zeros((1, 2, 1, 64), np.float32)
        key[..., :16] = 6
        value = np.zeros_like(key)
        value[0, :, 0, 0] = [1, -1]
        d_output = np.zeros_like(query)
        d_output[0, :, 0, 0] = [1, 0.5, -2, 3]
        inputs = shapes.Inputs(query, key, value, d_output, np.zeros((1, 4, 1), np.float32))
        result = shapes.evaluate(inputs, recipe=recipes.train, scale=0.125)
        exact = oracles.exact_gradients(shapes.oracle_call(inputs, scale=0.125), d_output)
        np.testing.assert_array_equal(result.d_query, exact.query)
        np.testing.assert_array_equal(result.d_key, exact.key)
        np.testing.assert_array_equal(result.d_value, exact.value)
        assert exact.key.any()

    @staticmethod
    def _grid_inputs(shape: Shape) -> shapes.Inputs:
        """Inputs on the FP4 grid with 6 in every block of 16, so that all scales are 1; dO on the E5M2 grid."""
        rng = np.random.default_rng(2)

        def draw(length: int, heads: int) -> np.ndarray:
            x = rng.choice(oracles.E2M1_GRID, (*shape.batch, length, heads, shape.head_size))
            x *= rng.choice([-1, 1], x.shape)
            x[..., ::16] = 6
            return x.astype(ml_dtypes.bfloat16)

        d_output = rng.choice([-1.5, -1, -0.5, 0.25, 0.5, 1, 1.75], (*shape.batch, shape.queries, shape.heads, 64))
        return shapes.Inputs(
            draw(shape.queries, shape.heads),
            draw(shape.keys, shape.kv_heads),
            draw(shape.keys, shape.kv_heads),
            d_output.astype(ml_dtypes.bfloat16),
            np.zeros((*shape.batch, shape.queries, shape.heads), np.float32),
        )


class TestBias:
    SHAPE = Shape((2,), 20, 150, 4, 2, 64)

    @pytest.mark.parametrize("bias_shape", [(2, 4, 20, 150), (2, 1, 1, 150), (1, 4, 20, 1), (1, 1, 1, 1)])
    def test_gradient_of_every_broadcast_shape(self, bias_shape):
        inputs = shapes.normal(self.SHAPE, seed=3)
        bias = np.random.default_rng(4).standard_normal(bias_shape).astype(np.float32)
        result = shapes.evaluate(inputs, bias, recipe=recipes.train, is_causal=True)
        dense = straight_through(recipes.train, inputs, result, rounded=True, bias=bias, is_causal=True).bias
        axes = tuple(axis for axis in range(4) if bias_shape[axis] == 1)
        expected = dense.sum(axes, keepdims=True)
        assert result.d_bias.shape == bias_shape
        assert result.d_bias.dtype == np.float32
        # Where a row's dS is summed, terms cancel: compare with the size of the terms.
        size = np.sqrt((dense**2).sum(axes, keepdims=True))
        assert np.linalg.norm(result.d_bias - expected) < 1e-3 * np.linalg.norm(size)
        exact = oracles.exact_gradients(
            shapes.oracle_call(inputs, bias, is_causal=True), inputs.d_output, inputs.d_lse
        ).bias.sum(axes, keepdims=True)
        if bias_shape[-1] != 1:
            assert cosine(result.d_bias, exact) > 0.95

    def test_a_bfloat16_bias_has_a_bfloat16_gradient(self):
        inputs = shapes.normal(self.SHAPE, seed=3)
        bias = np.zeros((2, 4, 20, 150), ml_dtypes.bfloat16)
        assert shapes.evaluate(inputs, bias, recipe=recipes.train, is_causal=True).d_bias.dtype == ml_dtypes.bfloat16

    def test_gradient_of_a_direct_p_recipe(self):
        inputs = shapes.normal(self.SHAPE, seed=5)
        bias = np.random.default_rng(6).standard_normal((2, 4, 20, 150)).astype(np.float32)
        result = shapes.evaluate(inputs, bias, recipe=recipes.square)
        dense = straight_through(recipes.square, inputs, result, rounded=True, bias=bias).bias
        assert relative_l2(result.d_bias, dense) < 1e-3
