"""The library's forward for Blackwell on the emulator: P, output and lse of the reference, and nothing found."""

import dataclasses
import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jax_fp4attn import recipes
from jax_fp4attn.config import LOG2_E
from jax_fp4attn.recipe import Recipe
from jax_fp4attn.reference.masking import valid_queries
from jax_fp4attn.reference.operands import score_operand_values
from jax_fp4attn.reference.tiles import key_order
from tests.assertions import relative_l2
from tests.emulator.kernels import blackwell_forward as blackwell
from tests.emulator.kernels import blackwell_tiles
from tests.emulator.kernels.blackwell_cases import CASES, GUARDED, WINDOWS
from tests.emulator.kernels.forward import (
    Attention,
    Library,
    Problem,
    Shape,
    inputs,
    numbers,
    problem_of,
    same_bits,
    with_nan_scales,
)

pytestmark = pytest.mark.skipif(not blackwell.available(), reason="build/native has no forward: make native")

LSE = 1e-5
# The output differs from the reference by the order in which the tiles are added, which may round an element to the
# neighbour in bfloat16.
OUTPUT = 5e-4  # relative, in the L2 norm
ELEMENTS_THAT_DIFFER = 0.005


def attend(problem: Problem) -> Attention:
    """The result of the image for compute capabilities 10.x, whose bits the one for 10.3 has to give, too."""
    (actual,), (ultra,) = (blackwell.attend(problem, library=library) for library in blackwell.IMAGES)
    assert same_bits(actual, ultra)
    return actual


def check(problem: Problem, elements: float = ELEMENTS_THAT_DIFFER) -> None:
    """Compares output and lse with the reference.

    Args:
      problem: What to compute.
      elements: Share of the output's elements that may differ.
    """
    assert_same_result(attend(problem), problem.expected(), elements)


def assert_same_result(actual: Attention, expected: Attention, elements: float = ELEMENTS_THAT_DIFFER) -> None:
    finite = np.isfinite(expected.lse)
    np.testing.assert_array_equal(actual.lse[~finite], expected.lse[~finite])
    error = np.abs(actual.lse[finite] - expected.lse[finite])
    assert (error <= LSE + 4 * np.spacing(np.abs(expected.lse[finite]))).all()
    assert np.isfinite(actual.output).all()
    assert relative_l2(actual.output, expected.output) < OUTPUT or not expected.output.any()
    assert np.mean(actual.output != expected.output) <= elements


def tiles_of(problem: Problem, library: Library) -> tuple[Attention, blackwell_tiles.Tiles]:
    """The result of an image, and scores, P and scales of every tile."""
    B, N, _, H = problem.operands.query.shape
    recorder = blackwell_tiles.Recorder(H)
    (actual,) = blackwell.attend(problem, blocks=1 << 20, library=library, products=recorder)
    section = int(numbers(problem.config, B * N)["section"])
    return actual, blackwell_tiles.gathered(problem, recorder, section)


def check_tiles(problem: Problem) -> None:
    """Compares scores, P and scales of every tile, output and lse with the reference, and of both images."""
    B, _, T, _ = problem.operands.query.shape
    (actual, tiles), (ultra, ultra_tiles) = (tiles_of(problem, library) for library in blackwell.IMAGES)
    assert same_bits(actual, ultra)
    for mine, other in zip(dataclasses.astuple(tiles), dataclasses.astuple(ultra_tiles), strict=True):
        np.testing.assert_array_equal(mine, other)
    assert_same_result(actual, problem.expected())
    scores, p, scales = (x[:, :, :T] for x in (tiles.scores, tiles.p, tiles.scales))
    expected = blackwell_tiles.expected(problem, scores)
    # Rows behind a length are computed, and left out at the end.
    rows = valid_queries(problem.visibility, T)
    rows = np.ones((B, T), bool) if rows is None else np.array(rows)
    there = ~np.isnan(scores) & rows[:, None, :, None]
    seen = np.isfinite(expected.raw)
    assert not (seen & ~there).any(), "a tile was left out that some row sees"
    # Both are sums of products that are exact, added in another order.
    error = np.abs(scores[seen] - expected.raw[seen])
    assert (error <= 1e-6 * np.abs(expected.raw[seen]).max()).all()
    blocks = there[..., ::32]
    np.testing.assert_array_equal(scales[blocks], expected.scales[blocks])
    different = there & (p != expected.p)
    # Where rounding puts a value on the other side of a midpoint, and nowhere else.
    midpoints = (p[different] + expected.p[different]) / 2
    np.testing.assert_allclose(expected.unrounded[different], midpoints, rtol=2e-6)
    assert different.sum() <= 1e-5 * there.sum() + 1


