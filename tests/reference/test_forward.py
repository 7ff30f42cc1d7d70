"""Output and lse of every recipe against the dense float64 oracles."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_fp4attn import Recipe, SegmentIds, recipes
from jax_fp4attn.code_map import Affine, Cubic, Exponential, MaxAffine, SignedSquare, uniform, with_exponential
from jax_fp4attn.config import OperatorConfig
from jax_fp4attn.reference import direct_p, online_softmax
from tests import oracles, shapes
from tests.assertions import assert_close, relative_l2
from tests.reference.agreement import assert_forward_agrees
from tests.shapes import SHAPES, Shape

CAUSAL_RECIPES = {
    **{name: recipes.named()[name] for name in ("train", "square", "causal_mxfp4")},
    "guarded": recipes.guarded(10, 16),
}


class TestRecipes:
    @pytest.mark.parametrize(("fold", "head_size"), [("k64_mse", 128), ("k64_max", 80)])
    def test_folded_scales_agree_with_the_dense_oracle(self, fold, head_size):
        # Head size 64, as in the other tests, has one K64 step and no fold.
        recipe = dataclasses.replace(recipes.square, qk_scale_fold=fold)
        inputs = shapes.normal(Shape((1,), 20, 150, 2, 1, head_size), seed=1)
        assert_forward_agrees(
            shapes.forward(inputs, recipe=recipe), oracles.forward(recipe, shapes.oracle_call(inputs))
        )

    @pytest.mark.parametrize("name", CAUSAL_RECIPES)
    def test_causal_agrees_with_the_dense_oracle(self, name):
        inputs = shapes.normal(Shape((1,), 160, 160, 2, 1, 64), seed=2)
        actual = shapes.forward(inputs, recipe=CAUSAL_RECIPES[name], is_causal=True)
        call = shapes.oracle_call(inputs, is_causal=True)
        assert_forward_agrees(actual, oracles.forward(CAUSAL_RECIPES[name], call))

    @pytest.mark.parametrize(
        "changes",
        [
            {"denominator": "unquantized"},
            {"row_reference": "anchor", "anchor_keys": 128, "margin": 20},
            {"v_channels_per_scale": 32, "v_exponent_rule": "best_l2"},
            {"p_exponent_rule": 1.25, "p_scale_shift": 40},
        ],
        ids=lambda changes: "-".join(changes),
    )
    def test_fields_that_no_named_recipe_sets(self, changes):
        recipe = dataclasses.replace(recipes.square, qk_scale_fold="none", **changes)
        inputs = shapes.normal(Shape((1,), 20, 160, 2, 1, 64), seed=3)
        assert_forward_agrees(
            shapes.forward(inputs, recipe=recipe), oracles.forward(recipe, shapes.oracle_call(inputs))
        )

    def test_tensor_scale_lifts_small_operands_out_of_the_subnormal_scales(self):
        inputs = shapes.normal(Shape((1,), 20, 160, 2, 1, 64), seed=3, std=2**-7)
        # A maximum of 2688 * 2**-16 makes the tensor scale a power of two. Others put values on midpoints, which its
        # own rounding then decides.
        inputs.query[0, 0, :, 0] = inputs.key[0, 0, :, 0] = 2688 * 2.0**-16
        recipe = dataclasses.replace(recipes.train, qk_tensor_scale="amax")
        scaled = shapes.forward(inputs, recipe=recipe, scale=2048.0)
        call = shapes.oracle_call(inputs, scale=2048.0)
        assert_forward_agrees(scaled, oracles.forward(recipe, call))
        unit = oracles.forward(recipes.train, call)
        exact = oracles.exact_forward(call)
        assert relative_l2(scaled.output, exact.output) < 0.5 * relative_l2(unit.output, exact.output)

    @pytest.mark.parametrize("format_", ["e4m3", "bf16"])
    def test_represented_denominator_of_the_online_softmax(self, format_):
        recipe = Recipe(p_format=format_, v_format=format_, denominator="represented", rescale_threshold_bits=3.5)
        inputs = shapes.normal(Shape((1,), 20, 160, 2, 1, 64), seed=4)
        assert_forward_agrees(
            shapes.forward(inputs, recipe=recipe), oracles.forward(recipe, shapes.oracle_call(inputs))
        )

    def test_sharp_scores_stay_within_the_shiftless_range(self):
        # Scores up to about 60 nats: blocks then differ by most of the range of the scale byte.
        inputs = shapes.normal(Shape((1,), 20, 160, 2, 1, 64), seed=5, std=4.0)
        actual = shapes.forward(inputs, recipe=recipes.square)
        assert_forward_agrees(actual, oracles.forward(recipes.square, shapes.oracle_call(inputs)))


class TestInputs:
    @pytest.mark.parametrize(
        ("name", "keys"),
        [("train", tiles * 128 + tail) for tiles, tail in ((0, 1), (0, 31), (0, 127), (1, 1), (2, 127), (4, 33))]
        + [("accurate", tiles * 128 + tail) for tiles, tail in ((0, 31), (1, 33), (3, 127), (4, 1))],
    )
    def test_one_to_five_key_tiles_with_tails(self, name, keys):
        inputs = shapes.normal(Shape((1,), 3, keys, 2, 2, 64), seed=keys)
        actual = shapes.forward(inputs, recipe=recipes.named()[name])
        assert_forward_agrees(actual, oracles.forward(recipes.named()[name], shapes.oracle_call(inputs)))

    def test_float32_inputs_are_rounded_to_bfloat16(self):
        inputs = shapes.normal(SHAPES["mqa"]).astype(np.float32)
        rounded = shapes.evaluate(inputs, recipe=recipes.train, is_causal=True)
        noisy = inputs._replace(
            **{name: x * np.float32(1 + 2**-12) for name, x in inputs._asdict().items() if name in ("query", "key")}
        )
        from_noise = shapes.evaluate(noisy, recipe=recipes.train, is_causal=True)
        from_bfloat16 = shapes.evaluate(shapes.normal(SHAPES["mqa"]), recipe=recipes.train, is_causal=True)
        for result in (rounded, from_noise):
            assert result.output.dtype == np.float32
            for x, y in zip(result[:5], from_bfloat16[:5], strict=True):
                np.testing.assert_array_equal(x, y.astype(np.float32))


class TestRestrictions:
    """Each way to hide keys, alone and together, against the dense oracle."""

    SHAPE = Shape((2,), 40, 150, 4, 2, 64)

    @pytest.mark.parametrize("name", ["train", "accurate"])
    @pytest.mark.parametrize(
        "options",
        [
            {"local_window_size": (7, 0)},
            {"local_window_size": (3, 60), "is_causal": False},
            {"key_value_seq_lengths": np.array([131, 20])},
            {"query_seq_lengths": np.array([40, 13]), "key_value_seq_lengths": np.array([150, 64]), "is_causal": True},
        ],
        ids=["left_window", "two_sided_window", "key_lengths", "both_lengths_causal"],
    )
    def test_agrees_with_the_dense_oracle(self, name, options):
        inputs = shapes.normal(self.SHAPE, seed=6)
        actual = shapes.forward(inputs, recipe=recipes.named()[name], **options)
        # The key lengths zero what lies beyond before V's scales are chosen.
        call = _zero_invalid(shapes.oracle_call(inputs, **options), options.get("key_value_seq_lengths"))
        assert_forward_agrees(actual, oracles.forward(recipes.named()[name], call))

    def test_segments(self):
        rng = np.random.default_rng(7)
        ids = SegmentIds(np.sort(rng.integers(1, 4, (2, 40))), np.sort(rng.integers(1, 4, (2, 150))))
        inputs = shapes.normal(self.SHAPE, seed=7)
        actual = shapes.forward(inputs, recipe=recipes.train, segment_ids=ids)
        assert_forward_agrees(actual, oracles.forward(recipes.train, shapes.oracle_call(inputs, segment_ids=ids)))

    @pytest.mark.parametrize("mask_shape", [(2, 4, 40, 150), (1, 1, 40, 150), (2, 1, 1, 150), (1, 4, 40, 1)])
    def test_masks_of_every_broadcast_shape(self, mask_shape):
        mask = np.random.default_rng(8).random(mask_shape) < 0.6
        inputs = shapes.normal(self.SHAPE, seed=8)
        actual = shapes.forward(inputs, recipe=recipes.train, mask=mask)
        assert_forward_agrees(actual, oracles.forward(recipes.train, shapes.oracle_call(inputs, mask=mask)))

    @pytest.mark.parametrize("name", ["train", "accurate"])
    def test_bias_is_in_natural_log_units_after_the_scale(self, name):
        bias = np.random.default_rng(9).standard_normal((1, 4, 40, 150)).astype(np.float32)
        inputs = shapes.normal(self.SHAPE, seed=9)
        actual = shapes.forward(inputs, bias, recipe=recipes.named()[name], scale=0.31)
        assert_forward_agrees(
            actual, oracles.forward(recipes.named()[name], shapes.oracle_call(inputs, bias, scale=0.31))
        )

    def test_a_bias_of_the_lowest_float_is_a_mask(self):
        # What libraries add where they have no boolean mask.
        hidden = np.random.default_rng(10).random((2, 1, 40, 150)) < 0.5
        bias = np.where(hidden, np.finfo(np.float32).min, 0).astype(np.float32)
        inputs = shapes.normal(self.SHAPE, seed=10)
        by_bias = shapes.forward(inputs, bias, recipe=recipes.train)
        by_mask = shapes.forward(inputs, recipe=recipes.train, mask=~hidden)
        np.testing.assert_array_equal(by_bias.output, by_mask.output)
        np.testing.assert_array_equal(by_bias.lse, by_mask.lse)

    def test_a_window_wider_than_any_sequence_hides_nothing(self):
        inputs = shapes.normal(self.SHAPE, seed=11)
        whole = shapes.forward(inputs, recipe=recipes.train)
        wide = shapes.forward(inputs, recipe=recipes.train, local_window_size=(2**31 - 1, 2**40))
        np.testing.assert_array_equal(wide.output, whole.output)


def _zero_invalid(call: oracles.Call, key_lengths: np.ndarray | None) -> oracles.Call:
    if key_lengths is None:
        return call
    valid = np.arange(call.key.shape[1]) < key_lengths[:, None]
    key, value = (np.where(valid[:, :, None, None], x, np.zeros_like(x)) for x in (call.key, call.value))
    return dataclasses.replace(call, key=key, value=value)


class TestDirectPTile:
    """Codes and scale bytes of one tile, away from the boundaries where float32 and float64 may differ."""

    MAPS = (
        uniform(Affine(1.5, 1.2)),
        uniform(Exponential(-0.25)),
        uniform(SignedSquare(0.64, 0.39, 0.68)),
        uniform(MaxAffine(((0.453, 0.953), (2.272, -0.965)))),
        uniform(Cubic(0.07430709, 0.28611863, 0.64670005, 0.99010784)),
        with_exponential((Affine(1.5, 1.2), Affine(1.65, 0.8), Affine(1.6, 0.95), Affine(1.2, 1)), (1, 2, 3, 4)),
        with_exponential(Affine(1.65, 0.8), (0, 1, 0, 1), query_tiles=(False, True), offset=0.5),
    )

    @pytest.mark.parametrize("rule", [1.5, "ceil", 1.25])
    @pytest.mark.parametrize("schedule", MAPS, ids=lambda schedule: type(schedule.quarters[0]).__name__)
    def test_codes_are_those_of_the_oracle(self, schedule, rule):
        recipe = dataclasses.replace(recipes.fast, code_map=schedule, p_exponent_rule=rule, p_scale_shift=5)
        rng = np.random.default_rng(12)
        raw = (8 * rng.standard_normal((1, 1, 132, 128))).astype(np.float32)
        raw[rng.random(raw.shape) < 0.2] = -np.inf
        raw[..., 96:] = -np.inf  # a whole block
        ref = rng.standard_normal((1, 1, 132)).astype(np.float32)
        config = OperatorConfig(recipe, 0.125, False, None)
        probabilities, denominator = _tile_program(config, raw, ref)
        expected, total = oracles.direct_p(recipe, oracles.float64(raw), oracles.float64(ref), config.log2_scale)
        # Perturbing the scores tells which codes and bytes sit on a boundary.
        near = np.zeros(raw.shape, bool)
        for shift in (-1e-4, 1e-4):
            moved, _ = oracles.direct_p(recipe, raw + shift, oracles.float64(ref), config.log2_scale)
            near |= moved != expected
        assert near.mean() < 5e-3
        assert np.count_nonzero(expected) > 4000
        np.testing.assert_array_equal(np.where(near, 0, probabilities / 6), np.where(near, 0, np.float32(expected)))
        rows = ~near.any(-1)
        assert rows.mean() > 0.5
        np.testing.assert_allclose(denominator[rows], total[rows], rtol=1e-6)

    def test_blocks_at_the_bottom_of_the_scale_byte_lose_codes_and_keep_their_weight(self):
        # Bytes from far below L to above it: the stored byte stops at 1, and the codes are normalised by L + 1.
        shift = 20
        recipe = dataclasses.replace(recipes.fast, p_scale_shift=shift)
        config = OperatorConfig(recipe, 1 / oracles.LOG2_E, False, None)
        log_max = np.linspace(shift - 127 - 6, shift - 127 + 6, 121, dtype=np.float32) + 0.01
        raw = log_max[:, None] - np.linspace(0, 3, 128, dtype=np.float32)
        scaled, denominator = _tile_program(config, raw[None], np.zeros((1, 121), np.float32))
        expected, total = oracles.direct_p(recipe, oracles.float64(raw)[None], np.zeros((1, 121)), config.log2_scale)
        # In units of the smallest scale; code 1/2 of it is subnormal, which a CPU may flush to zero.
        unit = 2.0**-126
        normal = expected * 6 >= unit
        assert normal.any(-1).mean() > 0.5
        assert (~expected.any(-1)).any()
        near = np.abs(oracles.float64(scaled) - expected * 6) > 1e-3 * unit
        assert near[normal].mean() < 0.01
        np.testing.assert_array_less(oracles.float64(scaled)[~normal], unit)
        rows = normal.all(-1)
        np.testing.assert_allclose(oracles.float64(denominator)[rows], total[rows], rtol=0.02)

    def test_ceil_leaves_a_power_of_two_alone(self):
        recipe = dataclasses.replace(recipes.exact_map, p_exponent_rule="ceil", p_scale_shift=0)
        config = OperatorConfig(recipe, 1 / oracles.LOG2_E, False, None)
        assert config.log2_scale == 1
        exponents = np.array([-40, -1, 1, 40], np.float32)
        # A twelfth of the maximum and a little more: half a unit of the maximum's own scale, a whole one of the next.
        small = exponents - np.float32(math.log2(12) - 0.2)
        for largest, units in ((exponents, 0.5), (np.nextafter(exponents, np.float32(np.inf)), 1.0)):
            raw = np.tile(small[:, None], (1, 128))
            raw[:, ::32] = largest[:, None]
            scaled, _ = _tile_program(config, raw[None], np.zeros((1, 4), np.float32))
            np.testing.assert_array_equal(scaled[0, :, 0], 6 * np.exp2(exponents))
            np.testing.assert_array_equal(scaled[0, :, 1], units * np.exp2(exponents))

    def test_the_largest_probability_of_a_block_never_falls_below_three_quarters_of_its_scale(self):
        # Selector "nearest": alpha in (max / 1.5, max / .75].
        config = OperatorConfig(
            dataclasses.replace(recipes.exact_map, p_scale_shift=0), 1 / oracles.LOG2_E, False, None
        )
        x = np.linspace(-3, 3, 2001, dtype=np.float32)
        raw = np.full((1, 2001, 128), -np.inf, np.float32)
        raw[0, :, 0] = x
        scaled, _ = _tile_program(config, raw, np.zeros((1, 2001), np.float32))
        ratio = scaled[0, :, 0] / 6 / np.exp2(x)
        assert ratio.max() <= 4 / 3 + 1e-5
        assert ratio.min() >= 2 / 3 - 1e-5


def _tile_program(config: OperatorConfig, raw: np.ndarray, ref: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    function = jax.jit(lambda raw, ref: direct_p.probability_tile(config, raw, ref))
    return jax.tree.map(np.asarray, function(raw, ref))


class TestRange:
    """Rows whose denominator leaves float32, and the byte's own limits."""

    def _constant_scores(self, nats: list[float], recipe: Recipe) -> shapes.Result:
        """Four keys; row i scores `nats[i]` against all of them."""
        query = np.zeros((1, len(nats), 1, 64), np.float32)
        query[0, :, 0, 0] = nats
        key = np.zeros((1, 4, 1, 64), np.float32)
        key[..., 0] = 1
        value = np.ones((1, 4, 1, 64), np.float32)
        inputs = shapes.Inputs(query, key, value, np.ones_like(query), np.ones(query.shape[:3], np.float32))
        recipe = dataclasses.replace(recipe, qk_format="bf16", qk_scale_fold="none")
        return shapes.evaluate(inputs, recipe=recipe, scale=1.0)

    def test_a_shiftless_row_below_the_range_gives_zero_and_minus_infinity(self):
        result = self._constant_scores([-75, -90, 0], recipes.square)
        np.testing.assert_array_equal(result.output[0, :, 0, 0], [1, 0, 1])
        np.testing.assert_array_equal(np.isneginf(result.lse[0, :, 0]), [False, True, False])
        np.testing.assert_array_equal(result.d_query[0, 1], 0)
        assert all(np.isfinite(x).all() for x in (result.d_query, result.d_key, result.d_value))

    def test_a_shiftless_row_above_the_range_saturates(self):
        # The scale byte stops at 254 and the code at 6: 127 bits a key, whatever the score.
        result = self._constant_scores([88, 100, 1000], recipes.square)
        np.testing.assert_array_equal(result.output[0, :, 0, 0], 1)
        np.testing.assert_allclose(result.lse[0, 1:, 0], math.log(4) + 127 * math.log(2), rtol=1e-6)

    def test_a_denominator_that_overflows_gives_zero_and_infinity(self):
        # Four times 2**127 without the shift that makes room for it.
        result = self._constant_scores([100, 0], dataclasses.replace(recipes.square, p_scale_shift=0))
        np.testing.assert_array_equal(result.output[0, :, 0, 0], [0, 1])
        assert result.lse[0, 0, 0] == np.inf
        np.testing.assert_array_equal(result.d_query[0, 0], 0)
        assert all(np.isfinite(x).all() for x in (result.d_query, result.d_key, result.d_value))

    def test_a_guarded_row_keeps_scores_far_beyond_the_shiftless_range(self):
        result = self._constant_scores([1000, -1000, 0], recipes.guarded(10, 16))
        np.testing.assert_array_equal(result.output[0, :, 0, 0], 1)
        np.testing.assert_allclose(result.lse[0, :, 0], math.log(4) + np.array([1000, -1000, 0]), atol=1e-3)

    def test_the_shift_does_not_change_results_inside_the_range(self):
        inputs = shapes.normal(Shape((1,), 20, 160, 2, 1, 64), seed=13)
        results = [
            shapes.forward(inputs, recipe=dataclasses.replace(recipes.square, p_scale_shift=shift)) for shift in (0, 16)
        ]
        np.testing.assert_array_equal(results[0].output, results[1].output)
        np.testing.assert_allclose(results[0].lse, results[1].lse, atol=1e-5)

    def test_an_anchor_in_bits_moves_nothing_when_the_scores_move(self):
        # A constant added to a row moves ref along: codes, and so the output, stay.
        inputs = shapes.normal(Shape((1,), 20, 160, 2, 1, 64), seed=14)
        recipe = dataclasses.replace(recipes.accurate, qk_format="bf16")
        near = shapes.forward(inputs, np.zeros((1, 1, 1, 1), np.float32), recipe=recipe)
        far = shapes.forward(inputs, np.full((1, 1, 1, 1), 1000, np.float32), recipe=recipe)
        # 1000 nats leave about 13 bits of the score's fraction.
        assert relative_l2(far.output, near.output) < 0.02
        np.testing.assert_allclose(far.lse - 1000, near.lse, atol=0.01)

    def test_a_row_that_sees_no_anchor_falls_back_to_reference_zero(self):
        inputs = shapes.normal(Shape((1,), 100, 100, 1, 1, 64), seed=15)
        recipe = dataclasses.replace(recipes.causal_mxfp4, code_map=recipes.square.code_map, p_exponent_rule=1.5)
        shiftless = dataclasses.replace(recipe, row_reference="zero", margin=0)
        anchored, plain = (shapes.forward(inputs, recipe=r, local_window_size=(5, 0)) for r in (recipe, shiftless))
        # Row i sees keys i - 5 .. i, none of the first 32 from i = 37 on.
        np.testing.assert_array_equal(anchored.output[:, 37:], plain.output[:, 37:])
        np.testing.assert_array_equal(anchored.lse[:, 37:], plain.lse[:, 37:])
        assert (anchored.lse[:, :37] != plain.lse[:, :37]).any()


