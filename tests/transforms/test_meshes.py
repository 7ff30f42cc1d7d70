"""Sharded calls give what one device gives, with no more communication than they need."""

import contextlib
import re
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
from tests.assertions import assert_close

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


@pytest.fixture(name="make_mesh")
def _make_mesh(cpu_devices: list[jax.Device]) -> Callable[[AxisType], Mesh]:
    devices = np.array(cpu_devices).reshape(2, 4)
    return lambda kind: Mesh(devices, ("data", "model"), axis_types=(kind, kind))


def _inputs(num_kv_heads: int, batch: int = BATCH) -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(0)
    shapes = [(batch, LENGTH, heads, HEAD_SIZE) for heads in (HEADS, num_kv_heads, num_kv_heads, HEADS)]
    return tuple(jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in shapes)


def _gradients(attend: Callable[..., jax.Array]) -> Callable[..., Any]:
    def run(query: jax.Array, key: jax.Array, value: jax.Array, d_out: jax.Array) -> Any:
        out, vjp = jax.vjp(attend, query, key, value)
        return out, *vjp(d_out)

    return run


def _causal(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    return jax_fp4attn.attention(query, key, value, is_causal=True)


def _run(mesh: Mesh, function: Callable[..., Any], arrays: tuple[jax.Array, ...], specs: tuple[P, ...]) -> Any:
    """Results, and how many collectives of each kind the compiled program has."""
    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)]
    explicit = AxisType.Explicit in mesh.axis_types
    with jax.set_mesh(mesh) if explicit else contextlib.nullcontext():
        compiled = jax.jit(function).lower(*placed).compile()
        results = compiled(*placed)
    names = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
    counts = {name: len(re.findall(rf" {name}(?:-start)?\(", compiled.as_text())) for name in names}
    return results, {name: count for name, count in counts.items() if count}


def _assert_equal(actual: Any, expected: Any, *, sums: bool = False) -> None:
    # Sums over shards round to bfloat16 once a shard; everything else is the same arithmetic.
    tolerance = 2**-7 if sums else 0.0
    actual, expected = jax.tree.map(np.asarray, (actual, expected))
    scale = [float(np.abs(np.asarray(x, np.float32)).max()) for x in expected]
    for x, y, size in zip(actual, expected, scale, strict=True):
        assert_close(jnp.asarray(x), jnp.asarray(y), rtol=0, atol=tolerance * size)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("case", CASES)
def test_gradient_program_equals_one_device(case, kind, make_mesh):
    num_kv_heads, query_spec, kv_spec, collectives = CASES[case]
    arrays = _inputs(num_kv_heads, batch=8 if "both axes" in case else BATCH)
    expected = jax.jit(_gradients(_causal))(*arrays)
    actual, counts = _run(make_mesh(kind), _gradients(_causal), arrays, (query_spec, kv_spec, kv_spec, query_spec))
    _assert_equal(actual, expected, sums="all-reduce" in collectives)
    assert actual[0].sharding.is_equivalent_to(NamedSharding(make_mesh(kind), query_spec), 4)
    if kind == AxisType.Explicit or "whole" not in case:
        assert counts == collectives


@pytest.mark.parametrize("dimension", GATHERED)
def test_automatic_mesh_gathers_what_must_be_whole(dimension, make_mesh):
    arrays, spec = _inputs(4), GATHERED[dimension]
    expected = jax.jit(_gradients(_causal))(*arrays)
    actual, counts = _run(make_mesh(AxisType.Auto), _gradients(_causal), arrays, (spec,) * 4)
    _assert_equal(actual, expected)
    assert counts.get("all-gather", 0) > 0


@pytest.mark.parametrize("dimension", GATHERED)
def test_explicit_mesh_refuses_what_must_be_whole(dimension, make_mesh):
    with pytest.raises(ValueError, match=r"sharded over mesh axes \('model',\).*reshard"):
        _run(make_mesh(AxisType.Explicit), _gradients(_causal), _inputs(4), (GATHERED[dimension],) * 4)


def test_cotangent_with_another_sharding(make_mesh):
    arrays = _inputs(4)
    expected = jax.jit(_gradients(_causal))(*arrays)
    specs = (HEADS_SPLIT, HEADS_SPLIT, HEADS_SPLIT, P())
    actual, _ = _run(make_mesh(AxisType.Auto), _gradients(_causal), arrays, specs)
    _assert_equal(actual, expected)


