import dataclasses
import math

import numpy as np
import pytest

from jax_fp4attn import Recipe, recipes
from jax_fp4attn.code_map import Affine, uniform
from tests import oracles, shapes
from tests.assertions import assert_same_bytes
from tests.shapes import Shape

ONLINE = Recipe(p_format="e4m3", v_format="e4m3")
# Neither folded, so that a change of the fold is not the only thing seen, nor slow to compile.
DIRECT = dataclasses.replace(recipes.accurate, margin=10, backward_lse_correction=0.0)
NVFP4 = recipes.nvfp4_pv
CONTROL = recipes.bf16
FIELDS = tuple(field.name for field in dataclasses.fields(Recipe) if field.name != "name")


class TestRefusals:
    @pytest.mark.parametrize(
        ("base", "changes", "field", "reason"),
        [
            (CONTROL, {"qk_scale_fold": "k64_mse"}, "qk_scale_fold", "qk_format='bf16', which has no scales"),
            (CONTROL, {"qk_tensor_scale": "amax"}, "qk_tensor_scale", "qk_format='bf16', which has no scales"),
            (DIRECT, {"anchor_keys": 64}, "anchor_keys", "32 or 128"),
            (DIRECT, {"anchor_keys": 256}, "anchor_keys", "at most one key tile"),
            (DIRECT, {"margin": -1}, "margin", "number from 0 to"),
            (DIRECT, {"margin": math.nan}, "margin", "number from 0 to"),
            (DIRECT, {"margin": math.inf, "margin_unit": "raw_score"}, "margin", "number from 0 to"),
            (DIRECT, {"margin": 1.5}, "margin", "whole number of bits"),
            (DIRECT, {"margin": 100, "p_scale_shift": 27}, "margin", "<= 126, the range of the E8M0 byte"),
            (recipes.fast, {"margin": 1}, "margin", "0 unless row_reference='anchor'"),
            (ONLINE, {"margin": 1}, "margin", "0 unless row_reference='anchor'"),
            (recipes.fast, {"anchor_order": "strided"}, "anchor_order", "'leading' unless row_reference='anchor'"),
            (ONLINE, {"rescale_threshold_bits": 8.5}, "rescale_threshold_bits", r"must fit in E4M3"),
            (ONLINE, {"rescale_threshold_bits": -1.0}, "rescale_threshold_bits", "0 to 8"),
            (ONLINE, {"rescale_threshold_bits": math.nan}, "rescale_threshold_bits", "0 to 8"),
            (DIRECT, {"rescale_threshold_bits": 1.0}, "rescale_threshold_bits", "0 unless row_reference='online_max'"),
            (NVFP4, {"rescale_threshold_bits": 1.0}, "rescale_threshold_bits", "e4m3 or bf16 P"),
            (DIRECT, {"row_reference": "online_max", "margin": 0, "anchor_order": "leading"}, "row_reference", "never"),
            (ONLINE, {"row_reference": "zero"}, "row_reference", "'online_max' with every other p_format"),
            (DIRECT, {"code_map": None}, "code_map", "a MapSchedule with p_format='mxfp4'"),
            (DIRECT, {"code_map": Affine(1.5, 1.2)}, "code_map", "a MapSchedule with p_format='mxfp4'"),
            (ONLINE, {"code_map": uniform(Affine(1.5, 1.2))}, "code_map", "None otherwise"),
            (DIRECT, {"p_exponent_rule": "floor"}, "p_exponent_rule", "'ceil' or a float"),
            (DIRECT, {"p_exponent_rule": "rte"}, "p_exponent_rule", "'ceil' or a float"),
            (DIRECT, {"p_exponent_rule": 2.0}, "p_exponent_rule", "threshold"),
            (DIRECT, {"p_scale_shift": -1}, "p_scale_shift", "from 0 to 126"),
            (DIRECT, {"p_scale_shift": 8.0}, "p_scale_shift", "a Python int"),
            (recipes.fast, {"p_scale_shift": 127}, "p_scale_shift", "from 0 to 126"),
            (ONLINE, {"p_scale_shift": 1}, "p_scale_shift", "0 unless p_format='mxfp4'"),
            (ONLINE, {"denominator": "sampled"}, "denominator", "'sampled' only with p_format='mxfp4'"),
            (NVFP4, {"p_tensor_scale": 0.0}, "p_tensor_scale", "number from 1.5"),
            (NVFP4, {"p_tensor_scale": math.inf}, "p_tensor_scale", "number from 1.5"),
            (NVFP4, {"p_tensor_scale": math.nan}, "p_tensor_scale", "number from 1.5"),
            (ONLINE, {"p_tensor_scale": 0.5}, "p_tensor_scale", "1 unless p_format='nvfp4'"),
            (ONLINE, {"v_format": "bf16"}, "v_format", "operands of one tensor-core instruction"),
            (DIRECT, {"v_format": "e4m3"}, "v_format", "operands of one tensor-core instruction"),
            (DIRECT, {"v_exponent_rule": 1.0}, "v_exponent_rule", "threshold"),
            (DIRECT, {"v_exponent_rule": "best"}, "v_exponent_rule", "threshold"),
            (DIRECT, {"v_channels_per_scale": 16}, "v_channels_per_scale", "1 or 32"),
            (NVFP4, {"v_channels_per_scale": 32}, "v_channels_per_scale", "1 unless v_format='mxfp4'"),
            (ONLINE, {"v_multiplier": 3.0}, "v_multiplier", "power of two"),
            (ONLINE, {"v_multiplier": -4.0}, "v_multiplier", "number from"),
            (NVFP4, {"v_multiplier": 4.0}, "v_multiplier", "1 unless v_format='e4m3'"),
            (ONLINE, {"backward_multiplier": 0.0}, "backward_multiplier", "number from"),
            (ONLINE, {"backward_multiplier": math.inf}, "backward_multiplier", "number from"),
            (ONLINE, {"backward_lse_correction": math.nan}, "backward_lse_correction", "number from -16 to 16"),
            (ONLINE, {"backward_multiplier": 3.0}, "backward_multiplier", "power of two"),
            (ONLINE, {"backward_multiplier": 2.0**13}, "backward_multiplier", "to 4096 .*inside float32"),
            (ONLINE, {"backward_multiplier": "4"}, "backward_multiplier", "a Python number"),
            (ONLINE, {"v_multiplier": 2.0**17}, "v_multiplier", "inside float32"),
            (ONLINE, {"v_multiplier": np.float32(2)}, "v_multiplier", "a Python number"),
            (ONLINE, {"v_multiplier": True}, "v_multiplier", "a Python number"),
            (NVFP4, {"p_tensor_scale": 1e300}, "p_tensor_scale", "inside float32"),
            (ONLINE, {"backward_lse_correction": 1e300}, "backward_lse_correction", "vanishes or saturates"),
            (DIRECT, {"margin": 1e300, "margin_unit": "raw_score"}, "margin", "to 65536"),
            (DIRECT, {"margin": "4"}, "margin", "a Python number"),
            (DIRECT, {"anchor_keys": 32.0}, "anchor_keys", "a Python int"),
            (DIRECT, {"v_channels_per_scale": 32.0}, "v_channels_per_scale", "a Python int"),
            (ONLINE, {"rescale_threshold_bits": "8"}, "rescale_threshold_bits", "a Python number"),
            (ONLINE, {"backward_p_lift_bits": 9}, "backward_p_lift_bits", "0 to 8"),
            (ONLINE, {"backward_p_lift_bits": -1}, "backward_p_lift_bits", "0 to 8"),
        ],
    )
    def test_fields_that_do_not_go_together_name_the_field_and_the_reason(self, base, changes, field, reason):
        with pytest.raises(ValueError, match=rf"Recipe\.{field}: expected .*{reason}"):
            dataclasses.replace(base, **changes)

    @pytest.mark.parametrize(
        "field",
        [
            "qk_format", "qk_scale_fold", "qk_tensor_scale", "qk_ties", "row_reference", "anchor_order", "margin_unit",
            "p_format", "denominator", "v_format", "backward", "backward_qk", "output_gradient_scale",
            "dq_accumulation",
        ],
    )  # fmt: skip
    def test_an_unknown_choice_lists_the_choices(self, field):
        with pytest.raises(ValueError, match=rf"Recipe\.{field}: expected one of \('.*'\), got 'typo'"):
            dataclasses.replace(ONLINE, **{field: "typo"})

    def test_positional_arguments_are_refused(self):
        with pytest.raises(TypeError):
            Recipe("name")


