"""Sharded calls give what one device gives, with no more communication than they need."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_fp4attn
from jax_fp4attn import SegmentIds
from tests.assertions import relative_l2
from tests.meshes import (
    COMPILES_SHARDS_ALIKE,
    TO_SUMS,
    assert_equal,
    causal,
    describe,
    gradients,
    one_device,
    random_inputs,
    run_sharded,
)

BATCH, LENGTH, HEADS, HEAD_SIZE = 4, 40, 8, 64

HEADS_SPLIT = P("data", None, "model")
BATCH_SPLIT = P("data")

# name: (key/value heads, query spec, key/value spec, collectives of the gradient program)
CASES: dict[str, tuple[int, P, P, dict[str, int]]] = {
    "batch": (4, BATCH_SPLIT, BATCH_SPLIT, {}),
    "batch over both axes": (4, P(("data", "model")), P(("data", "model")), {}),
    "multi-head": (8, HEADS_SPLIT, HEADS_SPLIT, {}),
    "grouped-query": (4, HEADS_SPLIT, HEADS_SPLIT, {}),
    "grouped-query, keys and values whole": (4, HEADS_SPLIT, BATCH_SPLIT, {"all-gather": 2}),
    "fewer key/value heads than shards": (2, HEADS_SPLIT, BATCH_SPLIT, {"all-reduce": 1}),
    "multi-query": (1, HEADS_SPLIT, BATCH_SPLIT, {"all-reduce": 1}),
    "heads over both axes": (8, P(None, None, ("data", "model")), P(None, None, ("data", "model")), {}),
}
GATHERED = {
    "sequence": P("data", "model"),
    "head size": P("data", None, None, "model"),
}
KINDS = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])


@pytest.fixture(name="make_mesh")
def _make_mesh(cpu_devices: list[jax.Device]) -> Callable[[AxisType], Mesh]:
    devices = np.array(cpu_devices).reshape(2, 4)
    return lambda kind: Mesh(devices, ("data", "model"), axis_types=(kind, kind))


@pytest.fixture(name="compare")
def _compare(record_row: Callable[..., None]) -> Callable[..., dict[str, int]]:
    """Runs a program on a mesh and on one device, and records a row of the table."""

    def compare(
        case: str,
        mesh: Mesh,
        function: Callable[..., Any],
        arrays: tuple[jax.Array, ...],
        specs: tuple[P, ...],
        *,
        one: Callable[..., Any] | None = None,
        sums: bool = False,
    ) -> tuple[Any, dict[str, int]]:
        actual, collectives = run_sharded(mesh, function, arrays, specs)
        equal = assert_equal(actual, one_device(one or function, *arrays), sums=sums)
        record_row(case, describe(mesh), equal, collectives)
        return actual, collectives

    return compare


def _inputs(num_kv_heads: int, batch: int = BATCH) -> tuple[jax.Array, ...]:
    return random_inputs(batch, LENGTH, HEADS, num_kv_heads, HEAD_SIZE)


@KINDS
@pytest.mark.parametrize("case", CASES)
def test_gradient_program_equals_one_device(case, kind, make_mesh, compare):
    num_kv_heads, query_spec, kv_spec, collectives = CASES[case]
    arrays = _inputs(num_kv_heads, batch=8 if "both axes" in case else BATCH)
    mesh = make_mesh(kind)
    specs = (query_spec, kv_spec, kv_spec, query_spec)
    actual, counts = compare(case, mesh, gradients(causal), arrays, specs, sums="all-reduce" in collectives)
    assert actual[0].sharding.is_equivalent_to(NamedSharding(mesh, query_spec), 4)
    if kind == AxisType.Explicit or "whole" not in case:
        assert counts == collectives


@pytest.mark.parametrize("dimension", GATHERED)
def test_automatic_mesh_gathers_what_must_be_whole(dimension, make_mesh, compare):
    specs = (GATHERED[dimension],) * 4
    _, counts = compare(f"{dimension} sharded", make_mesh(AxisType.Auto), gradients(causal), _inputs(4), specs)
    assert counts.get("all-gather", 0) > 0


@pytest.mark.parametrize("dimension", GATHERED)
def test_explicit_mesh_refuses_what_must_be_whole(dimension, make_mesh, record_row):
    mesh = make_mesh(AxisType.Explicit)
    with pytest.raises(ValueError, match=r"sharded over mesh axes \('model',\).*reshard"):
        run_sharded(mesh, gradients(causal), _inputs(4), (GATHERED[dimension],) * 4)
    record_row(f"{dimension} sharded", describe(mesh), "refused, with advice", {})


def test_cotangent_with_another_sharding(make_mesh, compare):
    specs = (HEADS_SPLIT, HEADS_SPLIT, HEADS_SPLIT, P())
    compare("cotangent replicated", make_mesh(AxisType.Auto), gradients(causal), _inputs(4), specs)


def test_uneven_batch(make_mesh, compare):
    mesh = make_mesh(AxisType.Auto)

    def run(*arrays: jax.Array) -> Any:
        constrained = (jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("model"))) for x in arrays)
        return gradients(causal)(*constrained)

    compare("batch of 6 over 4 shards", mesh, run, _inputs(4, batch=6), (P(),) * 4, one=gradients(causal))


@KINDS
def test_lengths_and_segments_follow_the_batch(kind, make_mesh, compare):
    lengths = jnp.array([40, 17, 0, 33], jnp.int32)
    segments = jnp.asarray(np.random.default_rng(1).integers(0, 3, (BATCH, LENGTH)), jnp.int32)

    def run(query, key, value, d_out, lengths, segments):
        def attend(*operands):
            return causal(*operands, key_value_seq_lengths=lengths, segment_ids=SegmentIds(segments, segments))

        return gradients(attend)(query, key, value, d_out)

    specs = (HEADS_SPLIT,) * 4 + (BATCH_SPLIT, BATCH_SPLIT)
    _, counts = compare("lengths and segments", make_mesh(kind), run, (*_inputs(4), lengths, segments), specs)
    assert counts == {}


@pytest.mark.parametrize("shape", [(1, 1), (1, HEADS), (BATCH, 1)], ids=str)
@KINDS
def test_gradient_of_a_broadcast_bias_is_summed_over_shards(shape, kind, make_mesh, record_row):
    arrays = _inputs(4)
    bias = jnp.asarray(np.random.default_rng(2).standard_normal((*shape, LENGTH, LENGTH)), jnp.float32)

    def run(query, key, value, d_out, bias):
        return jax.vjp(lambda bias: jax_fp4attn.attention(query, key, value, bias, is_causal=True), bias)[1](d_out)

    (expected,) = one_device(run, *arrays, bias)
    mesh = make_mesh(kind)
    (actual,), collectives = run_sharded(mesh, run, (*arrays, bias), (HEADS_SPLIT,) * 4 + (P(),))
    assert relative_l2(np.asarray(actual), expected) < (1e-6 if COMPILES_SHARDS_ALIKE else 2e-3)
    record_row(f"gradient of a bias {(*shape, 'T', 'S')}".replace("'", ""), describe(mesh), TO_SUMS, collectives)


@pytest.mark.parametrize("axis_names", [{"data", "model"}, {"data"}, {"model"}], ids=["full", "data", "model"])
@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_shard_map(axis_names, check_vma, make_mesh, compare):
    if not check_vma and axis_names != {"data", "model"}:
        pytest.skip("JAX checks types under a partly manual mesh")
    spec = P("data" if "data" in axis_names else None, None, "model" if "model" in axis_names else None)
    mesh = make_mesh(AxisType.Auto)
    mapped = jax.shard_map(
        causal, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec, axis_names=axis_names, check_vma=check_vma
    )
    case = f"gradient of shard_map over {' and '.join(sorted(axis_names))}{'' if check_vma else ', check_vma=False'}"
    compare(case, mesh, gradients(mapped), _inputs(4), (HEADS_SPLIT,) * 4, one=gradients(causal))


def test_gradient_inside_shard_map(make_mesh, compare):
    mesh = make_mesh(AxisType.Auto)
    mapped = jax.shard_map(gradients(causal), mesh=mesh, in_specs=(HEADS_SPLIT,) * 4, out_specs=(HEADS_SPLIT,) * 4)
    specs = (HEADS_SPLIT,) * 4
    compare("shard_map of the gradient", mesh, mapped, _inputs(4), specs, one=gradients(causal))


def test_gradients_of_what_manual_shards_share_are_summed(make_mesh, compare):
    mesh = make_mesh(AxisType.Auto)
    whole = P("data")
    mapped = jax.shard_map(
        gradients(causal),
        mesh=mesh,
        in_specs=(HEADS_SPLIT, whole, whole, HEADS_SPLIT),
        out_specs=(HEADS_SPLIT, HEADS_SPLIT, whole, whole),
    )
    specs = (HEADS_SPLIT, whole, whole, HEADS_SPLIT)
    compare("shard_map of the gradient, multi-query", mesh, mapped, _inputs(1), specs, one=gradients(causal), sums=True)


NESTED = pytest.mark.parametrize(
    ("split", "spec"),
    [
        ("batch and heads", P(None, "data", None, "model")),
        ("outer dimension and heads", P("data", None, None, "model")),
        ("both dimensions", P("data", "model")),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)


def _stacked_inputs():
    scale = jnp.array([1, 0.5, 2, 1], jnp.bfloat16)[:, None, None, None, None]
    return tuple(x[None] * scale for x in _inputs(4))


@NESTED
@KINDS
def test_vmap_of_a_sharded_gradient(split, spec, kind, make_mesh, compare):
    run = jax.vmap(gradients(causal))
    actual, counts = compare(f"vmap of the gradient, {split}", make_mesh(kind), run, _stacked_inputs(), (spec,) * 4)
    assert counts == {}
    assert actual[0].sharding.is_equivalent_to(NamedSharding(make_mesh(kind), spec), 5)


@NESTED
@KINDS
def test_two_batch_dimensions(split, spec, kind, make_mesh, compare):
    arrays = _stacked_inputs()
    actual, counts = compare(f"two batch dimensions, {split}", make_mesh(kind), gradients(causal), arrays, (spec,) * 4)
    assert counts == {}
    assert actual[0].sharding.is_equivalent_to(NamedSharding(make_mesh(kind), spec), 5)


@KINDS
def test_remat_and_scan_over_layers(kind, make_mesh, compare):
    (x, *_) = _inputs(8)

    def loss(x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return x + causal(x, x, x), None

        body = jax.checkpoint(layer, policy=jax_fp4attn.checkpoint_policies.save_attention)
        return jnp.sum(jax.lax.scan(body, x, None, length=2)[0].astype(jnp.float32) ** 2)

    def run(x: jax.Array) -> tuple[jax.Array, ...]:
        return (jax.grad(loss)(x),)

    compare("remat and scan over layers", make_mesh(kind), run, (x,), (HEADS_SPLIT,))
