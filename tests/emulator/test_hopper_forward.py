"""The library's forward for Hopper on the emulator: nothing is found, and the results are those of the reference."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jax_fp4attn import recipes
from jax_fp4attn.config import LOG2_E, Visibility
from jax_fp4attn.formats import BlockScaled
from jax_fp4attn.reference.operands import score_operand_values, value_operand_values
from jax_fp4attn.reference.tiles import key_order
from tests.assertions import relative_l2
from tests.code_bounds import assert_same_attention
from tests.emulator.kernels import hopper_forward as hopper
from tests.emulator.kernels.forward import (
    Attention,
    Problem,
    Shape,
    inputs,
    problem_of,
    same_bits,
    with_nan_scales,
)
from tests.emulator.kernels.hopper_cases import FORWARD, LEADING

pytestmark = pytest.mark.skipif(not hopper.available(), reason="build/native has no forward: make native")


def check(problem: Problem) -> None:
    """Compares with the reference."""
    (actual,) = hopper.attend(problem)
    assert_same_as_reference(problem, actual)


def assert_same_as_reference(problem: Problem, actual: Attention) -> None:
    assert_same_attention(
        problem.config, problem.operands, problem.visibility, problem.num_keys, actual, problem.expected()
    )


@pytest.mark.parametrize("name", FORWARD)
def test_reference(name: str) -> None:
    recipe, shape, options = FORWARD[name]
    check(problem_of(recipe, *inputs(shape), **options))


@pytest.mark.parametrize("name", ["strided anchor", "causal"])
def test_every_schedule_gives_the_same_bits(name: str) -> None:
    recipe, shape, options = FORWARD[name]
    first, *others = hopper.attend(problem_of(recipe, *inputs(shape), **options), seeds=range(5))
    assert len(others) == 4
    assert all(same_bits(first, other) for other in others)


def test_thread_blocks_share_the_items_in_any_way() -> None:
    recipe, shape, options = FORWARD["several items a block"]
    problem = problem_of(recipe, *inputs(shape), **options)
    (one,), (many,) = hopper.attend(problem, blocks=1), hopper.attend(problem, blocks=12)
    assert same_bits(one, many)


def test_without_a_counter_every_thread_block_has_one_item() -> None:
    recipe, shape, options = FORWARD["several items a block"]
    problem = problem_of(recipe, *inputs(shape), **options)
    (counted,), (alone,) = hopper.attend(problem), hopper.attend(problem, blocks=None)
    assert same_bits(counted, alone)


@pytest.mark.parametrize("options", [{"query_lengths": [0, 190]}, {"window": (30, 0)}], ids=str)
def test_items_of_fewer_parts_restricted(options: dict[str, Any]) -> None:
    problem = problem_of(recipes.square, *inputs(Shape(2, 257, 300, 1, 1, 64)), **options)
    (actual,) = hopper.attend(problem, blocks=3)
    assert_same_as_reference(problem, actual)


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("num_queries", [64, 65, 128, 192, 193, 257, 321])
def test_items_of_any_number_of_parts(num_queries: int, blocks: int) -> None:
    """The first item of a head has the rows of one, two or three warpgroups."""
    problem = problem_of(recipes.train, *inputs(Shape(2, num_queries, 70, 2, 1, 64)), is_causal=True, key_offset=-9)
    (actual,) = hopper.attend(problem, blocks=blocks)
    assert_same_as_reference(problem, actual)


@pytest.mark.parametrize(("section", "blocks"), [(4, 1), (4, 5), (2, 44), (15, 7)])
def test_sections_of_heads_do_not_matter(section: int, blocks: int) -> None:
    """A last section of fewer heads, and up to as many thread blocks as there are items."""
    problem = problem_of(recipes.train, *inputs(Shape(3, 200, 130, 5, 1, 64)), is_causal=True)
    (one,), (other,) = hopper.attend(problem), hopper.attend(problem, blocks=blocks, section=section)
    assert same_bits(one, other)


class TestVisibility:
    """What a row does not see does not matter, whatever it is."""

    @pytest.mark.parametrize(
        "recipe", [recipes.train, recipes.square, recipes.accurate], ids=lambda recipe: recipe.name
    )
    def test_scores_beyond_the_lengths(self, recipe: Any) -> None:
        options: dict[str, Any] = {"query_lengths": [33, 70], "key_lengths": [131, 60]}
        clean = problem_of(recipe, *inputs(Shape(2, 70, 200, 1, 1, 64)), **options)
        valid_queries = np.arange(128) < np.array(options["query_lengths"])[:, None]
        valid_keys = np.arange(256) < np.array(options["key_lengths"])[:, None]
        poisoned = dataclasses.replace(
            clean,
            operands=dataclasses.replace(
                clean.operands,
                query=with_nan_scales(clean.operands.query, ~valid_queries),
                key=with_nan_scales(clean.operands.key, ~valid_keys),
            ),
        )
        ((actual,), (expected,)) = hopper.attend(poisoned), hopper.attend(clean)
        assert same_bits(actual, expected)

    @pytest.mark.parametrize("recipe", [recipes.train, recipes.fast], ids=lambda recipe: recipe.name)
    def test_a_nan_is_in_the_rows_that_see_it(self, recipe: Any) -> None:
        query, key, value = inputs(Shape(1, 140, 140, 1, 1, 64))
        clean = problem_of(recipe, query, key, value, is_causal=True)
        where = 130
        key[0, where, 0, 5] = np.nan
        spoiled = problem_of(recipe, query, key, value, is_causal=True)
        ((actual,), (expected,)) = hopper.attend(spoiled), hopper.attend(clean)
        assert np.isnan(actual.output[0, 0, where:]).all() and np.isnan(actual.lse[0, 0, where:]).all()
        before = Attention(actual.output[0, 0, :where], actual.lse[0, 0, :where])
        assert same_bits(before, Attention(expected.output[0, 0, :where], expected.lse[0, 0, :where]))

    @pytest.mark.parametrize("others_are_negative", [False, True])
    @pytest.mark.parametrize("place", [0, 77, 200])
    @pytest.mark.parametrize(
        "recipe", [recipes.train, recipes.fp8_pv, recipes.fast, LEADING], ids=lambda recipe: recipe.name
    )
    def test_a_nan_key_in_a_tile_that_is_not_masked(self, recipe: Any, place: int, others_are_negative: bool) -> None:
        """One score of every row is NaN, which a maximum that passes NaN by would not tell."""
        query, key, value = inputs(Shape(1, 70, 256, 1, 1, 64))
        if others_are_negative:
            query[:], key[:] = np.abs(query), -np.abs(key)
        key[0, place, 0, 5] = np.nan
        (actual,) = hopper.attend(problem_of(recipe, query, key, value))
        assert np.isnan(actual.output).all() and np.isnan(actual.lse).all()

    @pytest.mark.parametrize("recipe", [recipes.train, recipes.square], ids=lambda recipe: recipe.name)
    def test_a_nan_of_a_value_is_in_the_rows_that_see_it(self, recipe: Any) -> None:
        query, key, value = inputs(Shape(1, 300, 300, 1, 1, 64))
        where = 130
        value[0, where, 0, 5] = np.nan
        (actual,) = hopper.attend(problem_of(recipe, query, key, value, is_causal=True))
        assert np.isnan(actual.output[0, 0, where:, 5]).all()
        # Zero times NaN is NaN in the other rows of the tile, but not before it.
        assert np.isfinite(actual.output[0, 0, :128]).all() and np.isfinite(actual.lse).all()

    @pytest.mark.parametrize("offset", [-(2**31), -(2**30), 2**31 - 1])
    @pytest.mark.parametrize("is_causal", [False, True])
    def test_offsets_at_the_ends_of_int32(self, is_causal: bool, offset: int) -> None:
        problem = problem_of(
            recipes.train, *inputs(Shape(1, 70, 140, 1, 1, 64)), is_causal=is_causal, key_offset=offset
        )
        (actual,) = hopper.attend(problem)
        assert_sees(actual, problem, is_causal and offset > 0)

    @pytest.mark.parametrize("recipe", [recipes.fp8_pv, recipes.accurate], ids=lambda recipe: recipe.name)
    @pytest.mark.parametrize(
        ("options", "blind"),
        [
            ({"query_lengths": [13]}, np.arange(40) >= 13),
            ({"key_lengths": [0]}, np.arange(40) >= 0),
            ({"window": (0, 3), "key_offset": 20}, (np.arange(40) < 17) | (np.arange(40) > 20 + 29)),
            ({"window": (3, 0), "key_offset": -35}, np.arange(40) >= 0),
            ({"segments": (np.arange(40)[None] % 3, np.ones((1, 30)))}, np.arange(40) % 3 != 1),
        ],
        ids=lambda x: "" if isinstance(x, np.ndarray) else ", ".join(x),
    )
    def test_rows_that_see_nothing(self, options: dict[str, Any], blind: np.ndarray, recipe: Any) -> None:
        problem = problem_of(recipe, *inputs(Shape(1, 40, 30, 1, 1, 64)), **options)
        (actual,) = hopper.attend(problem)
        np.testing.assert_array_equal(actual.lse[0, 0] == -np.inf, blind)
        assert (actual.output[0, 0][blind] == 0).all()
        check(problem)


def assert_sees(actual: Attention, problem: Problem, nothing: bool) -> None:
    """All keys, or nothing; positions do not fit int32 in the reference."""
    if nothing:
        assert (actual.lse == -np.inf).all() and (actual.output == 0).all()
        return
    config = dataclasses.replace(problem.config, is_causal=False)
    assert_same_as_reference(dataclasses.replace(problem, config=config, visibility=Visibility()), actual)


class TestExtremes:
    @pytest.mark.parametrize(
        "recipe", [recipes.train, recipes.fast, recipes.square, recipes.accurate], ids=lambda r: r.name
    )
    def test_equal_scores(self, recipe: Any) -> None:
        query, key, value = inputs(Shape(1, 40, 161, 1, 1, 64))
        key[:] = key[:, :1]
        check(problem_of(recipe, query, key, value))

    @pytest.mark.parametrize("rows", [1, 2, 8], ids=lambda rows: f"one of {rows} rows")
    @pytest.mark.parametrize(
        "recipe", [recipes.train, recipes.fp8_pv, recipes.fast, recipes.accurate], ids=lambda r: r.name
    )
    def test_negative_scores(self, recipe: Any, rows: int) -> None:
        """All scores of some rows: what is the largest of them is not what is largest as an integer."""
        query, key, value = inputs(Shape(1, 70, 289, 1, 1, 64))
        key[:] = -np.abs(key)
        query[:, ::rows] = np.abs(query[:, ::rows])
        check(problem_of(recipe, query, key, value))

    @pytest.mark.parametrize("recipe", [recipes.train, recipes.exact_map, recipes.accurate], ids=lambda r: r.name)
    def test_zero_query(self, recipe: Any) -> None:
        query, key, value = inputs(Shape(1, 40, 161, 1, 1, 64))
        query[:] = 0
        check(problem_of(recipe, query, key, value))

    # Of larger scores with an anchor the reference loses the output: its accumulators are 36 times the denominator.
    @pytest.mark.parametrize(
        ("recipe", "size"),
        [
            (recipes.train, 30),
            (recipes.train, 300),
            (recipes.square, 30),
            (recipes.square, 300),
            (recipes.accurate, 30),
        ],
        ids=lambda x: getattr(x, "name", str(x)),
    )
    def test_large_scores(self, recipe: Any, size: int) -> None:
        query, key, value = inputs(Shape(1, 40, 161, 1, 1, 64))
        check(problem_of(recipe, query * query.dtype.type(size), key, value))

    def constant(self, recipe: Any, log2_score: float, num_keys: int = 161) -> Problem:
        """All scores are the same."""
        query, key, value = inputs(Shape(1, 40, num_keys, 1, 1, 64))
        query[:], key[:] = 0, 0
        query[..., 0], key[..., 0] = 1, np.sign(log2_score)
        return problem_of(recipe, query, key, value, scale=abs(log2_score) / LOG2_E)

    @pytest.mark.parametrize("recipe", [recipes.fast, recipes.square, recipes.exact_map], ids=lambda r: r.name)
    @pytest.mark.parametrize("log2_score", [100.0, 140.0, 300.0])
    def test_scores_above_the_range_of_scales_saturate(self, recipe: Any, log2_score: float) -> None:
        check(self.constant(recipe, log2_score))

    @pytest.mark.parametrize("recipe", [recipes.fast, recipes.exact_map], ids=lambda r: r.name)
    def test_a_denominator_that_overflows(self, recipe: Any) -> None:
        problem = self.constant(dataclasses.replace(recipe, p_scale_shift=0), 127.0)
        (actual,) = hopper.attend(problem)
        assert (actual.lse == np.inf).all() and (actual.output == 0).all()
        assert (problem.expected().lse == np.inf).all()

    @pytest.mark.parametrize("recipe", [recipes.fast, recipes.square, recipes.exact_map], ids=lambda r: r.name)
    def test_rows_far_below_the_reference_vanish(self, recipe: Any) -> None:
        problem = self.constant(recipe, -125.0)
        (actual,) = hopper.attend(problem)
        assert (actual.lse == -np.inf).all() and (actual.output == 0).all()
        assert (problem.expected().lse == -np.inf).all()

    @pytest.mark.parametrize("recipe", [recipes.train, recipes.fp8_pv], ids=lambda r: r.name)
    @pytest.mark.parametrize("log2_score", [-125.0, 125.0, 1000.0])
    def test_a_running_maximum_has_no_range(self, recipe: Any, log2_score: float) -> None:
        check(self.constant(recipe, log2_score))

    @pytest.mark.parametrize(
        "recipe", [recipes.train, recipes.fast, recipes.exact_map, recipes.accurate], ids=lambda r: r.name
    )
    @pytest.mark.parametrize("place", [0, 382])
    def test_a_sink(self, recipe: Any, place: int) -> None:
        """One key has 2**20 times the weight of others, in the first of three tiles or in the last."""
        query, key, value = inputs(Shape(1, 40, 383, 1, 1, 64))
        query[..., 0], key[..., 0] = 1, 0
        key[:, place], key[:, place, :, 0] = 0, 6
        check(problem_of(recipe, query, key, value, scale=20 / 6 / LOG2_E))

    @pytest.mark.parametrize("recipe", [recipes.fast, recipes.square], ids=lambda r: r.name)
    def test_later_tiles_of_much_larger_scales(self, recipe: Any) -> None:
        """Scales grow by more octaves from tile to tile than float32 sums may lose."""
        query, key, value = inputs(Shape(1, 40, 383, 1, 1, 64))
        query[:], key[:] = 0, 0
        query[..., 0], key[0, :, 0, 0] = 6, np.repeat([-6, 0, 6], 128)[:383]
        check(problem_of(recipe, query, key, value, scale=70 / 36 / LOG2_E))

    @pytest.mark.parametrize("growth", [15, 59])
    def test_growing_scales_and_large_values(self, growth: int) -> None:
        query, key, value = inputs(Shape(1, 40, 256, 1, 1, 64))
        query[:], key[:] = 0, 0
        query[..., 0], key[0, :, 0, 0] = 6, np.repeat([0, 6], 128)
        value *= np.float32(2.0**60).astype(value.dtype)
        check(problem_of(recipes.square, query, key, value, scale=growth / 36 / LOG2_E))

    @pytest.mark.parametrize("recipe", [recipes.square, recipes.accurate], ids=lambda r: r.name)
    def test_values_of_very_different_scales(self, recipe: Any) -> None:
        """Blocks of a tile 24 octaves apart; each channel's own error counts."""
        query, key, value = inputs(Shape(1, 40, 161, 1, 1, 64))
        rng = np.random.default_rng(5)
        value *= np.exp2(rng.integers(-12, 13, (1, 1, 1, 64))).astype(value.dtype)
        problem = problem_of(recipe, query, key, value)
        (actual,) = hopper.attend(problem)
        expected = problem.expected()
        assert_same_as_reference(problem, actual)
        for channel in range(64):
            assert relative_l2(actual.output[..., channel], expected.output[..., channel]) < 2e-3


