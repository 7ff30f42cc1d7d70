"""What sharded attention is known to get wrong elsewhere: operands sharded unlike, devices other than the first."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_fp4attn import recipes
from tests.assertions import relative_l2
from tests.meshes import (
    assert_equal,
    causal,
    count_collectives,
    gradients,
    one_device,
    random_inputs,
    run_sharded,
)

ARRAYS = random_inputs(4, 8, 4, 2, 16)

KINDS = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])

# The recipe that compiles fastest: splitting knows nothing of recipes.
attend = functools.partial(causal, recipe=recipes.bf16)
evaluate = gradients(attend)

# Which bits are equal is for the tests of meshes; a wrong sharding is wrong by far.
assert_agree = functools.partial(assert_equal, sums=True)


@pytest.fixture(name="make_mesh")
def _make_mesh(cpu_devices: list[jax.Device]) -> Callable[..., Mesh]:
    def make(data: AxisType, model: AxisType | None = None, shape: tuple[int, int] = (2, 4)) -> Mesh:
        devices = np.array(cpu_devices).reshape(shape)
        return Mesh(devices, ("data", "model"), axis_types=(data, data if model is None else model))

    return make


@pytest.fixture(scope="module", name="expected")
def _expected() -> tuple[jax.Array, ...]:
    return one_device(evaluate, *ARRAYS)


class TestOperandsShardedUnlike:
    @KINDS
    @pytest.mark.parametrize("whole", ["query", "key", "value"])
    def test_one_operand_is_whole(self, whole, kind, make_mesh, expected):
        specs = tuple(P() if name == whole else P("data") for name in ("query", "key", "value", "query"))
        actual, _ = run_sharded(make_mesh(kind), evaluate, ARRAYS, specs)
        assert_agree(actual, expected)
        if kind == AxisType.Explicit:
            # The output has the query's sharding, and each gradient its operand's.
            specs_of_results = (specs[0], *specs[:3])
            assert [x.sharding.spec[0] for x in actual] == [spec[0] if spec else None for spec in specs_of_results]

    @KINDS
    def test_the_output_is_gathered_before_the_loss(self, kind, make_mesh):
        mesh = make_mesh(kind)
        gather = jax.lax.with_sharding_constraint if kind == AxisType.Auto else jax.sharding.reshard

        def run(query: Any, key: Any, value: Any, *, whole: Callable[[Any], Any] = lambda x: x) -> Any:
            def loss(*operands: Any) -> Any:
                return (whole(attend(*operands)).astype(jnp.float32) ** 2).sum()

            return jax.grad(loss, argnums=(0, 1, 2))(query, key, value)

        gathered = functools.partial(run, whole=lambda x: gather(x, NamedSharding(mesh, P())))
        assert_agree(run_sharded(mesh, gathered, ARRAYS[:3], (P("data"),) * 3)[0], one_device(run, *ARRAYS[:3]))

    @KINDS
    def test_a_mask_that_all_sequences_share(self, kind, make_mesh):
        def run(query: Any, key: Any, value: Any, d_output: Any, mask: Any) -> Any:
            return gradients(functools.partial(attend, mask=mask))(query, key, value, d_output)

        arrays = (*ARRAYS, jnp.asarray(np.random.default_rng(1).random((1, 1, 8, 8)) < 0.7))
        actual, _ = run_sharded(make_mesh(kind), run, arrays, (P("model"),) * 4 + (P(),))
        assert_agree(actual, one_device(run, *arrays))

    def test_an_explicit_and_an_automatic_axis(self, make_mesh, expected):
        mesh = make_mesh(AxisType.Explicit, AxisType.Auto)
        assert_agree(run_sharded(mesh, evaluate, ARRAYS, (P("data"),) * 4)[0], expected)


class TestNoOperandOnTheMesh:
    """JAX tells `custom_partitioning` of the mesh in scope only if something in the program is on it."""

    @pytest.mark.parametrize("wrap", [lambda f: f, jax.vmap], ids=["call", "vmap"])
    def test_arrays_of_the_host_are_split_by_constraints(self, wrap, make_mesh):
        arrays = [np.asarray(x)[:, None] for x in ARRAYS] if wrap is jax.vmap else [np.asarray(x) for x in ARRAYS]
        mapped = wrap(evaluate)

        def run(*arrays: Any) -> Any:
            return mapped(*(jax.lax.with_sharding_constraint(x, P("data")) for x in arrays))

        with jax.set_mesh(make_mesh(AxisType.Auto)):
            compiled = jax.jit(run).lower(*arrays).compile()
            actual = compiled(*arrays)
        assert "all-gather" not in count_collectives(compiled.as_text())
        assert_agree(actual, one_device(mapped, *arrays))

    def test_a_program_of_shapes_is_split_as_that_of_arrays(self, make_mesh):
        mesh = make_mesh(AxisType.Auto)

        def run(*arrays: Any) -> Any:
            return evaluate(*(jax.lax.with_sharding_constraint(x, P("data")) for x in arrays))

        with jax.set_mesh(mesh):
            program = jax.jit(run).lower(*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in ARRAYS)).compile()
        assert "all-gather" not in count_collectives(program.as_text())

    @pytest.mark.parametrize("others", [slice(4, 8), slice(3, None, -1)], ids=["other devices", "another order"])
    def test_two_meshes_of_one_shape_in_turn(self, others, cpu_devices, expected):
        function = jax.jit(evaluate)
        for devices in (cpu_devices[:4], cpu_devices[others]):
            mesh = Mesh(np.array(devices), ("data",), axis_types=(AxisType.Auto,))
            with jax.set_mesh(mesh):
                constrained = jax.jit(lambda *x: function(*(jax.lax.with_sharding_constraint(y, P("data")) for y in x)))
                actual = constrained(*(np.asarray(x) for x in ARRAYS))
            assert_agree(actual, expected)
            assert all(x.sharding.is_equivalent_to(NamedSharding(mesh, P("data")), x.ndim) for x in actual)

    def test_an_abstract_mesh_alone(self, make_mesh, expected):
        with jax.sharding.use_abstract_mesh(make_mesh(AxisType.Auto).abstract_mesh):
            shapes = jax.eval_shape(evaluate, *ARRAYS)
            actual = one_device(evaluate, *ARRAYS)
        assert [x.shape for x in shapes] == [x.shape for x in expected]
        assert_agree(actual, expected)

    def test_explicit_axes_made_automatic(self, make_mesh, expected):
        mesh = make_mesh(AxisType.Explicit)
        run = jax.sharding.auto_axes(attend, out_sharding=P("data"))
        arrays = [jax.device_put(x, NamedSharding(mesh, P("data"))) for x in ARRAYS[:3]]
        with jax.set_mesh(mesh):
            assert_agree([jax.jit(run)(*arrays)], expected[:1])
        actual, _ = run_sharded(make_mesh(AxisType.Auto), evaluate, ARRAYS, (P("data"),) * 4)
        assert_agree(actual, expected)

    @pytest.mark.parametrize("spec", [P(("data", "model")), P("model"), P(None, None, "model")], ids=str)
    def test_every_axis_is_recognised(self, spec, make_mesh):
        arrays = [np.asarray(x) for x in random_inputs(8, 8, 4, 4, 16)]

        def run(*arrays: Any) -> Any:
            return evaluate(*(jax.lax.with_sharding_constraint(x, spec) for x in arrays))

        with jax.set_mesh(make_mesh(AxisType.Auto)):
            compiled = jax.jit(run).lower(*arrays).compile()
            actual = compiled(*arrays)
        assert not count_collectives(compiled.as_text())
        assert_agree(actual, one_device(evaluate, *arrays))

    def test_the_sequence_is_split(self, cpu_devices):
        mesh = Mesh(np.array(cpu_devices[:2]), ("seq",), axis_types=(AxisType.Auto,))
        arrays = [np.asarray(x) for x in random_inputs(1, 256, 2, 1, 16)]
        ring = gradients(functools.partial(attend, context_axis="seq"))
        with jax.set_mesh(mesh):
            compiled = jax.jit(ring).lower(*arrays).compile()
            actual = compiled(*arrays)
        assert "collective-permute" in count_collectives(compiled.as_text())
        # Of recipes.bf16 parts merge in float32.
        for x, y in zip(actual, one_device(evaluate, *arrays), strict=True):
            assert relative_l2(np.asarray(x, np.float32), np.asarray(y, np.float32)) < 3e-3


def test_gspmd_is_refused(make_mesh):
    """Its partitioner would end the process."""
    mesh = make_mesh(AxisType.Auto)
    arrays = [jax.device_put(x, NamedSharding(mesh, P("data"))) for x in ARRAYS[:3]]
    jax.config.update("jax_use_shardy_partitioner", False)
    try:
        with pytest.raises(NotImplementedError, match="jax_use_shardy_partitioner is off"):
            jax.jit(lambda *x: attend(*x, scale=0.5)).lower(*arrays)
    finally:
        jax.config.update("jax_use_shardy_partitioner", True)


class TestInsideShardMap:
    def test_gradient_of_keys_that_shards_share(self, make_mesh):
        query, key, value, d_output = ARRAYS
        arrays = query, key[:, :, :1], value[:, :, :1], d_output
        specs = P(None, None, "model"), P(), P(), P(None, None, "model")
        mapped = jax.shard_map(
            evaluate, mesh=make_mesh(AxisType.Auto), in_specs=specs, out_specs=(specs[0], *specs[:3]), check_vma=True
        )
        assert_agree(one_device(mapped, *arrays), one_device(evaluate, *arrays))

    def test_gradient_while_the_other_axis_is_left_to_the_compiler(self, make_mesh, expected):
        mesh, spec = make_mesh(AxisType.Auto), P("data")
        mapped = jax.shard_map(evaluate, mesh=mesh, in_specs=spec, out_specs=spec, axis_names={"data"})
        assert_agree(run_sharded(mesh, mapped, ARRAYS, (spec,) * 4)[0], expected)


class TestVmap:
    ARRAYS = tuple(jnp.stack([x, x[::-1]]) for x in ARRAYS)

    @pytest.fixture(scope="class", name="expected")
    @classmethod
    def _expected(cls) -> Any:
        return one_device(jax.vmap(evaluate), *cls.ARRAYS)

    @pytest.mark.parametrize("spec", [P("data"), P("data", "model")], ids=str)
    def test_mapped_axes_of_automatic_meshes_may_be_sharded(self, spec, make_mesh, expected):
        mesh = make_mesh(AxisType.Auto)
        assert_agree(run_sharded(mesh, jax.vmap(evaluate), self.ARRAYS, (spec,) * 4)[0], expected)

    def test_no_examples_are_refused(self):
        empty = [jnp.zeros((0, *x.shape), x.dtype) for x in ARRAYS]
        with pytest.raises(ValueError, match="expected a vmapped axis of at least 1, got 0"):
            jax.vmap(evaluate)(*empty)

    def test_spmd_axis_name(self, make_mesh, expected):
        mesh = make_mesh(AxisType.Auto)
        mapped = jax.vmap(evaluate, spmd_axis_name="data")
        with jax.set_mesh(mesh):
            assert_agree(run_sharded(mesh, mapped, self.ARRAYS, (P("data"),) * 4)[0], expected)

    def test_of_a_shard_map(self, make_mesh, expected):
        mapped = jax.shard_map(evaluate, mesh=make_mesh(AxisType.Auto), in_specs=P("data"), out_specs=P("data"))
        assert_agree(one_device(jax.vmap(mapped), *self.ARRAYS), expected)


class TestDevices:
    def test_results_stay_on_the_device_of_the_operands(self, cpu_devices, expected):
        arrays = [jax.device_put(x, cpu_devices[1]) for x in ARRAYS]
        results = [*one_device(evaluate, *arrays), attend(*arrays[:3])]
        assert {device for x in results for device in x.devices()} == {cpu_devices[1]}
        assert_agree(results, [*expected, expected[0]])

    @KINDS
    def test_a_mesh_without_the_first_device_in_another_order(self, kind, cpu_devices, expected):
        devices = [cpu_devices[i] for i in (6, 3, 5, 4)]
        mesh = Mesh(np.array(devices), ("data",), axis_types=(kind,))
        actual, _ = run_sharded(mesh, evaluate, ARRAYS, (P("data"),) * 4)
        assert_agree(actual, expected)
        assert all(x.devices() == {*devices} for x in actual)

    @KINDS
    def test_one_function_on_two_meshes_in_turn(self, kind, make_mesh, expected):
        for shape in ((2, 4), (4, 2)):
            actual, _ = run_sharded(make_mesh(kind, shape=shape), evaluate, ARRAYS, (P("data"),) * 4)
            assert_agree(actual, expected)
            assert actual[0].sharding.mesh.shape["data"] == shape[0]
