"""The named recipes are what docs/numerics.md says they are."""

import dataclasses

import pytest

from jax_fp4attn import Recipe, recipes
from jax_fp4attn.code_map import Affine, Cubic, Exponential, MaxAffine, SignedSquare, paper_pairs


def test_named_returns_every_module_level_recipe_by_its_own_name():
    named = recipes.named()
    assert len(named) == 18
    for name, recipe in named.items():
        assert getattr(recipes, name) is recipe
        assert recipe.name == name
        assert name in recipes.__all__
    assert len(set(named.values())) == len(named), "two names for one recipe"


def test_named_returns_a_new_dictionary():
    recipes.named().clear()
    assert recipes.named()


@pytest.mark.parametrize(
    ("name", "code_map"),
    [
        ("fast", Affine(1.5, 1.2)),
        ("fast_video", Affine(1.6, 0.95)),
        ("exact_map", Exponential(0.0)),
        ("square", SignedSquare(0.64, 0.39, 0.68)),
        ("square_rte_v", SignedSquare(0.64, 0.39, 0.68)),
        ("two_piece", MaxAffine(((0.453, 0.953), (2.272, -0.965)))),
        ("balanced_raw_margin", Affine(1.65, 0.8)),
    ],
)
def test_one_map_for_every_element(name, code_map):
    schedule = recipes.named()[name].code_map
    assert schedule.quarters == (code_map,) * 4
    assert schedule.alternate is None


@pytest.mark.parametrize("name", ["fast", "fast_video", "exact_map", "square", "square_rte_v", "two_piece"])
def test_the_shiftless_family(name):
    recipe = recipes.named()[name]
    assert recipe.row_reference == "zero"
    assert (recipe.qk_format, recipe.qk_scale_fold, recipe.qk_ties) == ("nvfp4", "k64_mse", "toward_zero")
    assert (recipe.p_exponent_rule, recipe.p_scale_shift, recipe.denominator) == (1.5, 16, "represented")
    assert recipe.v_exponent_rule == (1.203125 if name == "square" else "rte")
    assert recipe.v_channels_per_scale == 1


def test_accurate():
    recipe = recipes.accurate
    assert (recipe.row_reference, recipe.anchor_keys, recipe.anchor_order) == ("anchor", 32, "strided")
    assert (recipe.margin, recipe.margin_unit, recipe.p_scale_shift) == (64, "bits", 8)
    assert (recipe.qk_scale_fold, recipe.p_exponent_rule, recipe.denominator) == ("none", 1.5, "represented")
    assert recipe.code_map.quarters == (Affine(1.65, 0.8),) * 4
    assert recipe.code_map.alternate == Exponential(0.0)
    assert recipe.code_map.alternate_pairs == tuple(paper_pairs(1, q) for q in range(4))
    assert recipe.code_map.alternate_query_tiles == (True, True)


def test_causal_mxfp4():
    recipe = recipes.causal_mxfp4
    assert (recipe.row_reference, recipe.anchor_keys, recipe.anchor_order) == ("anchor", 32, "leading")
    assert (recipe.margin, recipe.p_exponent_rule, recipe.p_scale_shift) == (64, "ceil", 32)
    cubic = Cubic(0.07430709, 0.28611863, 0.64670005, 0.99010784)
    assert recipe.code_map.quarters == (Affine(1.5, 1.2), cubic, cubic, cubic)
    assert recipe.code_map.alternate_pairs == (paper_pairs(3, 0), paper_pairs(3, 1), (), ())


def test_sampled_denominator_is_the_entry_of_the_format_matrix():
    recipe = recipes.sampled_denominator
    assert (recipe.row_reference, recipe.qk_scale_fold, recipe.p_scale_shift) == ("zero", "none", 0)
    assert recipe.denominator == "sampled"
    assert recipe.code_map.quarters == (Affine(1.62330034, 0.92083546),) * 4
    assert recipe.code_map.alternate_pairs == tuple(paper_pairs(1, q) for q in range(4))


def test_train():
    recipe = recipes.train
    assert (recipe.qk_format, recipe.qk_scale_fold, recipe.qk_tensor_scale) == ("nvfp4", "none", "unit")
    assert (recipe.p_format, recipe.v_format, recipe.v_multiplier) == ("e4m3", "e4m3", 4.0)
    assert (recipe.row_reference, recipe.rescale_threshold_bits) == ("online_max", 8.0)
    assert recipe.denominator == "unquantized"
    assert (recipe.backward, recipe.backward_qk) == ("fp8", "source")
    assert (recipe.backward_multiplier, recipe.backward_p_lift_bits) == (4.0, 8)
    assert (recipe.output_gradient_scale, recipe.dq_accumulation) == ("amax", "float32")


def test_train_unit_gradient_scale_differs_from_train_as_the_published_backward_does():
    changes = {"output_gradient_scale": "unit", "dq_accumulation": "bfloat16_per_tile"}
    assert recipes.train_unit_gradient_scale == dataclasses.replace(recipes.train, **changes)


@pytest.mark.parametrize("name", ["nvfp4_pv", "nvfp4_pv_two_level", "fp8_pv", "bf16"])
def test_controls_use_the_online_softmax_with_unrounded_sums(name):
    recipe = recipes.named()[name]
    assert (recipe.row_reference, recipe.rescale_threshold_bits) == ("online_max", 0)
    assert recipe.denominator == "unquantized"
    assert recipe.p_tensor_scale == (1 / 2688 if name == "nvfp4_pv_two_level" else 1)
    assert recipe.v_multiplier == 1


@pytest.mark.parametrize(
    ("raw", "base"), [("accurate_raw_margin", "accurate"), ("causal_mxfp4_raw_margin", "causal_mxfp4")]
)
def test_raw_margins_are_the_published_form_of_the_margin_in_bits(raw, base):
    named = recipes.named()
    assert named[raw] == dataclasses.replace(named[base], margin_unit="raw_score")


class TestGuarded:
    def test_looks_at_128_spread_keys_and_spends_exponentials_in_odd_query_tiles(self):
        recipe = recipes.guarded(10, 16)
        assert (recipe.row_reference, recipe.anchor_keys, recipe.anchor_order) == ("anchor", 128, "strided")
        assert (recipe.margin, recipe.margin_unit, recipe.p_scale_shift) == (10, "bits", 16)
        assert recipe.qk_scale_fold == "k64_mse"
        assert recipe.code_map.quarters == (Affine(1.65, 0.8),) * 4
        assert recipe.code_map.alternate_query_tiles == (False, True)
        assert recipe.name == "guarded(10, 16)"

    @pytest.mark.parametrize(("margin", "shift"), [(0, 0), (110, 16), (126, 0), (0, 126)])
    def test_margin_plus_shift_up_to_126(self, margin, shift):
        assert isinstance(recipes.guarded(margin, shift), Recipe)

    @pytest.mark.parametrize(("margin", "shift"), [(111, 16), (127, 0), (1, 126)])
    def test_margin_plus_shift_beyond_126_is_refused(self, margin, shift):
        with pytest.raises(ValueError, match=r"Recipe\.margin: expected margin \+ p_scale_shift <= 126"):
            recipes.guarded(margin, shift)

    def test_the_published_margin_is_in_raw_scores(self):
        assert recipes.guarded_raw_margin(110, 16) == dataclasses.replace(
            recipes.guarded(110, 16), margin_unit="raw_score"
        )