class TestOnlineSoftmax:
    def test_blocked_control_equals_dense_softmax(self):
        inputs = shapes.normal(Shape((1,), 40, 400, 2, 1, 64))
        actual = shapes.forward(inputs, recipe=recipes.bf16)
        exact = oracles.exact_forward(shapes.oracle_call(inputs))
        # bfloat16 P and output: two roundings of 2**-9 at most.
        assert relative_l2(actual.output, exact.output) < 2**-8
        assert_close(actual.lse, exact.lse.astype(np.float32), rtol=0, atol=1e-5)

    @pytest.mark.parametrize("name", ["train", "fp8_pv", "nvfp4_pv", "nvfp4_pv_two_level"])
    def test_one_pass_equals_blocks_once_the_first_tile_holds_the_maximum(self, name):
        # The running maximum then never moves, and tiles are independent.
        recipe = recipes.named()[name]
        inputs = shapes.normal(Shape((1,), 20, 300, 2, 1, 64), seed=16)
        bias = np.zeros((1, 1, 1, 300), np.float32)
        bias[..., 3] = 12.0
        actual = shapes.forward(inputs, bias, recipe=recipe)
        call = shapes.oracle_call(inputs, bias)
        raw = oracles.raw_scores(recipe, call)
        x = raw * call.scale * oracles.LOG2_E
        assert (x[..., :128].max(-1) == x.max(-1)).all()
        exponentials = np.exp2(x - x.max(-1, keepdims=True))
        p = oracles.round_probabilities(recipe, exponentials)
        output = p @ oracles.repeat_heads(oracles.value_operand(recipe, call.value), 2)
        output = np.swapaxes(output / exponentials.sum(-1, keepdims=True), 1, 2)
        assert relative_l2(actual.output, oracles.bfloat16(output)) < 1e-3

    def test_the_maximum_is_kept_while_it_grows_by_at_most_the_threshold(self):
        recipe = dataclasses.replace(recipes.train, rescale_threshold_bits=3.0)
        config = OperatorConfig(recipe, 1 / oracles.LOG2_E, False, None)
        row_max = jnp.array([0.0, 0.0, 0.0, -jnp.inf, -jnp.inf, 5.0])
        tile_max = jnp.array([3.0, 3.25, -2.0, 1.0, -jnp.inf, -jnp.inf])
        raw = jnp.full((6, 128), -jnp.inf).at[:, 7].set(tile_max)
        p = online_softmax.probability_tile(config, raw, row_max)
        np.testing.assert_array_equal(p.row_max, [0, 3.25, 0, 1, -np.inf, 5])
        np.testing.assert_allclose(p.correction, [1, 2**-3.25, 1, 0, 0, 1], rtol=1e-6)
        np.testing.assert_allclose(p.row_sum, [8, 1, 0.25, 1, 0, 0], rtol=1e-6)

    def test_nvfp4_probabilities_round_ties_of_the_quotient_to_even(self):
        # The largest of each 16, 1.5, makes the scale 1/4; the others are midpoints of the grid times it.
        p = np.array([1.5, 1.25, 0.875, 0.625, 0.4375, 0.3125, 0.1875, 0.0625] * 2, np.float32)
        rounded = jax.jit(lambda p: online_softmax._round_nvfp4(p, 1.0))(np.tile(p, (3, 8)))
        np.testing.assert_array_equal(rounded, np.tile([1.5, 1.0, 1.0, 0.5, 0.5, 0.25, 0.25, 0.0], (3, 16)))


