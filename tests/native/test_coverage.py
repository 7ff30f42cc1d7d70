import dataclasses
import re

import pytest

from jax_fp4attn import recipes
from jax_fp4attn.code_map import Affine, Cubic, Exponential, MaxAffine, SignedSquare, uniform, with_exponential
from jax_fp4attn.native import availability, calls, coverage, cross_compile, missing_kernel
from tests.native import pretended

QUANTIZE, TRAIN, FORWARD, ROWS, BACKWARD = "quantize", "quantize_for_training", "forward", "row_operands", "backward"


@pytest.fixture(autouse=True)
def _for_hopper():
    with cross_compile((9, 0)):
        yield


# Which steps have a kernel on Hopper at head sizes 64 and 128; at others none has.
STEPS_OF_RECIPES = {
    "accurate": (QUANTIZE, TRAIN, FORWARD, ROWS, BACKWARD),
    "accurate_raw_margin": (QUANTIZE, TRAIN, FORWARD, ROWS, BACKWARD),
    "balanced_raw_margin": (QUANTIZE, TRAIN, ROWS, BACKWARD),
    "bf16": (),
    "causal_mxfp4": (QUANTIZE, TRAIN, ROWS, BACKWARD),
    "causal_mxfp4_raw_margin": (QUANTIZE, TRAIN, ROWS, BACKWARD),
    "exact_map": (QUANTIZE, TRAIN, FORWARD, ROWS, BACKWARD),
    "fast": (QUANTIZE, TRAIN, FORWARD, ROWS, BACKWARD),
    "fast_video": (QUANTIZE, TRAIN, FORWARD, ROWS, BACKWARD),
    "fp8_pv": (QUANTIZE, TRAIN, FORWARD, ROWS, BACKWARD),
    "nvfp4_pv": (ROWS, BACKWARD),
    "nvfp4_pv_two_level": (ROWS, BACKWARD),
    "sampled_denominator": (QUANTIZE, TRAIN, ROWS, BACKWARD),
    "square": (QUANTIZE, TRAIN, FORWARD, ROWS, BACKWARD),
    "square_rte_v": (QUANTIZE, TRAIN, FORWARD, ROWS, BACKWARD),
    "train": (QUANTIZE, TRAIN, FORWARD, ROWS, BACKWARD),
    "train_unit_gradient_scale": (QUANTIZE, TRAIN, FORWARD, ROWS),
    "two_piece": (QUANTIZE, TRAIN, ROWS, BACKWARD),
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
        assert steps_with_kernels(recipe, 128) == (QUANTIZE, TRAIN, ROWS, BACKWARD)


@pytest.mark.parametrize("head_size", [2, 32, 62, 66, 80, 96, 126, 192, 256])
def test_other_head_sizes(head_size):
    for recipe in recipes.named().values():
        assert steps_with_kernels(recipe, head_size) == ()
    for step in (QUANTIZE, TRAIN, FORWARD, ROWS, BACKWARD):
        expected = f"there are kernels for head sizes 64 and 128, not {head_size}"
        assert missing_kernel(step, recipes.bf16, head_size) == expected


@pytest.mark.parametrize("step", ["partial_forward", "partial_gradients"])
def test_steps_to_come(step):
    expected = f"there is no kernel for the step '{step}' yet"
    assert missing_kernel(step, recipes.train, 128) == expected
    assert missing_kernel(step, recipes.bf16, 80) == expected


# Changes of `square`, whose values are MXFP4, and the steps that lose their kernel.
@pytest.mark.parametrize(
    ("changes", "steps"),
    [
        ({"qk_format": "bf16", "qk_scale_fold": "none"}, (QUANTIZE, TRAIN, FORWARD, BACKWARD)),
        ({"qk_tensor_scale": "amax"}, (QUANTIZE, TRAIN, FORWARD, BACKWARD)),
        ({"qk_scale_fold": "k64_max"}, (QUANTIZE, TRAIN)),
        ({"v_exponent_rule": "best_l2"}, (QUANTIZE, TRAIN)),
        # The nearest float32 is another number, and a kernel's parameter is a float32.
        ({"v_exponent_rule": 1.2}, (QUANTIZE, TRAIN)),
        ({"v_exponent_rule": 1 + 2**-24}, (QUANTIZE, TRAIN)),
        ({"backward_qk": "represented"}, (TRAIN, BACKWARD)),
        ({"backward": "bf16"}, (TRAIN, ROWS, BACKWARD)),
        ({"dq_accumulation": "bfloat16_per_tile"}, (BACKWARD,)),
        ({"p_exponent_rule": "ceil"}, (FORWARD,)),
        ({"denominator": "unquantized"}, (FORWARD,)),
        ({"denominator": "sampled"}, (FORWARD,)),
    ],
    ids=str,
)
def test_choices_without_a_kernel(changes, steps):
    recipe = dataclasses.replace(recipes.square, **changes)
    field, value = next(iter(changes.items()))
    for step in (QUANTIZE, TRAIN, FORWARD, ROWS, BACKWARD):
        expected = f"there is no kernel for {field}={value!r}" if step in steps else None
        for head_size in (64, 128):
            assert missing_kernel(step, recipe, head_size) == expected


@pytest.mark.parametrize("value_format", ["nvfp4", "bf16"])
def test_value_formats_without_a_kernel(value_format):
    recipe = dataclasses.replace(recipes.fp8_pv, p_format=value_format, v_format=value_format)
    for step in (QUANTIZE, TRAIN, FORWARD):
        assert missing_kernel(step, recipe, 64) == f"there is no kernel for v_format='{value_format}'"
    for step in (ROWS, BACKWARD):
        assert missing_kernel(step, recipe, 64) is None


class TestProbabilities:
    AFFINE = Affine(1.65, 0.8)
    MIXED = with_exponential(AFFINE, (1, 1, 1, 1))

    @pytest.mark.parametrize(
        ("base", "changes"),
        [
            (recipes.square, {"code_map": uniform(AFFINE)}),
            (recipes.square, {"code_map": uniform(SignedSquare(0.5, 0.4, 0.7))}),
            (recipes.square, {"code_map": uniform(Exponential(0.25))}),
            (recipes.square, {"p_exponent_rule": 1.203125, "p_scale_shift": 0}),
            (recipes.accurate, {"anchor_order": "leading", "margin": 3}),
            (recipes.train, {"rescale_threshold_bits": 0.0, "v_multiplier": 1.0}),
        ],
        ids=lambda x: getattr(x, "name", str(x)),
    )
    def test_with_a_kernel(self, base, changes):
        assert missing_kernel(FORWARD, dataclasses.replace(base, **changes), 64) is None

    @pytest.mark.parametrize(
        ("base", "code_map"),
        [
            (recipes.square, uniform(MaxAffine(((0.5, 0.9), (2.2, -0.9))))),
            (recipes.square, uniform(Cubic(0.1, 0.3, 0.6, 1.0))),
            (recipes.square, dataclasses.replace(uniform(AFFINE), quarters=(AFFINE,) * 3 + (Affine(1.5, 1.2),))),
            (recipes.square, MIXED),
            (recipes.accurate, uniform(AFFINE)),
            (recipes.accurate, with_exponential(SignedSquare(0.5, 0.4, 0.7), (1, 1, 1, 1))),
            (recipes.accurate, with_exponential(AFFINE, (2, 1, 1, 1))),
            (recipes.accurate, with_exponential(AFFINE, (1, 1, 1, 1), offset=0.5)),
            (recipes.accurate, with_exponential(AFFINE, (1, 1, 1, 1), query_tiles=(False, True))),
        ],
    )
    def test_code_maps_without_a_kernel(self, base, code_map):
        recipe = dataclasses.replace(base, code_map=code_map)
        where = "row_reference='zero'" if base is recipes.square else "32 anchor keys"
        expected = f"there is no kernel for code_map={code_map!r} with {where}"
        assert missing_kernel(FORWARD, recipe, 64) == expected

    def test_anchors_without_a_kernel(self):
        recipe = dataclasses.replace(recipes.accurate, anchor_keys=128)
        assert missing_kernel(FORWARD, recipe, 64) == "there is no kernel for anchor_keys=128"

    def test_denominators_without_a_kernel(self):
        recipe = dataclasses.replace(recipes.train, denominator="represented")
        assert missing_kernel(FORWARD, recipe, 64) == "there is no kernel for denominator='represented'"


class TestOtherGpus:
    @pytest.mark.parametrize("capability", [(10, 0), (10, 3)], ids=str)
    def test_steps_for_hopper_alone(self, capability):
        with cross_compile(capability):
            assert steps_with_kernels(recipes.train, 128) == (QUANTIZE, TRAIN, FORWARD, ROWS)
            expected = f"there is no kernel for the step 'backward' on compute capability 10.{capability[1]} yet"
            assert missing_kernel(BACKWARD, recipes.train, 128) == expected
            assert missing_kernel(BACKWARD, recipes.bf16, 80) == expected

    @pytest.mark.parametrize("capability", [(10, 0), (10, 3)], ids=str)
    def test_the_forward_on_blackwell(self, capability):
        with cross_compile(capability):
            for head_size in (64, 128):
                for name, recipe in recipes.named().items():
                    assert (missing_kernel(FORWARD, recipe, head_size) is None) == (FORWARD in STEPS_OF_RECIPES[name])
                for recipe in (recipes.guarded(10, 16), recipes.guarded_raw_margin(5, 8)):
                    assert missing_kernel(FORWARD, recipe, head_size) is None

    @pytest.mark.parametrize(
        ("changes", "expected"),
        [
            ({"anchor_keys": 32}, "there is no kernel for code_map=.* with 32 anchor keys"),
            ({"code_map": TestProbabilities.MIXED}, "there is no kernel for code_map=.* with 128 anchor keys"),
        ],
        ids=["anchor_keys", "code_map"],
    )
    def test_anchors_without_a_kernel_on_blackwell(self, changes, expected):
        recipe = dataclasses.replace(recipes.guarded(10, 16), **changes)
        with cross_compile((10, 0)):
            assert re.fullmatch(expected, missing_kernel(FORWARD, recipe, 64))

    def test_a_recipe_for_some_of_the_gpus_of_the_process(self, monkeypatch):
        recipe = recipes.guarded(10, 16)
        with availability._cross_compiling(None):
            pretended.set_gpus(monkeypatch, "9.0", "10.0")
            assert missing_kernel(FORWARD, recipe, 64) == "there is no kernel for anchor_keys=128"
            pretended.set_gpus(monkeypatch, "10.3", "10.0")
            assert missing_kernel(FORWARD, recipe, 64) is None

    @pytest.mark.parametrize(
        ("gpus", "lacking"),
        [
            ((), None),
            (("9.0",), None),
            (("9.0", "9.0"), None),
            (("9.0", "10.3"), "10.3"),
            (("10.3", "10.0"), "10.0"),
            # Where no kernel runs at all.
            (("8.9",), None),
        ],
        ids=str,
    )
    def test_one_program_is_for_all_gpus_of_the_process(self, gpus, lacking, monkeypatch):
        pretended.set_gpus(monkeypatch, *gpus)
        expected = lacking and f"there is no kernel for the step 'backward' on compute capability {lacking} yet"
        with availability._cross_compiling(None):
            assert missing_kernel(BACKWARD, recipes.train, 64) == expected
            assert missing_kernel(FORWARD, recipes.train, 64) is None
            assert missing_kernel(ROWS, recipes.train, 64) is None


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
        {"dq_accumulation": "float32_ordered"},
    ],
    ids=str,
)
def test_choices_with_a_kernel(changes):
    recipe = dataclasses.replace(recipes.square, **changes)
    assert steps_with_kernels(recipe, 64) == (QUANTIZE, TRAIN, FORWARD, ROWS, BACKWARD)


