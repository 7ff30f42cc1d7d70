"""Which steps of a program for CUDA are custom calls and which are the reference, with the kernels that there are."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import jax_fp4attn
from jax_fp4attn import recipes, steps
from jax_fp4attn.config import ContextParallelism, OperatorConfig, Visibility
from jax_fp4attn.formats import BlockScaled
from jax_fp4attn.reference.tiles import key_order
from tests import kernels, meshes
from tests.assertions import assert_same_bytes
from tests.custom_calls import calls, lower, targets
from tests.meshes import gradients, one_device

QUANTIZE, TRAIN = "jax_fp4attn_quantize_v1", "jax_fp4attn_quantize_for_training_v1"
FORWARD, ROW_OPERANDS = "jax_fp4attn_forward_v1", "jax_fp4attn_row_operands_v1"
BACKWARD = "jax_fp4attn_backward_v1"
HOPPER, BLACKWELL = (9, 0), (10, 0)

REPRESENTED = dataclasses.replace(recipes.train, name="represented", backward_qk="represented")
BEST_L2 = dataclasses.replace(recipes.square, name="best_l2", v_exponent_rule="best_l2")


def shaped(head_size=64, dtype=jnp.bfloat16, *, num_keys=40):
    """Query, key, value and the output's cotangent."""
    shapes = [(2, length, heads, head_size) for length, heads in ((40, 4), (num_keys, 2), (num_keys, 2), (40, 4))]
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]


def attend(recipe=recipes.train, implementation=None):
    return functools.partial(jax_fp4attn.attention, is_causal=True, recipe=recipe, implementation=implementation)


def forward_and_backward(recipe, head_size, capability):
    """Targets of the forward alone, and of the forward with the backward."""
    *inputs, d_out = shaped(head_size)
    programs = (
        lower(attend(recipe), *inputs, capability=capability),
        lower(gradients(attend(recipe)), *inputs, d_out, capability=capability),
    )
    return tuple(targets(program) for program in programs)


class TestWithoutAName:
    @pytest.mark.parametrize(
        ("recipe", "head_size", "forward", "backward"),
        [
            (recipes.train, 64, [QUANTIZE, FORWARD], [TRAIN, FORWARD, ROW_OPERANDS, BACKWARD]),
            (recipes.train, 128, [QUANTIZE, FORWARD], [TRAIN, FORWARD, ROW_OPERANDS, BACKWARD]),
            (recipes.square, 128, [QUANTIZE, FORWARD], [TRAIN, FORWARD, ROW_OPERANDS, BACKWARD]),
            (recipes.accurate, 64, [QUANTIZE, FORWARD], [TRAIN, FORWARD, ROW_OPERANDS, BACKWARD]),
            (recipes.two_piece, 64, [QUANTIZE], [TRAIN, ROW_OPERANDS, BACKWARD]),
            (recipes.train_unit_gradient_scale, 64, [QUANTIZE, FORWARD], [TRAIN, FORWARD, ROW_OPERANDS]),
            (REPRESENTED, 64, [QUANTIZE, FORWARD], [FORWARD, ROW_OPERANDS]),
            (BEST_L2, 64, [FORWARD], [FORWARD, ROW_OPERANDS, BACKWARD]),
            (recipes.nvfp4_pv, 64, [], [ROW_OPERANDS, BACKWARD]),
            (recipes.bf16, 64, [], []),
            (recipes.train, 80, [], []),
            (recipes.train, 256, [], []),
        ],
        ids=lambda x: getattr(x, "name", x) if not isinstance(x, list) else "",
    )
    def test_steps_with_a_kernel_are_custom_calls(self, recipe, head_size, forward, backward):
        assert forward_and_backward(recipe, head_size, HOPPER) == (forward, backward)
        for_both = [target for target in backward if target != BACKWARD]
        assert forward_and_backward(recipe, head_size, BLACKWELL) == (forward, for_both)

    def test_recipes_with_a_kernel_on_blackwell_alone(self):
        recipe = recipes.guarded(10, 16)
        assert forward_and_backward(recipe, 64, HOPPER)[0] == [QUANTIZE]
        assert forward_and_backward(recipe, 64, BLACKWELL)[0] == [QUANTIZE, FORWARD]

    def test_batches_beyond_the_grid_are_the_reference(self):
        x = jax.ShapeDtypeStruct((65536, 1, 1, 64), jnp.bfloat16)
        assert targets(lower(attend(), x, x, x)) == []

    def test_other_steps_are_the_reference(self):
        arguments = shaped()
        program = lower(gradients(attend()), *arguments)
        assert "dot_general" in program
        with kernels.for_every_step():
            program = lower(gradients(attend()), *arguments)
        assert "dot_general" not in program

    @pytest.mark.parametrize("recipe", [recipes.train, recipes.accurate], ids=lambda recipe: recipe.name)
    def test_other_platforms_run_the_reference(self, recipe):
        inputs = meshes.random_inputs(1, 40, 2, 1, 64)
        expected = one_device(gradients(attend(recipe, "reference")), *inputs)
        with jax_fp4attn.cross_compile((9, 0)):
            actual = one_device(gradients(attend(recipe)), *inputs)
        meshes.assert_equal(actual, expected)

    def test_a_program_for_several_platforms_has_both(self):
        query, key, value, _ = shaped()
        program = lower(attend(), query, key, value, platforms=("cpu", "cuda"))
        assert targets(program) == [QUANTIZE, FORWARD]
        only_cuda = lower(attend(), query, key, value)
        only_cpu = lower(attend(), query, key, value, platforms=("cpu",))
        assert targets(only_cpu) == []
        assert len(program) > max(len(only_cuda), len(only_cpu))