class TestIdentity:
    def test_the_name_enters_neither_equality_nor_hash(self):
        renamed = dataclasses.replace(recipes.train, name="other")
        assert renamed == recipes.train
        assert hash(renamed) == hash(recipes.train)

    def test_equal_recipes_compile_once(self):
        inputs = shapes.normal(Shape((1,), 4, 4, 1, 1, 64))
        shapes.forward(inputs, recipe=recipes.train)
        before = shapes._forward._cache_size()
        shapes.forward(inputs, recipe=dataclasses.replace(recipes.train, name="other"))
        assert shapes._forward._cache_size() == before

    def test_recipes_are_frozen(self):
        with pytest.raises(dataclasses.FrozenInstanceError):
            recipes.train.margin = 1


# One change of every field, on a recipe in which the field has a meaning.
FORWARD_CHANGES = {
    "qk_format": (ONLINE, {"qk_format": "bf16"}),
    "qk_tensor_scale": (ONLINE, {"qk_tensor_scale": "amax"}),
    "qk_ties": (ONLINE, {"qk_ties": "toward_zero"}),
    "row_reference": (DIRECT, {"row_reference": "zero", "margin": 0, "anchor_order": "leading"}),
    "anchor_keys": (dataclasses.replace(DIRECT, margin_unit="raw_score"), {"anchor_keys": 128}),
    "anchor_order": (DIRECT, {"anchor_order": "leading"}),
    "margin": (dataclasses.replace(DIRECT, margin_unit="raw_score"), {"margin": 20}),
    "margin_unit": (DIRECT, {"margin_unit": "raw_score"}),
    "rescale_threshold_bits": (ONLINE, {"rescale_threshold_bits": 8.0}),
    "p_format": (ONLINE, {"p_format": "bf16", "v_format": "bf16"}),
    "p_exponent_rule": (DIRECT, {"p_exponent_rule": "ceil"}),
    "p_tensor_scale": (NVFP4, {"p_tensor_scale": 1 / 2688}),
    "code_map": (DIRECT, {"code_map": uniform(Affine(1.5, 1.2))}),
    "denominator": (DIRECT, {"denominator": "unquantized"}),
    "v_format": (NVFP4, {"p_format": "e4m3", "v_format": "e4m3"}),
    "v_exponent_rule": (DIRECT, {"v_exponent_rule": 1.203125}),
    "v_channels_per_scale": (DIRECT, {"v_channels_per_scale": 32}),
    "v_multiplier": (ONLINE, {"v_multiplier": 512.0}),
}
BACKWARD_CHANGES = {
    "backward": (ONLINE, {"backward": "bf16"}),
    "backward_qk": (ONLINE, {"backward_qk": "represented"}),
    "backward_multiplier": (ONLINE, {"backward_multiplier": 512.0}),
    "backward_lse_correction": (ONLINE, {"backward_lse_correction": 0.1}),
    "backward_p_lift_bits": (ONLINE, {"backward_p_lift_bits": 0}),
    "output_gradient_scale": (ONLINE, {"output_gradient_scale": "unit"}),
    "dq_accumulation": (ONLINE, {"dq_accumulation": "bfloat16_per_tile"}),
}
SHAPE = Shape((1,), 20, 150, 1, 1, 64)