def test_the_first_obstacle_is_told():
    recipe = dataclasses.replace(recipes.bf16, backward_qk="represented")
    assert missing_kernel(TRAIN, recipe, 64) == "there is no kernel for qk_format='bf16'"
    recipe = dataclasses.replace(recipes.train, backward="bf16", backward_qk="represented")
    assert missing_kernel(TRAIN, recipe, 64) == "there is no kernel for backward='bf16'"


def test_every_step_is_one_that_is_called():
    assert set(calls.STEPS) >= coverage.STEPS_WITH_KERNELS >= coverage.STEPS_FOR_HOPPER_ALONE
    with pytest.raises(AssertionError, match="quantise"):
        missing_kernel("quantise", recipes.train, 64)


def test_the_rule_of_mxfp4_values_does_not_matter_to_others():
    recipe = dataclasses.replace(recipes.train, v_exponent_rule="best_l2")
    assert missing_kernel("quantize", recipe, 128) is None


@pytest.mark.parametrize("step", [QUANTIZE, TRAIN, FORWARD, ROWS, BACKWARD])
def test_batches_that_fit_the_grid(step):
    assert missing_kernel(step, recipes.train, 64, 65535) is None
    assert missing_kernel(step, recipes.train, 64, 65536) == "there are kernels for batches of at most 65535, not 65536"