def zero_problem(recipe: Any, num_keys: int, head_size: int) -> Problem:
    """One query and one head."""
    return problem_of(recipe, *(np.zeros_like(x) for x in inputs(Shape(1, 1, num_keys, 1, 1, head_size))))


def in_place_of(x: BlockScaled, codes: np.ndarray, scales: np.ndarray) -> BlockScaled:
    """An operand of one head with other codes and scales, both in rows."""
    replaced = dataclasses.replace(x, codes=jnp.asarray(codes)[None, None], scales=jnp.asarray(scales)[None, None])
    return dataclasses.replace(replaced, scale_layout="rows").in_pages()


class TestExpansion:
    @pytest.mark.parametrize("head_size", [64, 128])
    def test_every_code_and_scale_of_a_key(self, head_size: int) -> None:
        blocks, num_keys = head_size // 16, 128
        codes = np.tile(np.arange(16, dtype=np.uint8), (num_keys, blocks)).reshape(num_keys, -1, 2)
        scales = np.resize(np.arange(128, dtype=np.uint8), (num_keys, blocks))
        problem = zero_problem(recipes.train, num_keys, head_size)
        packed = codes[..., 0] | codes[..., 1] << 4
        key = in_place_of(problem.operands.key, packed, scales)
        problem = dataclasses.replace(problem, operands=dataclasses.replace(problem.operands, key=key))
        actual = hopper.expanded_key(problem)[0, 0, hopper.rows_of_keys(num_keys)]
        expected = np.asarray(key.dequantize())[0, 0]
        assert np.isnan(expected).sum() == 16 * np.sum(scales == 0x7F)
        np.testing.assert_array_equal(actual.astype(np.float32), expected)
        np.testing.assert_array_equal(np.signbit(actual), np.signbit(expected))

    @pytest.mark.parametrize("head_size", [64, 128])
    @pytest.mark.parametrize("recipe", [recipes.train, recipes.accurate], ids=lambda recipe: recipe.name)
    def test_keys_are_where_the_first_product_wants_them(self, recipe: Any, head_size: int) -> None:
        problem = problem_of(recipe, *inputs(Shape(2, 1, 200, 2, 2, head_size)))
        rows = hopper.rows_of_keys(200, by_block=hopper.is_by_block(problem))
        slots = hopper.expanded_key(problem)[:, :, rows]
        expected = np.array(score_operand_values(problem.operands.key))
        order = key_order(recipe, 200)
        if order is not None:
            expected[:, :, :200] = expected[:, :, order]
        np.testing.assert_array_equal(slots.astype(np.float32), expected)

    @pytest.mark.parametrize("head_size", [64, 128])
    def test_values_are_exact_within_28_octaves_of_a_tile(self, head_size: int) -> None:
        rng = np.random.default_rng(3)
        tops = [27, 28, 100, 127, 200, 254]
        bytes_ = np.stack([rng.integers(top - 27, top + 1, (head_size, 4)) for top in tops], 1)
        bytes_[0, :, 0] = tops
        problem, expected = self.value_problem(rng, bytes_)
        np.testing.assert_array_equal(self.values(problem), expected)

    def test_smaller_values_round_to_the_smallest_step(self) -> None:
        rng = np.random.default_rng(4)
        top = 200
        bytes_ = rng.integers(0, top + 1, (64, 3, 4))
        bytes_[0, :, 0] = top
        problem, expected = self.value_problem(rng, bytes_)
        error = np.abs(self.values(problem) - expected)
        assert error.max() <= 2.0 ** (top - 127 - 29)

    def test_a_nan_is_in_its_block_alone(self) -> None:
        rng = np.random.default_rng(4)
        bytes_ = rng.integers(100, 120, (64, 2, 4))
        bytes_[5, 0, 3] = bytes_[63, 1, 0] = 255
        problem, expected = self.value_problem(rng, bytes_)
        assert np.isnan(expected).sum() == 2 * 32
        np.testing.assert_array_equal(self.values(problem), expected)

    def value_problem(self, rng: np.random.Generator, bytes_: np.ndarray) -> tuple[Problem, np.ndarray]:
        """A problem with these scales [H, tiles, 4] and random codes, and its values, float64 [H, S']."""
        head_size, tiles, _ = bytes_.shape
        num_keys = 128 * tiles
        problem = zero_problem(recipes.square, num_keys, head_size)
        packed = rng.integers(0, 256, (head_size, num_keys // 2), np.uint8)
        value = in_place_of(problem.operands.value, packed, bytes_.reshape(head_size, -1).astype(np.uint8))
        problem = dataclasses.replace(problem, operands=dataclasses.replace(problem.operands, value=value))
        codes = np.stack([packed & 15, packed >> 4], -1).reshape(head_size, num_keys)
        magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])[codes & 7]
        exponents = np.where(bytes_ == 255, np.nan, bytes_ - 127.0).reshape(head_size, -1).repeat(32, 1)
        return problem, np.where(codes & 8, -1, 1) * magnitudes * np.exp2(exponents)

    def values(self, problem: Problem) -> np.ndarray:
        values, exponents = hopper.expanded_value(problem)
        factors = np.exp2(exponents[0, 0].astype(np.float64)).repeat(128)
        in_order = values[0, 0][:, hopper.places_of_keys(problem.num_keys)]
        return in_order.view(ml_dtypes.float8_e5m2).astype(np.float64) * factors

    def test_values_of_the_quantiser(self) -> None:
        problem = problem_of(recipes.square, *inputs(Shape(2, 1, 200, 2, 2, 128)))
        values, exponents = hopper.expanded_value(problem)
        factors = np.exp2(exponents.astype(np.float32)).repeat(128, 2)
        in_order = values[..., hopper.places_of_keys(200)]
        actual = in_order.view(ml_dtypes.float8_e5m2).astype(np.float32) * factors[:, :, None]
        expected = value_operand_values(problem.recipe, problem.operands.value)
        np.testing.assert_array_equal(actual.swapaxes(2, 3), expected)