class TestEveryFieldMatters:
    def test_this_list_is_complete(self):
        elsewhere = {"qk_scale_fold", "p_scale_shift"}  # the next two tests
        assert {*FORWARD_CHANGES, *BACKWARD_CHANGES, *elsewhere} == set(FIELDS)

    @pytest.mark.parametrize("field", FORWARD_CHANGES)
    def test_changes_the_output(self, field):
        base, changes = FORWARD_CHANGES[field]
        # Keys that grow along the sequence move the online maximum; they are small to keep the shiftless form in range.
        inputs = shapes.normal(SHAPE)
        inputs.key[:, 128:] *= 3
        inputs.query[:, :, :, :16] = inputs.query[:, :, :, :16] / 512  # subnormal block scales
        one, other = (shapes.forward(inputs, recipe=r) for r in (base, dataclasses.replace(base, **changes)))
        assert (oracles.float64(one.output) != oracles.float64(other.output)).any()

    def test_scale_fold_changes_the_output(self):
        inputs = shapes.normal(Shape((1,), 20, 40, 1, 1, 128))
        one, other = (
            shapes.forward(inputs, recipe=dataclasses.replace(ONLINE, qk_scale_fold=fold))
            for fold in ("none", "k64_max")
        )
        assert (one.output != other.output).any()

    def test_scale_shift_makes_room_for_long_sums(self):
        # Two keys near the top of the scale byte.
        inputs = shapes.normal(Shape((1,), 1, 2, 1, 1, 64))
        bias = np.full((1, 1, 1, 1), 88.0, np.float32)
        one, other = (
            shapes.forward(
                inputs._replace(query=0 * inputs.query), bias, recipe=dataclasses.replace(recipes.fast, p_scale_shift=s)
            )
            for s in (16, 0)
        )
        assert np.isfinite(one.lse).all()
        assert np.isposinf(other.lse).all()

    @pytest.mark.parametrize("field", BACKWARD_CHANGES)
    def test_changes_a_gradient_and_not_the_output(self, field):
        base, changes = BACKWARD_CHANGES[field]
        inputs = shapes.normal(SHAPE)
        inputs = inputs._replace(d_output=inputs.d_output / 2**14, d_lse=inputs.d_lse / 2**14)
        one, other = (shapes.evaluate(inputs, recipe=r) for r in (base, dataclasses.replace(base, **changes)))
        np.testing.assert_array_equal(one.output, other.output)
        assert any((x != y).any() for x, y in zip(one[2:5], other[2:5], strict=True))

    def test_an_order_of_the_sums_changes_nothing_in_the_reference(self):
        """It adds in one order anyway."""
        inputs = shapes.normal(SHAPE)
        ordered = dataclasses.replace(recipes.train, dq_accumulation="float32_ordered")
        assert ordered != recipes.train
        results = (shapes.evaluate(inputs, recipe=recipe, is_causal=True) for recipe in (recipes.train, ordered))
        assert_same_bytes(*results)