def test_uneven_batch(make_mesh):
    arrays = _inputs(4, batch=6)
    expected = jax.jit(_gradients(_causal))(*arrays)

    def run(*arrays: jax.Array) -> Any:
        mesh = make_mesh(AxisType.Auto)
        constrained = (jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("model"))) for x in arrays)
        return _gradients(_causal)(*constrained)

    _assert_equal(_run(make_mesh(AxisType.Auto), run, arrays, (P(),) * 4)[0], expected)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_lengths_and_segments_follow_the_batch(kind, make_mesh):
    arrays = _inputs(4)
    lengths = jnp.array([40, 17, 0, 33], jnp.int32)
    segments = jnp.asarray(np.random.default_rng(1).integers(0, 3, (BATCH, LENGTH)), jnp.int32)

    def run(query, key, value, d_out, lengths, segments):
        def attend(*operands):
            return jax_fp4attn.attention(
                *operands,
                is_causal=True,
                key_value_seq_lengths=lengths,
                segment_ids=SegmentIds(segments, segments),
            )

        return _gradients(attend)(query, key, value, d_out)

    expected = jax.jit(run)(*arrays, lengths, segments)
    specs = (HEADS_SPLIT,) * 4 + (BATCH_SPLIT, BATCH_SPLIT)
    actual, counts = _run(make_mesh(kind), run, (*arrays, lengths, segments), specs)
    _assert_equal(actual, expected)
    assert counts == {}


@pytest.mark.parametrize("shape", [(1, 1), (1, HEADS), (BATCH, 1)], ids=str)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_gradient_of_a_broadcast_bias_is_summed_over_shards(shape, kind, make_mesh):
    arrays = _inputs(4)
    bias = jnp.asarray(np.random.default_rng(2).standard_normal((*shape, LENGTH, LENGTH)), jnp.float32)

    def run(query, key, value, d_out, bias):
        return jax.vjp(lambda bias: jax_fp4attn.attention(query, key, value, bias, is_causal=True), bias)[1](d_out)

    (expected,) = jax.jit(run)(*arrays, bias)
    (actual,), _ = _run(make_mesh(kind), run, (*arrays, bias), (HEADS_SPLIT,) * 4 + (P(),))
    assert_close(jnp.asarray(np.asarray(actual)), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("axis_names", [{"data", "model"}, {"data"}, {"model"}], ids=["full", "data", "model"])
@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_shard_map(axis_names, check_vma, make_mesh):
    if not check_vma and axis_names != {"data", "model"}:
        pytest.skip("JAX checks types under a partly manual mesh")
    arrays = _inputs(4)
    expected = jax.jit(_gradients(_causal))(*arrays)
    spec = P("data" if "data" in axis_names else None, None, "model" if "model" in axis_names else None)
    mapped = jax.shard_map(
        _causal,
        mesh=make_mesh(AxisType.Auto),
        in_specs=(spec,) * 3,
        out_specs=spec,
        axis_names=axis_names,
        check_vma=check_vma,
    )
    actual, _ = _run(make_mesh(AxisType.Auto), _gradients(mapped), arrays, (HEADS_SPLIT,) * 4)
    _assert_equal(actual, expected)


def test_gradient_inside_shard_map(make_mesh):
    arrays = _inputs(4)
    expected = jax.jit(_gradients(_causal))(*arrays)
    mapped = jax.shard_map(
        _gradients(_causal), mesh=make_mesh(AxisType.Auto), in_specs=(HEADS_SPLIT,) * 4, out_specs=(HEADS_SPLIT,) * 4
    )
    actual, _ = _run(make_mesh(AxisType.Auto), mapped, arrays, (HEADS_SPLIT,) * 4)
    _assert_equal(actual, expected)


def test_vmap_of_a_sharded_gradient(make_mesh):
    arrays = tuple(x[None] * jnp.array([1, 0.5], x.dtype)[:, None, None, None, None] for x in _inputs(4))
    mapped = jax.vmap(_gradients(_causal))
    expected = jax.jit(mapped)(*arrays)
    actual, _ = _run(make_mesh(AxisType.Auto), mapped, arrays, (P(None, *HEADS_SPLIT),) * 4)
    _assert_equal(actual, expected)


def test_remat_and_scan_over_layers(make_mesh):
    (x, *_) = _inputs(8)

    def loss(x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return x + _causal(x, x, x), None

        body = jax.checkpoint(layer, policy=jax_fp4attn.checkpoint_policies.save_attention)
        return jnp.sum(jax.lax.scan(body, x, None, length=2)[0].astype(jnp.float32) ** 2)

    def run(x: jax.Array) -> tuple[jax.Array, ...]:
        return (jax.grad(loss)(x),)

    expected = jax.jit(run)(x)
    actual, _ = _run(make_mesh(AxisType.Auto), run, (x,), (HEADS_SPLIT,))
    _assert_equal(actual, expected, sums=True)