class TestInsistedOn:
    def refuses(self, function, *arguments, reason):
        with pytest.raises(NotImplementedError, match=f"^implementation: cuda: {re.escape(reason)}"):
            lower(function, *arguments)

    def test_a_step_without_a_kernel_on_blackwell(self):
        reason = "there is no kernel for the step 'backward' on compute capability 10.0 yet"
        self.refuses(gradients(attend(implementation="cuda")), *shaped(), reason=reason)

    def test_on_blackwell_the_forward_is_kernels(self):
        *inputs, _ = shaped()
        program = lower(attend(implementation="cuda"), *inputs, capability=BLACKWELL)
        assert targets(program) == [QUANTIZE, FORWARD]
        assert "dot_general" not in program

    def test_on_hopper_everything_is_kernels(self):
        *inputs, d_out = shaped()
        forward = lower(attend(implementation="cuda"), *inputs, capability=HOPPER)
        backward = lower(gradients(attend(implementation="cuda")), *inputs, d_out, capability=HOPPER)
        assert targets(forward) == [QUANTIZE, FORWARD]
        assert targets(backward) == [TRAIN, FORWARD, ROW_OPERANDS, BACKWARD]
        assert "dot_general" not in forward + backward

    @pytest.mark.parametrize(
        ("recipe", "head_size", "reason"),
        [
            (recipes.train, 80, "there are kernels for head sizes 64 and 128, not 80"),
            (recipes.bf16, 64, "there is no kernel for qk_format='bf16'"),
            (recipes.nvfp4_pv, 64, "there is no kernel for v_format='nvfp4'"),
            (BEST_L2, 128, "there is no kernel for v_exponent_rule='best_l2'"),
        ],
        ids=lambda x: getattr(x, "name", ""),
    )
    def test_a_choice_without_a_kernel(self, recipe, head_size, reason):
        *inputs, _ = shaped(head_size)
        self.refuses(attend(recipe, "cuda"), *inputs, reason=reason)

    @pytest.mark.parametrize("lacking", ["row_operands", "backward"])
    def test_a_step_of_the_backward_without_a_kernel(self, lacking):
        existing = {"quantize", "quantize_for_training", "forward", "row_operands", "backward"} - {lacking}
        *inputs, d_out = shaped()
        with kernels.for_steps(*existing):
            assert targets(lower(attend(implementation="cuda"), *inputs)) == [QUANTIZE, FORWARD]
            function = gradients(attend(implementation="cuda"))
            self.refuses(function, *inputs, d_out, reason=f"there is no kernel for the step '{lacking}' yet; use None")

    def test_a_choice_of_the_backward_without_a_kernel(self):
        *inputs, d_out = shaped()
        with kernels.for_steps("quantize", "quantize_for_training", "forward", "row_operands", "backward"):
            assert targets(lower(attend(REPRESENTED, "cuda"), *inputs)) == [QUANTIZE, FORWARD]
            reason = "there is no kernel for backward_qk='represented'; use None or 'reference'"
            self.refuses(gradients(attend(REPRESENTED, "cuda")), *inputs, d_out, reason=reason)


