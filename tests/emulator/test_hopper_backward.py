"""The library's backward for Hopper on the emulator: nothing is found, and the gradients are those of the reference."""

from typing import Any

import jax
import numpy as np
import pytest

from jax_fp4attn import recipes
from jax_fp4attn.reference.operands import score_operand_values
from tests.assertions import relative_l2
from tests.emulator.kernels import hopper_backward as hopper
from tests.emulator.kernels.forward import Shape, same_bits
from tests.emulator.kernels.hopper_backward import Gradients, Problem
from tests.emulator.kernels.hopper_cases import BACKWARD
from tests.emulator.kernels.hopper_forward import rows_of_keys

pytestmark = pytest.mark.skipif(not hopper.available(), reason="build/native has no backward: make native")

# Relative, in the L2 norm. A score's gradient within rounding of a threshold may get the next code of E5M2.
ERROR = 5e-3

both_accumulations = pytest.mark.parametrize("ordered", [False, True], ids=["float32", "float32_ordered"])
both_head_sizes = pytest.mark.parametrize("head_size", [64, 128])


def check(actual: Gradients, expected: Gradients) -> None:
    for name, x, y in zip(Gradients._fields, actual, expected, strict=True):
        assert np.isfinite(x).all(), name
        assert relative_l2(x, y) < ERROR, name


def problem(name: str) -> Problem:
    recipe, shape, options = BACKWARD[name]
    return hopper.problem(recipe, shape, **options)


@pytest.mark.parametrize("name", BACKWARD)
def test_reference(name: str) -> None:
    case = problem(name)
    (unordered,), (ordered,) = (hopper.differentiate(case, ordered=ordered) for ordered in (False, True))
    check(unordered, case.expected)
    check(ordered, case.expected)
    # Only the order of dQ's sums is another.
    assert same_bits(unordered._replace(query=ordered.query), ordered)


def test_sections_of_heads_do_not_matter() -> None:
    """Of the form with the same bits whoever comes first; a section may have heads of two batch entries, or fewer."""
    case = hopper.problem(recipes.train, Shape(2, 70, 150, 3, 3, 64))
    one, *others = (hopper.differentiate(case, ordered=True, section=section)[0] for section in (1, 2, 4))
    assert all(same_bits(one, other) for other in others)


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
@both_head_sizes
@pytest.mark.parametrize("name", BLIND)
def test_what_sees_nothing_has_no_gradient(name: str, head_size: int, ordered: bool) -> None:
    """Some or all thread blocks have no queries."""
    options, blind_queries, blind_keys = BLIND[name]
    shape = Shape(1, 140, 140, 2, 1, head_size)
    # Of few rows that see few keys, a single code that flips would be above the limit; of these inputs none does.
    case = hopper.problem(
        recipes.train, shape, hopper.inputs(shape, seed={64: 2, 128: 3}[head_size]), is_causal=True, **options
    )
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


@both_accumulations
@both_head_sizes
def test_an_infinite_cotangent_is_not_hidden(head_size: int, ordered: bool) -> None:
    """All gradients of its head are NaN, and those of the other one what they were."""
    shape = Shape(1, 140, 140, 2, 2, head_size)
    arrays = hopper.inputs(shape)
    arrays[3][0, 5, 0, 0] = np.inf
    case = hopper.problem(recipes.train, shape, arrays, is_causal=True)
    np.testing.assert_array_equal(np.isnan(case.gradient_scale), [[True, False]])
    (gradients,) = hopper.differentiate(case, ordered=ordered)
    assert all(np.isnan(x[:, :, 0]).all() for x in gradients)
    check(*(Gradients(*(x[:, :, 1] for x in those)) for those in (gradients, case.expected)))


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
