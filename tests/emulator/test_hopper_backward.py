"""The library's backward for Hopper on the emulator: nothing is found, and the gradients are those of the reference."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from jax_fp4attn import recipes
from jax_fp4attn.reference.operands import score_operand_values
from tests.assertions import relative_l2
from tests.emulator.kernels import hopper_backward as hopper
from tests.emulator.kernels.forward import Shape
from tests.emulator.kernels.hopper_backward import Gradients, Problem
from tests.emulator.kernels.hopper_forward import rows_of_keys

pytestmark = pytest.mark.skipif(not hopper.available(), reason="build/native has no backward: make native")

# Relative, in the L2 norm. A score's gradient within rounding of a threshold may get the next code of E5M2.
ERROR = 5e-3

SMALL_MULTIPLIER = dataclasses.replace(
    recipes.train,
    name="small_multiplier",
    backward_multiplier=16.0,
    backward_p_lift_bits=3,
    backward_lse_correction=0.1,
)

both_accumulations = pytest.mark.parametrize("ordered", [False, True], ids=["float32", "float32_ordered"])
both_head_sizes = pytest.mark.parametrize("head_size", [64, 128])


def random_segments(batch: int, num_queries: int, num_keys: int) -> tuple[np.ndarray, np.ndarray]:
    """Segments 0 (padding) to 3, which follow one another."""
    rng = np.random.default_rng(7)
    queries, keys = (np.sort(rng.integers(0, 4, (batch, length)), axis=1) for length in (num_queries, num_keys))
    return queries, keys


# Those of one shape and mask share the reference's program.
SHAPE = Shape(2, 130, 150, 2, 1, 64)
LENGTHS: dict[str, Any] = {"query_lengths": [130, 65], "key_lengths": [129, 31]}
CASES: dict[str, tuple[Any, Shape, dict[str, Any]]] = {
    "one key": (recipes.train, Shape(1, 3, 1, 1, 1, 64), {}),
    "causal": (recipes.train, SHAPE, {"is_causal": True}),
    "causal lengths": (recipes.train, SHAPE, {"is_causal": True, **LENGTHS}),
    "causal segments": (recipes.train, SHAPE, {"is_causal": True, "segments": random_segments(2, 130, 150)}),
    "offset": (recipes.train, SHAPE, {"is_causal": True, "key_offset": -70}),
    "offset ahead": (recipes.train, SHAPE, {"is_causal": True, "key_offset": 90}),
    "causal and everything": (
        recipes.train,
        SHAPE,
        {"is_causal": True, "key_offset": -7, "segments": random_segments(2, 130, 150), **LENGTHS},
    ),
    "whole tiles": (recipes.train, Shape(1, 128, 256, 2, 2, 128), {}),
    "more keys": (recipes.train, Shape(1, 70, 200, 4, 2, 128), {}),
    "more keys, lengths": (
        recipes.train,
        Shape(1, 70, 200, 4, 2, 128),
        {"query_lengths": [33], "key_lengths": [190]},
    ),
    "more keys, segments": (recipes.train, Shape(1, 70, 200, 4, 2, 128), {"segments": random_segments(1, 70, 200)}),
    "causal and fewer keys": (recipes.train, Shape(1, 300, 70, 2, 2, 128), {"is_causal": True}),
    "causal and many queries a key": (recipes.square, Shape(1, 260, 200, 3, 1, 128), {"is_causal": True}),
    "window": (recipes.train, Shape(1, 200, 300, 1, 1, 128), {"window": (20, 50)}),
    "window behind": (recipes.train, Shape(1, 260, 260, 2, 1, 64), {"window": (50, 0)}),
    "own key alone": (recipes.train, Shape(1, 130, 130, 1, 1, 64), {"window": (0, 0)}),
    "other factors": (SMALL_MULTIPLIER, Shape(1, 130, 150, 2, 1, 64), {"is_causal": True}),
    "probabilities of MXFP4": (recipes.accurate, Shape(1, 130, 150, 2, 1, 64), {"is_causal": True}),
}


def check(actual: Gradients, expected: Gradients) -> None:
    for name, x, y in zip(Gradients._fields, actual, expected, strict=True):
        assert np.isfinite(x).all(), name
        assert relative_l2(x, y) < ERROR, name


def same_bits(one: Gradients, other: Gradients) -> bool:
    return all(np.array_equal(x.view(np.uint32), y.view(np.uint32)) for x, y in zip(one, other, strict=True))


def problem(name: str) -> Problem:
    recipe, shape, options = CASES[name]
    return hopper.problem(recipe, shape, **options)


@pytest.mark.parametrize("name", CASES)
def test_reference(name: str) -> None:
    case = problem(name)
    (unordered,), (ordered,) = (hopper.differentiate(case, ordered=ordered) for ordered in (False, True))
    check(unordered, case.expected)
    check(ordered, case.expected)
    # Only the order of dQ's sums is another.
    assert same_bits(unordered._replace(query=ordered.query), ordered)


def test_sections_of_heads_do_not_matter() -> None:
    """Of the form with the same bits whoever comes first; the last section has one head."""
    case = hopper.problem(recipes.train, Shape(1, 70, 150, 3, 3, 64))
    one, two = (hopper.differentiate(case, ordered=True, section=section)[0] for section in (1, 2))
    assert same_bits(one, two)


@pytest.mark.parametrize("name", ["causal", "more keys"])
def test_every_schedule_gives_the_same_bits_of_the_ordered_form(name: str) -> None:
    case = problem(name)
    first, *others = hopper.differentiate(case, ordered=True, seeds=range(3))
    assert len(others) == 2
    assert all(same_bits(first, other) for other in others)


def test_schedules_may_change_the_order_of_sums_of_the_query_gradient_alone() -> None:
    case = problem("window")
    first, *others = hopper.differentiate(case, ordered=False, seeds=range(3))
    for gradients in (first, *others):
        check(gradients, case.expected)
        assert same_bits(gradients._replace(query=first.query), first)


AT = np.arange(140)
# Restrictions, and the queries and keys without a partner.
BLIND: dict[str, tuple[dict[str, Any], np.ndarray, np.ndarray]] = {
    "no queries at the end": ({"query_lengths": [65]}, AT >= 65, AT >= 65),
    "no keys at the end": ({"key_lengths": [9]}, AT < 0, AT >= 9),
    "no keys": ({"key_lengths": [0]}, AT >= 0, AT >= 0),
    "keys in the past": ({"key_offset": -30}, AT < 0, AT < 0),
    "keys in the future": ({"key_offset": 50}, AT < 50, AT >= 90),
    "all keys in the future": ({"key_offset": 300}, AT >= 0, AT >= 0),
    "segments": ({"segments": (np.repeat([0, 1], 70)[None], np.repeat([1, 2], 70)[None])}, AT < 70, AT >= 70),
}


@both_accumulations
@pytest.mark.parametrize("name", BLIND)
def test_what_sees_nothing_has_no_gradient(name: str, ordered: bool) -> None:
    options, blind_queries, blind_keys = BLIND[name]
    shape = Shape(1, 140, 140, 2, 1, 64)
    # Of few rows that see few keys, a single code that flips would be above the limit; here none does.
    case = hopper.problem(recipes.train, shape, hopper.inputs(shape, seed=2), is_causal=True, **options)
    np.testing.assert_array_equal(np.isinf(case.lse[0, 0]), blind_queries)
    (gradients,) = hopper.differentiate(case, ordered=ordered)
    check(gradients, case.expected)
    assert not gradients.query[0, blind_queries].any()
    assert not gradients.key[0, blind_keys].any() and not gradients.value[0, blind_keys].any()
    assert gradients.value[0, ~blind_keys].any(-1).all()


@both_accumulations
def test_large_scores(ordered: bool) -> None:
    shape = Shape(1, 130, 130, 1, 1, 64)
    query, *others = hopper.inputs(shape)
    case = hopper.problem(recipes.train, shape, [query * query.dtype.type(6), *others], is_causal=True)
    (gradients,) = hopper.differentiate(case, ordered=ordered)
    check(gradients, case.expected)


@both_accumulations
def test_cotangents_of_zero(ordered: bool) -> None:
    shape = Shape(1, 130, 130, 1, 1, 64)
    *others, d_output, d_lse = hopper.inputs(shape)
    case = hopper.problem(recipes.train, shape, [*others, 0 * d_output, 0 * d_lse], is_causal=True)
    (gradients,) = hopper.differentiate(case, ordered=ordered)
    assert not any(x.any() for x in gradients)


class TestPreparation:
    @both_head_sizes
    def test_query_and_key_are_where_the_products_want_them(self, head_size: int) -> None:
        case = hopper.problem(recipes.train, Shape(2, 130, 150, 2, 1, head_size))
        for values, operand in (
            (hopper.expanded_query(case, ordered=True)["values"], case.operands.score_query),
            (hopper.expanded_key(case), case.operands.score_key),
        ):
            expected = np.asarray(jax.jit(score_operand_values)(operand))
            B, heads, length, _ = expected.shape
            slots = values.reshape(B, heads, -1, head_size)[:, :, rows_of_keys(length)]
            np.testing.assert_array_equal(slots[:, :, :length].astype(np.float32), expected)
            # Rows of padding are multiplied with zeros, which only a finite number survives.
            assert not slots[:, :, length:].any()

    @both_head_sizes
    def test_sums_start_at_zero_and_every_statistic_is_a_number(self, head_size: int) -> None:
        case = hopper.problem(recipes.train, Shape(2, 130, 150, 2, 1, head_size), query_lengths=[130, 0])
        unordered, ordered = (hopper.expanded_query(case, ordered=ordered) for ordered in (False, True))
        assert not unordered["query_sums"].any()
        assert "query_sums" not in ordered
        for name in ("values", "statistics"):
            assert not np.isnan(ordered[name]).any()
            np.testing.assert_array_equal(unordered[name], ordered[name])