class TestOperands:
    def test_float32_inputs_are_rounded_before(self):
        (_, _, operands, results), _, rows = calls(lower(gradients(attend()), *shaped(dtype=jnp.float32)))
        assert operands == ["2x40x4x64xbf16", "2x40x2x64xbf16", "2x40x2x64xbf16"]
        assert rows[2] == ["2x40x4x64xbf16", "2x4x40xf32", "2x40x4x64xbf16", "2x4x40xf32", "2x2xf32"]
        assert (operands, results) == calls(lower(gradients(attend()), *shaped()))[0][2:]

    def test_types_do_not_depend_on_the_width_of_numbers(self):
        for recipe in (recipes.train, recipes.accurate):
            narrow = calls(lower(gradients(attend(recipe)), *shaped(), capability=HOPPER))
            with jax.enable_x64(True):
                wide = calls(lower(gradients(attend(recipe)), *shaped(), capability=HOPPER))
            assert wide == narrow

    @pytest.mark.parametrize(
        "recipe",
        [recipes.accurate, recipes.balanced_raw_margin, recipes.guarded(10, 16)],
        ids=lambda recipe: recipe.name,
    )
    @pytest.mark.parametrize("num_keys", [40, 90])
    def test_a_strided_anchor_takes_the_key_of_each_slot(self, num_keys, recipe):
        *inputs, d_out = shaped(num_keys=num_keys)
        for function, arguments in ((attend(recipe), inputs), (gradients(attend(recipe)), [*inputs, d_out])):
            program = lower(function, *arguments)
            _, _, operands, _ = calls(program)[0]
            assert operands[3:] == [f"{num_keys}xi32"]
            assert last_operand_of_first_call(program) == key_order(recipe, num_keys).tolist()

    @pytest.mark.parametrize("capability", [HOPPER, BLACKWELL], ids=str)
    def test_the_forward_takes_the_key_of_each_slot_too(self, capability):
        *inputs, _ = shaped(num_keys=90)
        (_, _, _, quantized), (target, _, operands, _) = calls(
            lower(attend(recipes.accurate), *inputs, capability=capability)
        )
        assert (target, operands) == (FORWARD, [*quantized, "90xi32"])

    @pytest.mark.parametrize(
        "recipe", [recipes.train, recipes.square, recipes.causal_mxfp4], ids=lambda recipe: recipe.name
    )
    def test_keys_in_order_need_no_slots(self, recipe):
        *inputs, _ = shaped()
        (_, _, operands, quantized), *forward = calls(lower(attend(recipe), *inputs))
        assert len(operands) == 3
        assert all(call[2] == quantized for call in forward)


def last_operand_of_first_call(program):
    before, name = re.search(r"(.*?)custom_call @jax_fp4attn_\w+\([^)]*(%\w+)\)", program, re.DOTALL).groups()
    *_, values = re.findall(rf"{name} = stablehlo\.constant dense<\[([\d, ]+)\]>", before)
    return [int(value) for value in values.split(", ")]


