"""Custom calls in programs lowered for CUDA, on a machine without a GPU."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_fp4attn
from jax_fp4attn import SegmentIds, checkpoint_policies, recipes
from jax_fp4attn.native import availability
from tests import meshes
from tests.custom_calls import calls, lower, targets
from tests.meshes import gradients, one_device

pytestmark = pytest.mark.usefixtures("every_step_has_a_kernel")

QUERY, KEY = (2, 40, 4, 64), (2, 40, 2, 64)
LONG = (QUERY, (2, 200, 2, 64), (2, 200, 2, 64))


def shaped(*shapes):
    return [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]


def attend(*operands, **options):
    return jax_fp4attn.attention(*operands, **{"is_causal": True, "implementation": "cuda", **options})


def equations(jaxpr):
    """All equations, those of inner programs among them."""
    for equation in jaxpr.eqns:
        yield equation
        for parameter in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "jaxpr")):
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


class TestOneDevice:
    @pytest.fixture(scope="class")
    @classmethod
    def forward(cls, every_step_has_a_kernel):
        return calls(lower(attend, *shaped(QUERY, KEY, KEY)))

    def test_targets_of_the_forward(self, forward):
        assert [call[0] for call in forward] == ["jax_fp4attn_quantize_v1", "jax_fp4attn_forward_v1"]

    def test_operands_and_results(self, forward):
        (_, _, operands, results), (_, _, forward_operands, forward_results) = forward
        assert operands == ["2x40x4x64xbf16", "2x40x2x64xbf16", "2x40x2x64xbf16"]
        # Codes and pages of scales of query and key, padded to tiles of 128 keys, and E4M3 values along their keys.
        assert results == [
            "2x4x40x32xui8",
            "2x4x1x1x512xui8",
            "2x2x128x32xui8",
            "2x2x1x1x512xui8",
            "2x2x64x128xui8",
        ]
        assert forward_operands == results
        assert forward_results == ["2x40x4x64xbf16", "2x4x40xf32"]

    HOPPER, BLACKWELL = (9, 0), (10, 3)
    EXPANDED_KEY = "2x2x256x64xf16"
    EXPANDED_VALUE = ("2x2x64x256xui8", "2x2x2xi32")  # and the exponents of its tiles
    ITEMS_TAKEN = "1xi32"
    ORDERED_KEY = ("2x2x256x32xui8", "2x2x2x1x512xui8")

    @pytest.mark.parametrize(
        ("recipe", "gpus", "memory"),
        [
            (recipes.train, (HOPPER,), [EXPANDED_KEY, ITEMS_TAKEN]),
            (recipes.train, (BLACKWELL,), []),
            (recipes.train, (HOPPER, BLACKWELL), [EXPANDED_KEY, ITEMS_TAKEN]),
            (recipes.square, (HOPPER,), [EXPANDED_KEY, *EXPANDED_VALUE, ITEMS_TAKEN]),
            (recipes.square, (BLACKWELL,), []),
            (recipes.accurate, (HOPPER,), [EXPANDED_KEY, *EXPANDED_VALUE, ITEMS_TAKEN]),
            (recipes.accurate, (BLACKWELL,), [*ORDERED_KEY]),
            (recipes.accurate, (HOPPER, BLACKWELL), [EXPANDED_KEY, *EXPANDED_VALUE, ITEMS_TAKEN, *ORDERED_KEY]),
        ],
        ids=lambda x: getattr(x, "name", str(x)),
    )
    def test_memory_of_the_forward(self, recipe, gpus, memory, monkeypatch):
        monkeypatch.setattr(availability, "capabilities", lambda: set(gpus))
        jax.clear_caches()
        _, (_, attributes, _, results) = calls(lower(functools.partial(attend, recipe=recipe), *shaped(*LONG)))
        assert results[2:] == memory
        present = [attributes[name] == "true" for name in ("has_expanded_operands", "has_ordered_key")]
        assert present == [self.EXPANDED_KEY in memory, self.ORDERED_KEY[0] in memory]

    @pytest.mark.parametrize("recipe", [recipes.train, recipes.square], ids=lambda recipe: recipe.name)
    def test_callers_do_not_see_the_memory(self, recipe):
        with jax_fp4attn.cross_compile((9, 0)):
            output = jax.eval_shape(functools.partial(attend, recipe=recipe), *shaped(QUERY, KEY, KEY))
        assert (output.shape, output.dtype) == (QUERY, jnp.bfloat16)

    def test_attributes(self, forward):
        attributes = forward[1][1]
        assert float(attributes["scale"]) == 0.125
        assert attributes["is_causal"] == "true"
        assert (attributes["window_left"], attributes["window_right"]) == ("-1", "-1")
        assert (attributes["num_keys"], attributes["head_size"]) == ("40", "64")
        assert attributes["recipe_p_format"] == "e4m3"
        assert float(attributes["recipe_rescale_threshold_bits"]) == 8
        assert attributes["has_segment_ids"] == "false"

    def test_restrictions_are_operands(self):
        lengths = jax.ShapeDtypeStruct((2,), jnp.int32)
        segments = jax.ShapeDtypeStruct((2, 40), jnp.int32)

        def function(query, key, value, lengths, segments):
            return attend(
                query,
                key,
                value,
                is_causal=False,
                local_window_size=(7, 3),
                key_value_seq_lengths=lengths,
                segment_ids=SegmentIds(segments, segments),
            )

        (_, _, operands, _), (_, attributes, _, _) = calls(lower(function, *shaped(QUERY, KEY, KEY), lengths, segments))
        assert operands[3:] == ["2xi32", "2x40xi32", "2x40xi32"]
        assert (attributes["window_left"], attributes["window_right"]) == ("7", "3")
        present = [name for name, value in attributes.items() if name.startswith("has_") and value == "true"]
        assert sorted(present) == ["has_key_lengths", "has_segment_ids"]
        assert attributes["recipe_code_map"] == "signedsquare(0.64,0.39,0.68)"

    def test_bfloat16_is_not_rounded_again(self):
        """XLA would do it, and write a copy of each array that a call takes; the amax of dO is rounded when found."""
        program = lower(gradients(attend), *shaped(QUERY, KEY, KEY, QUERY))
        rounded = re.findall(r"reduce_precision.*tensor<(\w+)>", program)
        assert rounded == ["2x40x4xf32"]

    def test_targets_of_the_gradient(self):
        program = calls(lower(gradients(attend), *shaped(QUERY, KEY, KEY, QUERY)))
        assert [call[0].removeprefix("jax_fp4attn_") for call in program] == [
            "quantize_for_training_v1",
            "forward_v1",
            "row_operands_v1",
            "backward_v1",
        ]
        quantize, forward, row_operands, backward = ((operands, results) for _, _, operands, results in program)
        inputs, gradient = ["2x40x4x64xbf16", "2x40x2x64xbf16", "2x40x2x64xbf16"], "2x40x4x64xbf16"
        scores = ["2x4x40x32xui8", "2x4x1x1x512xui8", "2x2x128x32xui8", "2x2x1x1x512xui8"]
        e4m3 = ["2x4x64x128xui8", "2x2x64x128xui8", "2x2x128x64xui8"]
        lse, gradient_scale = "2x4x40xf32", "2x2xf32"
        assert quantize == (inputs, [*scores, "2x2x64x128xui8", *e4m3])
        assert forward[0] == [*scores, "2x2x64x128xui8"]
        rows = ["2x4x128x64xui8", "2x4x64x128xui8", "2x4x40xf32"]
        assert row_operands == (["2x40x4x64xbf16", lse, gradient, lse, gradient_scale], rows)
        # Query and key expanded, two numbers of each row, and the sums of dQ.
        memory = ["2x4x128x64xf16", "2x2x128x64xf16", "2x4x2x2x64xf32", "2x4x128x64xf32"]
        assert backward == ([*scores, *e4m3, *rows, lse, gradient_scale], [*inputs, *memory])
        attributes = program[3][1]
        assert (attributes["num_keys"], attributes["head_size"]) == ("40", "64")

    def test_calls_of_scanned_layers_under_remat(self):
        def loss(x):
            def layer(x, _):
                return x + attend(x, x, x), None

            body = jax.checkpoint(layer, policy=checkpoint_policies.save_attention)
            return jnp.sum(jax.lax.scan(body, x, None, length=3)[0].astype(jnp.float32))

        found = targets(lower(jax.grad(loss), *shaped((1, 8, 2, 64))))
        assert found.count("jax_fp4attn_forward_v1") == 1
        assert found.count("jax_fp4attn_backward_v1") == 1

    def test_a_mapped_axis_is_one_call_with_a_larger_batch(self):
        (_, _, operands, _), _ = calls(lower(jax.vmap(attend), *shaped((3, *QUERY), (3, *KEY), (3, *KEY))))
        assert operands[0] == "6x40x4x64xbf16"


class TestPlatforms:
    def test_without_a_name_other_platforms_run_the_reference(self):
        query, key, value, d_out = meshes.random_inputs(2, 40, 4, 2, 64)
        run = gradients(lambda *x: jax_fp4attn.attention(*x, is_causal=True))
        expected = one_device(run, query, key, value, d_out)
        with jax_fp4attn.cross_compile((9, 0)):
            actual = one_device(run, query, key, value, d_out)
        meshes.assert_equal(actual, expected)

    def test_a_named_implementation_never_falls_back(self):
        with jax_fp4attn.cross_compile((9, 0)), pytest.raises(NotImplementedError, match="cpu"):
            jax.jit(attend).lower(*shaped(QUERY, KEY, KEY))

    @pytest.mark.parametrize("name", ["bias", "mask"])
    def test_dense_arguments_are_refused(self, name):
        x = jnp.ones(QUERY, jnp.bfloat16)
        dense = jnp.ones((1, 1, 40, 40), jnp.float32 if name == "bias" else jnp.bool_)
        message = f"implementation: cuda: {name} is an array of all scores.*only the reference"
        with jax_fp4attn.cross_compile((10, 0)), pytest.raises(NotImplementedError, match=message):
            attend(x, x, x, **{name: dense})


class TestMeshes:
    SPEC = P("data", None, "model")

    @pytest.fixture
    def make_mesh(self, cpu_devices):
        devices = np.array(cpu_devices).reshape(2, 4)
        return lambda kind: Mesh(devices, ("data", "model"), axis_types=(kind, kind))

    def operands(self, mesh, specs):
        shapes = [(4, 128, 8, 64), (4, 128, 4, 64), (4, 128, 4, 64), (4, 128, 8, 64)]
        return [
            jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
            for shape, spec in zip(shapes, specs, strict=True)
        ]

    def check_shards(self, program):
        assert re.findall(r"all_gather|all_reduce|all_to_all|collective_permute|reduce_scatter", program) == []
        *_, (target, _, _, results) = calls(program)
        assert target == "jax_fp4attn_backward_v1"
        assert results[:3] == ["2x128x2x64xbf16", "2x128x1x64xbf16", "2x128x1x64xbf16"]

    def test_explicit(self, make_mesh):
        mesh = make_mesh(AxisType.Explicit)
        with jax.set_mesh(mesh):
            self.check_shards(lower(gradients(attend), *self.operands(mesh, [self.SPEC] * 4)))

    def test_shard_map(self, make_mesh):
        mesh = make_mesh(AxisType.Auto)
        mapped = jax.shard_map(gradients(attend), mesh=mesh, in_specs=(self.SPEC,) * 4, out_specs=(self.SPEC,) * 4)
        self.check_shards(lower(mapped, *self.operands(mesh, [self.SPEC] * 4)))

    @pytest.mark.parametrize("recipe", [recipes.train, recipes.square], ids=lambda recipe: recipe.name)
    def test_memory_varies_over_the_axes_over_which_the_results_do(self, recipe, make_mesh):
        mesh, specs = make_mesh(AxisType.Auto), (self.SPEC,) * 4
        function = gradients(functools.partial(attend, recipe=recipe))
        mapped = jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=specs)
        with jax_fp4attn.cross_compile((9, 0)):
            jaxpr = jax.make_jaxpr(mapped)(*self.operands(mesh, specs))
        found = {equation.params.get("target_name"): equation.outvars for equation in equations(jaxpr.jaxpr)}
        for step, count in (("forward", 6 if recipe is recipes.square else 4), ("backward", 7)):
            results = found[f"jax_fp4attn_{step}_v1"]
            kind = "manual_axis_type" if hasattr(results[0].aval, "manual_axis_type") else "vma"
            axes = {getattr(result.aval, kind) for result in results}
            assert len(results) == count
            assert len(axes) == 1 and "model" in str(axes)

    @pytest.mark.parametrize("check_vma", [True, False])
    def test_partly_manual(self, check_vma, make_mesh):
        mesh = make_mesh(AxisType.Auto)
        mapped = jax.shard_map(
            gradients(attend),
            mesh=mesh,
            in_specs=(P("data"),) * 4,
            out_specs=(P("data"),) * 4,
            axis_names={"data"},
            check_vma=check_vma,
        )
        found = calls(lower(mapped, *self.operands(mesh, [self.SPEC] * 4)))
        assert found[-1][3][:3] == ["2x128x8x64xbf16", "2x128x4x64xbf16", "2x128x4x64xbf16"]

    def test_ring(self, make_mesh):
        mesh = make_mesh(AxisType.Auto)
        spec = P("data", "model")
        mapped = jax.shard_map(
            gradients(lambda *x: attend(*x, context_axis="model", recipe=recipes.square)),
            mesh=mesh,
            in_specs=(spec,) * 4,
            out_specs=(spec,) * 4,
        )
        shapes = [(2, 512, 2, 64)] * 4
        operands = [jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=NamedSharding(mesh, spec)) for s in shapes]
        program = lower(mapped, *operands)
        found = targets(program)
        assert "all_gather" not in program
        # The shard's own keys, the stops inside the loop, the last stop.
        assert found.count("jax_fp4attn_partial_forward_v1") == 3
        assert found.count("jax_fp4attn_partial_gradients_v1") == 3
        assert found.count("jax_fp4attn_row_operands_v1") == 1
        # Halves of a shard's 128 rows: scales travel in rows, and each call gets whole pages and whole tiles.
        scores = ["2x2x64x32xui8", "2x2x1x1x512xui8", "2x2x128x32xui8", "2x2x1x1x512xui8"]
        last = {call[0]: call[2] for call in calls(program)}
        assert last["jax_fp4attn_partial_forward_v1"] == [*scores, "2x2x64x64xui8", "2x2x1x1x512xui8"]
        e4m3, rows = ["2x2x64x128xui8"] * 2 + ["2x2x128x64xui8"], ["2x2x128x64xui8", "2x2x64x128xui8", "2x2x64xf32"]
        assert last["jax_fp4attn_partial_gradients_v1"] == [*scores, *e4m3, *rows, "2x2x64xf32", "2x2xf32"]
