"""Every recipe on one shape and the training recipe on every shape: one compiled program each, compared in full."""

from typing import NamedTuple

import numpy as np
import pytest

from jax_fp4attn import Recipe, recipes
from tests import oracles, shapes
from tests.assertions import cosine, relative_l2
from tests.reference.agreement import assert_forward_agrees, assert_gradients_agree, input_gradients, straight_through
from tests.shapes import SHAPES, Shape

RECIPES = {
    **recipes.named(),
    "guarded": recipes.guarded(10, 16),
    "guarded_raw_margin": recipes.guarded_raw_margin(110, 16),
}


class Run(NamedTuple):
    """A call, its results and how the oracles see it."""

    recipe: Recipe
    inputs: shapes.Inputs
    options: dict
    result: shapes.Result
    call: oracles.Call


def run_once(recipe: Recipe, shape: Shape, **options: bool) -> Run:
    inputs = shapes.normal(shape)
    result = shapes.evaluate(inputs, recipe=recipe, **options)
    return Run(recipe, inputs, options, result, shapes.oracle_call(inputs, **options))


def exact_gradients(run: Run) -> oracles.Gradients:
    d_output = run.inputs.d_output.reshape(run.call.query.shape)
    return oracles.exact_gradients(run.call, d_output, run.inputs.d_lse.reshape(d_output.shape[:-1]))


class TestEveryRecipe:
    # Two query tiles, so that schedules which treat them differently show it, and three key tiles with a tail of 31.
    SHAPE = Shape((1,), 132, 287, 2, 1, 64)

    @pytest.fixture(scope="class", params=RECIPES)
    @classmethod
    def run(cls, request):
        return run_once(RECIPES[request.param], cls.SHAPE)

    def test_output_and_lse_are_those_of_the_dense_oracle(self, run):
        assert_forward_agrees(run.result, oracles.forward(run.recipe, run.call))

    def test_gradients_are_those_of_the_straight_through_oracle(self, run):
        rounded = straight_through(run.recipe, run.inputs, run.result, rounded=True)
        assert_gradients_agree(run.result, rounded)

    def test_gradients_point_the_way_of_the_exact_ones(self, run):
        for actual, exact in zip(input_gradients(run.result), exact_gradients(run)[:3], strict=True):
            assert cosine(actual, exact) > (0.9999 if run.recipe == recipes.bf16 else 0.95)
            assert 0.9 < np.linalg.norm(oracles.float64(actual)) / np.linalg.norm(exact) < 1.1

    def test_correction_brings_the_lse_to_that_of_the_scores(self, run):
        # The scores are the forward's own, so that only the denominator's mass differs.
        raw = oracles.raw_scores(run.recipe, run.call)[..., : self.SHAPE.keys] * run.call.scale
        exact = np.log(np.exp(raw).sum(-1))
        difference = np.swapaxes(run.result.lse, 1, 2) + run.recipe.backward_lse_correction - exact
        # The logarithm of a sum over every eighth key is too small on average, by about 6 / S, and it scatters.
        assert abs(difference.mean()) < (0.06 if run.recipe.denominator == "sampled" else 0.03)


class TestTrainingRecipeOnEveryShape:
    @pytest.fixture(scope="class", params=SHAPES)
    @classmethod
    def run(cls, request):
        return run_once(recipes.train, SHAPES[request.param], is_causal=True)

    def test_output_and_lse_are_those_of_the_dense_oracle(self, run):
        assert run.result.output.shape == run.inputs.query.shape
        assert run.result.lse.shape == run.inputs.query.shape[:-1]
        assert_forward_agrees(run.result, oracles.forward(run.recipe, run.call))

    def test_gradients_are_those_of_the_straight_through_oracle(self, run):
        rounded = straight_through(run.recipe, run.inputs, run.result, rounded=True, **run.options)
        assert_gradients_agree(run.result, rounded)

    def test_rounding_of_p_and_ds_costs_a_few_per_cent(self, run):
        unrounded = straight_through(run.recipe, run.inputs, run.result, rounded=False, **run.options)
        for actual, expected, bound in zip(input_gradients(run.result), unrounded[:3], (0.07, 0.04, 0.04), strict=True):
            expected = expected.reshape(actual.shape)
            # With few visible keys and a handful of rows single elements decide, with one key there is no dS at all.
            if np.count_nonzero(expected) > 10_000:
                assert relative_l2(actual, expected) < bound

    def test_gradients_point_the_way_of_the_exact_ones(self, run):
        for actual, exact in zip(input_gradients(run.result), exact_gradients(run)[:3], strict=True):
            if exact.any():
                assert cosine(actual, exact.reshape(actual.shape)) > 0.95

    def test_gradients_have_the_dtype_of_the_inputs_and_values_of_bfloat16(self, run):
        for gradient, x in zip(input_gradients(run.result), run.inputs, strict=False):
            assert (gradient.shape, gradient.dtype) == (x.shape, x.dtype)