class TestSplitSequence:
    """Scales are in rows between the steps, and in pages in the custom calls."""

    def config(self, recipe, *, is_split=True):
        context = ContextParallelism("x", "contiguous") if is_split else None
        return OperatorConfig(recipe, 0.125, True, None, context, "cuda or reference")

    def quantize(self, step, config, inputs):
        with jax_fp4attn.cross_compile((10, 0)):
            return jax.jit(lambda *x: step(config, *x, Visibility()))(*inputs)

    @pytest.mark.parametrize("name", ["quantize", "quantize_for_training"])
    @pytest.mark.parametrize("recipe", [recipes.train, recipes.square], ids=lambda recipe: recipe.name)
    def test_scales_return_in_rows(self, recipe, name):
        *inputs, _ = meshes.random_inputs(1, 200, 2, 1, 64)
        step = getattr(steps, name)
        split, whole = (self.quantize(step, self.config(recipe, is_split=x), inputs) for x in (True, False))
        if name == "quantize_for_training":
            split, whole = split.forward, whole.forward
        assert (split.query.scale_layout, whole.query.scale_layout) == ("rows", "pages")
        assert (split.query.scales.shape, whole.query.scales.shape) == ((1, 2, 200, 4), (1, 2, 2, 1, 512))
        assert (split.key.scales.shape, whole.key.scales.shape) == ((1, 1, 256, 4), (1, 1, 2, 1, 512))
        if recipe is recipes.square:
            assert (split.value.scales.shape, whole.value.scales.shape) == ((1, 1, 64, 8), (1, 1, 1, 2, 512))
        assert_same_bytes(split, jax.tree.map(in_rows, whole, is_leaf=is_block_scaled))

    @pytest.fixture
    def mesh(self, cpu_devices):
        return Mesh(np.array(cpu_devices[:2]), ("x",), axis_types=(AxisType.Auto,))

    def test_a_ring_with_the_kernels_that_there_are(self, mesh):
        spec = P(None, "x")
        function = functools.partial(attend(recipes.square), context_axis="x")
        mapped = jax.shard_map(gradients(function), mesh=mesh, in_specs=(spec,) * 4, out_specs=(spec,) * 4)
        inputs = [jax.ShapeDtypeStruct((2, 256, heads, 64), jnp.bfloat16) for heads in (4, 2, 2, 4)]
        (target, _, _, results), (other_target, _, _, _) = calls(lower(mapped, *inputs))
        assert (target, other_target) == (TRAIN, ROW_OPERANDS)
        pages = ["2x4x1x1x512xui8", "2x2x1x1x512xui8", "2x2x1x1x512xui8"]
        assert results[1:6:2] == pages

    @pytest.mark.parametrize(
        ("tensor_scale", "sequence_axis", "expected"),
        [("unit", "x", [QUANTIZE]), ("amax", "x", []), ("amax", None, [QUANTIZE])],
    )
    def test_a_maximum_over_shards_is_taken_by_the_reference(self, tensor_scale, sequence_axis, expected, mesh):
        config = self.config(dataclasses.replace(recipes.train, qk_tensor_scale=tensor_scale))

        def codes(*inputs):
            return steps.quantize(config, *inputs, Visibility(), sequence_axis=sequence_axis).query.codes

        mapped = jax.shard_map(codes, mesh=mesh, in_specs=P(None, "x"), out_specs=P(None, None, "x"))
        inputs = [jax.ShapeDtypeStruct((2, 256, 2, 64), jnp.bfloat16)] * 3
        with kernels.for_every_step():
            assert targets(lower(mapped, *inputs)) == expected


def is_block_scaled(x):
    return isinstance(x, BlockScaled)


def in_rows(x):
    return x.in_rows() if is_block_scaled(x) else x
