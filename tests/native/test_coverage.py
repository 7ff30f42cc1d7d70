import dataclasses

import pytest

from jax_fp4attn import recipes
from jax_fp4attn.native import calls, coverage, missing_kernel

QUANTIZE, TRAIN, ROWS = "quantize", "quantize_for_training", "row_operands"

# Which steps have a kernel at head sizes 64 and 128; at others none has.
STEPS_OF_RECIPES = {
    "accurate": (QUANTIZE, TRAIN, ROWS),
    "accurate_raw_margin": (QUANTIZE, TRAIN, ROWS),
    "balanced_raw_margin": (QUANTIZE, TRAIN, ROWS),
    "bf16": (),
    "causal_mxfp4": (QUANTIZE, TRAIN, ROWS),
    "causal_mxfp4_raw_margin": (QUANTIZE, TRAIN, ROWS),
    "exact_map": (QUANTIZE, TRAIN, ROWS),
    "fast": (QUANTIZE, TRAIN, ROWS),
    "fast_video": (QUANTIZE, TRAIN, ROWS),
    "fp8_pv": (QUANTIZE, TRAIN, ROWS),
    "nvfp4_pv": (ROWS,),
    "nvfp4_pv_two_level": (ROWS,),
    "sampled_denominator": (QUANTIZE, TRAIN, ROWS),
    "square": (QUANTIZE, TRAIN, ROWS),
    "square_rte_v": (QUANTIZE, TRAIN, ROWS),
    "train": (QUANTIZE, TRAIN, ROWS),
    "train_unit_gradient_scale": (QUANTIZE, TRAIN, ROWS),
    "two_piece": (QUANTIZE, TRAIN, ROWS),
}


def steps_with_kernels(recipe, head_size):
    return tuple(step for step in calls.STEPS if missing_kernel(step, recipe, head_size) is None)


def test_every_named_recipe():
    for head_size in (64, 128):
        assert {
            name: steps_with_kernels(recipe, head_size) for name, recipe in recipes.named().items()
        } == STEPS_OF_RECIPES


def test_recipes_with_parameters():
    for recipe in (recipes.guarded(10, 16), recipes.guarded_raw_margin(5, 8)):
        assert steps_with_kernels(recipe, 128) == (QUANTIZE, TRAIN, ROWS)


@pytest.mark.parametrize("head_size", [2, 32, 62, 66, 80, 96, 126, 192, 256])
def test_other_head_sizes(head_size):
    for recipe in recipes.named().values():
        assert steps_with_kernels(recipe, head_size) == ()
    for step in (QUANTIZE, TRAIN, ROWS):
        expected = f"there are kernels for head sizes 64 and 128, not {head_size}"
        assert missing_kernel(step, recipes.bf16, head_size) == expected


@pytest.mark.parametrize("step", ["forward", "partial_forward", "backward", "partial_gradients"])
def test_steps_to_come(step):
    expected = f"there is no kernel for the step '{step}' yet"
    assert missing_kernel(step, recipes.train, 128) == expected
    assert missing_kernel(step, recipes.bf16, 80) == expected


# Changes of `square`, whose values are MXFP4, and the steps that lose their kernel.
@pytest.mark.parametrize(
    ("changes", "steps"),
    [
        ({"qk_format": "bf16", "qk_scale_fold": "none"}, (QUANTIZE, TRAIN)),
        ({"qk_tensor_scale": "amax"}, (QUANTIZE, TRAIN)),
        ({"qk_scale_fold": "k64_max"}, (QUANTIZE, TRAIN)),
        ({"v_exponent_rule": "best_l2"}, (QUANTIZE, TRAIN)),
        # The nearest float32 is another number, and a kernel's parameter is a float32.
        ({"v_exponent_rule": 1.2}, (QUANTIZE, TRAIN)),
        ({"v_exponent_rule": 1 + 2**-24}, (QUANTIZE, TRAIN)),
        ({"backward_qk": "represented"}, (TRAIN,)),
        ({"backward": "bf16"}, (TRAIN, ROWS)),
    ],
    ids=str,
)
def test_choices_without_a_kernel(changes, steps):
    recipe = dataclasses.replace(recipes.square, **changes)
    field, value = next(iter(changes.items()))
    for step in (QUANTIZE, TRAIN, ROWS):
        expected = f"there is no kernel for {field}={value!r}" if step in steps else None
        for head_size in (64, 128):
            assert missing_kernel(step, recipe, head_size) == expected


@pytest.mark.parametrize("value_format", ["nvfp4", "bf16"])
def test_value_formats_without_a_kernel(value_format):
    recipe = dataclasses.replace(recipes.fp8_pv, p_format=value_format, v_format=value_format)
    for step in (QUANTIZE, TRAIN):
        assert missing_kernel(step, recipe, 64) == f"there is no kernel for v_format='{value_format}'"
    assert missing_kernel(ROWS, recipe, 64) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"v_exponent_rule": "floor"},
        {"v_exponent_rule": "ceil"},
        {"v_exponent_rule": "rte"},
        {"v_exponent_rule": 1 + 2**-23},
        {"v_channels_per_scale": 32},
        {"qk_ties": "even"},
        {"qk_scale_fold": "none"},
        {"backward_multiplier": 16.0},
        {"output_gradient_scale": "unit"},
    ],
    ids=str,
)
def test_choices_with_a_kernel(changes):
    assert steps_with_kernels(dataclasses.replace(recipes.square, **changes), 64) == (QUANTIZE, TRAIN, ROWS)


def test_the_first_obstacle_is_told():
    recipe = dataclasses.replace(recipes.bf16, backward_qk="represented")
    assert missing_kernel(TRAIN, recipe, 64) == "there is no kernel for qk_format='bf16'"
    recipe = dataclasses.replace(recipes.train, backward="bf16", backward_qk="represented")
    assert missing_kernel(TRAIN, recipe, 64) == "there is no kernel for backward='bf16'"


def test_every_step_is_one_that_is_called():
    assert set(calls.STEPS) >= coverage.STEPS_WITH_KERNELS
    with pytest.raises(AssertionError, match="quantise"):
        missing_kernel("quantise", recipes.train, 64)


def test_the_rule_of_mxfp4_values_does_not_matter_to_others():
    recipe = dataclasses.replace(recipes.train, v_exponent_rule="best_l2")
    assert missing_kernel("quantize", recipe, 128) is None


@pytest.mark.parametrize("step", [QUANTIZE, TRAIN, ROWS])
def test_batches_that_fit_the_grid(step):
    assert missing_kernel(step, recipes.train, 64, 65535) is None
    assert missing_kernel(step, recipes.train, 64, 65536) == "there are kernels for batches of at most 65535, not 65536"