@pytest.mark.parametrize("name", CASES)
def test_every_tile(name: str) -> None:
    recipe, shape, options = CASES[name]
    check_tiles(problem_of(recipe, *inputs(shape), **options))


@pytest.mark.parametrize("name", ["causal, square", "causal, grouped heads", "causal and fewer keys", "lengths"])
def test_tiles_that_no_row_sees_are_left_out(name: str) -> None:
    recipe, shape, options = CASES[name]
    problem = problem_of(recipe, *inputs(shape), **options)
    _, tiles = tiles_of(problem, blackwell.LIBRARY)
    scores = tiles.scores
    seen = np.isfinite(blackwell_tiles.expected(problem, scores[:, :, : shape.T]).raw)
    rows, slots = scores.shape[2:]
    seen = np.pad(seen, ((0, 0), (0, 0), (0, rows - shape.T), (0, 0)))
    by_tile = (shape.B, shape.N, rows // 128, 128, slots // 128, 128)
    computed = ~np.isnan(scores).reshape(by_tile).any((3, 5))
    np.testing.assert_array_equal(computed, seen.reshape(by_tile).any((3, 5)))
    assert not computed.all()


@pytest.mark.parametrize("name", WINDOWS)
def test_windows(name: str) -> None:
    recipe, shape, options = WINDOWS[name]
    check(problem_of(recipe, *inputs(shape), **options))


@pytest.mark.parametrize(
    "name", ["causal", "strided anchor", "three tiles and 33", "causal and fewer keys", "two tiles and 33"]
)
def test_every_schedule_gives_the_same_bits(name: str) -> None:
    recipe, shape, options = CASES[name]
    problem = problem_of(recipe, *inputs(shape), **options)
    runs = [blackwell.attend(problem, range(6), library=library) for library in blackwell.IMAGES]
    first, *others = itertools.chain(*runs)
    assert len(others) == 11
    assert all(same_bits(first, other) for other in others)


@pytest.mark.parametrize("name", ["grouped heads", "causal, grouped heads"])
def test_thread_blocks_share_the_items_in_any_way(name: str) -> None:
    recipe, shape, options = CASES[name]
    problem = problem_of(recipe, *inputs(shape), **options)
    (one,), (three,), (many,) = (blackwell.attend(problem, blocks=blocks) for blocks in (1, 3, 99))
    assert same_bits(one, many) and same_bits(three, many)
    assert_same_result(many, problem.expected())


class TestOperands:
    """What would hide behind uniform scales and smooth probabilities."""

    @pytest.mark.parametrize("head_size", [64, 128])
    def test_scales_of_their_own_for_every_tile(self, head_size: int) -> None:
        query, key, value = inputs(Shape(1, 256, 384, 1, 1, head_size))
        rng = np.random.default_rng(5)
        for x in (query, key, value):
            blocks = (1, x.shape[1] // 32, 1, x.shape[3] // 16)
            factors = np.exp2(rng.integers(-3, 4, blocks)).repeat(32, 1).repeat(16, 3)
            x *= factors.astype(x.dtype)
        check_tiles(problem_of(recipes.fast, query, key, value))

    @pytest.mark.parametrize("recipe", [recipes.square, recipes.train, GUARDED], ids=lambda recipe: recipe.name)
    def test_one_hot_probabilities(self, recipe: Recipe) -> None:
        """Each query sees a key of its own far above the others, so that its output is that value."""
        query, key, value = inputs(Shape(1, 256, 256, 1, 1, 128))
        rng = np.random.default_rng(6)
        signs = np.sign(rng.standard_normal((256, 128)))
        chosen = rng.permutation(256)
        key[0, :, 0], query[0, :, 0] = signs, signs[chosen]
        problem = problem_of(recipe, query, key, value, scale=0.5)
        actual = attend(problem)
        expected = problem.expected()
        assert_same_result(actual, expected)
        exact = np.array(value[0, chosen, 0], np.float32)
        assert relative_l2(actual.output[0, 0], exact) < 0.2

    @pytest.mark.parametrize("head_size", [64, 128])
    def test_keys_are_in_the_order_of_the_slots(self, head_size: int) -> None:
        problem = problem_of(recipes.accurate, *inputs(Shape(2, 1, 200, 2, 2, head_size)))
        codes, pages = blackwell.ordered_key(problem)
        ordered = dataclasses.replace(problem.operands.key, codes=jnp.asarray(codes), scales=jnp.asarray(pages))
        expected = np.array(score_operand_values(problem.operands.key))
        order = key_order(recipes.accurate, 200)
        assert order is not None and (order != np.arange(200)).any()
        expected[:, :, :200] = expected[:, :, order]
        np.testing.assert_array_equal(score_operand_values(ordered), expected)


class TestVisibility:
    """What a row does not see does not matter, whatever it is."""

    @pytest.mark.parametrize(
        "recipe", [recipes.train, recipes.square, recipes.accurate, GUARDED], ids=lambda recipe: recipe.name
    )
    def test_scores_beyond_the_lengths(self, recipe: Recipe) -> None:
        options: dict[str, Any] = {"query_lengths": [33, 140], "key_lengths": [131, 60]}
        clean = problem_of(recipe, *inputs(Shape(2, 140, 200, 1, 1, 64)), **options)
        valid_rows = np.arange(256) < np.array(options["query_lengths"])[:, None]
        valid_keys = np.arange(256) < np.array(options["key_lengths"])[:, None]
        poisoned = dataclasses.replace(
            clean,
            operands=dataclasses.replace(
                clean.operands,
                query=with_nan_scales(clean.operands.query, ~valid_rows),
                key=with_nan_scales(clean.operands.key, ~valid_keys),
            ),
        )
        actual, expected = attend(poisoned), attend(clean)
        assert same_bits(actual, expected)

    @pytest.mark.parametrize(
        "recipe", [recipes.train, recipes.square, recipes.accurate], ids=lambda recipe: recipe.name
    )
    def test_inputs_beyond_the_lengths(self, recipe: Recipe) -> None:
        """NaN there, before the quantisers."""
        options: dict[str, Any] = {"query_lengths": [130], "key_lengths": [170]}
        query, key, value = inputs(Shape(1, 140, 200, 1, 1, 64))
        clean = problem_of(recipe, query, key, value, **options)
        query[:, 130:], key[:, 170:], value[:, 170:] = np.nan, np.nan, np.nan
        poisoned = problem_of(recipe, query, key, value, **options)
        actual, expected = attend(poisoned), attend(clean)
        assert same_bits(actual, expected)

    @pytest.mark.parametrize("recipe", [recipes.train, recipes.fast], ids=lambda recipe: recipe.name)
    def test_the_future_of_causal_attention(self, recipe: Recipe) -> None:
        """Other keys and values from a position on change no bit of the rows before it."""
        query, key, value = inputs(Shape(1, 300, 300, 1, 1, 64))
        where = 192  # values share scales with the 32 keys of a block
        before = attend(problem_of(recipe, query, key, value, is_causal=True))
        key[:, where:], value[:, where:] = 3 * key[:, where:], -value[:, where:]
        after = attend(problem_of(recipe, query, key, value, is_causal=True))
        parts = [Attention(x.output[:, :, :where], x.lse[:, :, :where]) for x in (before, after)]
        assert same_bits(*parts)
        assert (before.lse[:, :, where:] != after.lse[:, :, where:]).all()

    @pytest.mark.parametrize("recipe", [recipes.train, recipes.fast], ids=lambda recipe: recipe.name)
    def test_a_nan_is_in_the_rows_that_see_it(self, recipe: Recipe) -> None:
        query, key, value = inputs(Shape(1, 140, 140, 1, 1, 64))
        clean = problem_of(recipe, query, key, value, is_causal=True)
        where = 130
        key[0, where, 0, 5] = np.nan
        spoiled = problem_of(recipe, query, key, value, is_causal=True)
        actual, expected = attend(spoiled), attend(clean)
        assert np.isnan(actual.output[0, 0, where:]).all() and np.isnan(actual.lse[0, 0, where:]).all()
        before = Attention(actual.output[0, 0, :where], actual.lse[0, 0, :where])
        assert same_bits(before, Attention(expected.output[0, 0, :where], expected.lse[0, 0, :where]))

    @pytest.mark.parametrize("recipe", [recipes.train, recipes.fast, GUARDED], ids=lambda recipe: recipe.name)
    def test_a_nan_query_in_a_tile_that_is_not_masked(self, recipe: Recipe) -> None:
        """All scores of its row are NaN, and none of another row."""
        query, key, value = inputs(Shape(1, 140, 256, 1, 1, 64))
        clean = problem_of(recipe, query, key, value)
        query[0, 7, 0, 5] = np.nan
        actual, expected = attend(problem_of(recipe, query, key, value)), attend(clean)
        assert np.isnan(actual.output[0, 0, 7]).all() and np.isnan(actual.lse[0, 0, 7])
        others = np.arange(140) != 7
        parts = [Attention(x.output[:, :, others], x.lse[:, :, others]) for x in (actual, expected)]
        assert same_bits(*parts)

    @pytest.mark.parametrize(
        "recipe", [recipes.train, recipes.fast, recipes.accurate, GUARDED], ids=lambda recipe: recipe.name
    )
    @pytest.mark.parametrize("place", [0, 95, 255])
    def test_a_nan_key_in_a_tile_that_is_not_masked(self, place: int, recipe: Recipe) -> None:
        """One score of every row is NaN, which a maximum that passes NaN by would not tell."""
        query, key, value = inputs(Shape(1, 140, 256, 1, 1, 64))
        key[0, place, 0, 5] = np.nan
        problem = problem_of(recipe, query, key, value)
        actual, expected = attend(problem), problem.expected()
        assert np.isnan(expected.output).all() and np.isnan(expected.lse).all()
        assert np.isnan(actual.output).all() and np.isnan(actual.lse).all()

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
    def test_rows_that_see_nothing(self, options: dict[str, Any], blind: np.ndarray, recipe: Recipe) -> None:
        problem = problem_of(recipe, *inputs(Shape(1, 40, 30, 1, 1, 64)), **options)
        actual = attend(problem)
        np.testing.assert_array_equal(actual.lse[0, 0] == -np.inf, blind)
        assert (actual.output[0, 0][blind] == 0).all()
        assert_same_result(actual, problem.expected())


class TestExtremes:
    @pytest.mark.parametrize("recipe", [recipes.train, recipes.square, GUARDED], ids=lambda r: r.name)
    def test_equal_scores(self, recipe: Recipe) -> None:
        query, key, value = inputs(Shape(1, 140, 161, 1, 1, 64))
        key[:] = key[:, :1]
        check_tiles(problem_of(recipe, query, key, value))

    @pytest.mark.parametrize("recipe", [recipes.train, recipes.exact_map, recipes.accurate], ids=lambda r: r.name)
    def test_zero_query(self, recipe: Recipe) -> None:
        query, key, value = inputs(Shape(1, 40, 161, 1, 1, 64))
        query[:] = 0
        check_tiles(problem_of(recipe, query, key, value))

    # Of larger scores with an anchor the reference, whose small numbers become zero on a CPU, loses the output.
    @pytest.mark.parametrize(
        ("recipe", "size"),
        [
            (recipes.train, 30),
            (recipes.train, 300),
            (recipes.square, 30),
            (recipes.square, 300),
            (recipes.accurate, 30),
            (GUARDED, 30),
        ],
        ids=lambda x: getattr(x, "name", str(x)),
    )
    def test_large_scores(self, recipe: Recipe, size: int) -> None:
        query, key, value = inputs(Shape(1, 140, 161, 1, 1, 64))
        check_tiles(problem_of(recipe, query * query.dtype.type(size), key, value))

    def constant(self, recipe: Recipe, log2_score: float, num_keys: int = 161) -> Problem:
        """All scores are the same."""
        query, key, value = inputs(Shape(1, 40, num_keys, 1, 1, 64))
        query[:], key[:] = 0, 0
        query[..., 0], key[..., 0] = 1, np.sign(log2_score)
        return problem_of(recipe, query, key, value, scale=abs(log2_score) / LOG2_E)

    @pytest.mark.parametrize("recipe", [recipes.fast, recipes.square, recipes.exact_map], ids=lambda r: r.name)
    @pytest.mark.parametrize("log2_score", [100.0, 140.0, 300.0])
    def test_scores_above_the_range_of_scales_saturate(self, recipe: Recipe, log2_score: float) -> None:
        check(self.constant(recipe, log2_score))

    @pytest.mark.parametrize("recipe", [recipes.fast, recipes.exact_map], ids=lambda r: r.name)
    def test_a_denominator_that_overflows(self, recipe: Recipe) -> None:
        problem = self.constant(dataclasses.replace(recipe, p_scale_shift=0), 127.0)
        actual = attend(problem)
        assert (actual.lse == np.inf).all() and (actual.output == 0).all()
        assert (problem.expected().lse == np.inf).all()

    @pytest.mark.parametrize("recipe", [recipes.fast, recipes.square, recipes.exact_map], ids=lambda r: r.name)
    def test_rows_far_below_the_reference_vanish(self, recipe: Recipe) -> None:
        problem = self.constant(recipe, -125.0)
        actual = attend(problem)
        assert (actual.lse == -np.inf).all() and (actual.output == 0).all()
        assert (problem.expected().lse == -np.inf).all()

    @pytest.mark.parametrize("recipe", [recipes.train, recipes.fp8_pv], ids=lambda r: r.name)
    @pytest.mark.parametrize("log2_score", [-125.0, 125.0, 1000.0])
    def test_a_running_maximum_has_no_range(self, recipe: Recipe, log2_score: float) -> None:
        check(self.constant(recipe, log2_score))

    @pytest.mark.parametrize(
        "recipe", [recipes.train, recipes.fp8_pv, recipes.fast, recipes.accurate], ids=lambda r: r.name
    )
    @pytest.mark.parametrize("place", [0, 382])
    def test_a_sink(self, recipe: Recipe, place: int) -> None:
        """One key has 2**20 times the weight of others, in the first of three tiles or in the last."""
        query, key, value = inputs(Shape(1, 40, 383, 1, 1, 64))
        query[..., 0], key[..., 0] = 1, 0
        key[:, place], key[:, place, :, 0] = 0, 6
        check(problem_of(recipe, query, key, value, scale=20 / 6 / LOG2_E))

    @pytest.mark.parametrize("recipe", [recipes.fast, recipes.square, recipes.train], ids=lambda r: r.name)
    def test_later_tiles_of_much_larger_scales(self, recipe: Recipe) -> None:
        """Scales grow by more octaves from tile to tile than float32 sums may lose."""
        query, key, value = inputs(Shape(1, 40, 383, 1, 1, 64))
        query[:], key[:] = 0, 0
        query[..., 0], key[0, :, 0, 0] = 6, np.repeat([-6, 0, 6], 128)[:383]
        check(problem_of(recipe, query, key, value, scale=70 / 36 / LOG2_E))

    @pytest.mark.parametrize("recipe", [recipes.square, recipes.accurate], ids=lambda r: r.name)
    def test_values_of_very_different_scales(self, recipe: Recipe) -> None:
        """Blocks of a tile 24 octaves apart; each channel's own error counts."""
        query, key, value = inputs(Shape(1, 40, 161, 1, 1, 64))
        rng = np.random.default_rng(5)
        value *= np.exp2(rng.integers(-12, 13, (1, 1, 1, 64))).astype(value.dtype)
        problem = problem_of(recipe, query, key, value)
        actual = attend(problem)
        expected = problem.expected()
        assert_same_result(actual, expected)
        for channel in range(64):
            assert relative_l2(actual.output[..., channel], expected.output[..., channel]) < OUTPUT