class TestLse:
    @pytest.mark.parametrize("name", ["train", "nvfp4_pv", "bf16"])
    def test_merging_two_halves_of_the_keys_gives_the_whole(self, name):
        recipe = recipes.named()[name]
        inputs = shapes.normal(Shape((1,), 20, 256, 2, 1, 64), seed=17)
        whole = shapes.forward(inputs, recipe=recipe)
        halves = [
            shapes.forward(inputs._replace(key=inputs.key[:, part], value=inputs.value[:, part]), recipe=recipe)
            for part in (slice(None, 128), slice(128, None))
        ]
        lse = np.logaddexp(halves[0].lse, halves[1].lse)
        output = sum(np.exp(half.lse - lse)[..., None] * oracles.float64(half.output) for half in halves)
        assert whole.lse.dtype == np.float32
        np.testing.assert_allclose(lse, whole.lse, atol=2e-6)
        # The halves round P relative to their own maximum.
        assert (
            relative_l2(output, oracles.float64(whole.output)) < {"train": 0.04, "nvfp4_pv": 0.15, "bf16": 4e-3}[name]
        )

    def test_is_the_natural_log_of_the_denominator(self):
        # Eight keys with score ln 2 each: the sum of exponentials is 16.
        query = np.zeros((1, 1, 1, 64), np.float32)
        query[..., 0] = 6  # exact in NVFP4: scale 1, code 6
        key = np.repeat(query, 8, 1)
        inputs = shapes.Inputs(query, key, key, query, np.zeros((1, 1, 1), np.float32))
        for name in ("train", "exact_map", "nvfp4_pv", "bf16"):
            lse = shapes.forward(inputs, recipe=recipes.named()[name], scale=math.log(2) / 36).lse
            np.testing.assert_allclose(lse, math.log(16), atol=1e-6)
