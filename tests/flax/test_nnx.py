"""NNX's `Attention`. Its arithmetic is that of Linen's, which test_linen.py tests."""

import inspect
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from jax_fp4attn import recipes, zigzag_order
from jax_fp4attn.checkpoint_policies import save_attention
from jax_fp4attn.flax.linen import Attention as LinenAttention
from jax_fp4attn.flax.nnx import Attention
from tests.assertions import assert_close

FEATURES, LENGTH = 32, 8
X = jax.random.normal(jax.random.key(0), (2, LENGTH, FEATURES))


# The recipe is the quickest to compile.
DEFAULTS: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "recipe": recipes.bf16}


def _layer(**arguments: Any) -> Attention:
    return Attention(FEATURES, **(DEFAULTS | arguments), rngs=nnx.Rngs(0))


@nnx.jit
def _apply(layer: Attention, x: jax.Array, arguments: dict[str, Any]) -> jax.Array:
    return layer(x, **arguments)


@nnx.jit
def _gradient(layer: Attention, x: jax.Array, weights: jax.Array, arguments: dict[str, Any]) -> Any:
    """Of the parameters and the input."""

    def loss(layer, x):
        return (layer(x, **arguments) * weights).astype(jnp.float32).sum()

    return nnx.grad(loss, argnums=(0, 1))(layer, x)


@pytest.mark.parametrize(
    ("fields", "arguments"),
    [
        ({"use_bias": True, "bias_init": nn.initializers.normal(0.5), "recipe": None}, {}),
        (
            {"is_causal": False, "num_kv_heads": None, "head_dim": 6, "dtype": jnp.bfloat16},
            {"seq_lengths": jnp.array([LENGTH, 5])},
        ),
        (
            {"rope_theta": 100.0, "local_window_size": (3, 0), "implementation": ["reference"]},
            {
                "segment_ids": jnp.array([[1] * 5 + [2] * 3, [1] * 6 + [0] * 2]),
                "positions": jnp.array([*range(5), *range(3)]),
            },
        ),
        ({"rope_theta": None}, {}),
    ],
)
def test_same_result_as_linen(fields, arguments):
    layer = _layer(**fields)
    linen_layer = LinenAttention(**(DEFAULTS | fields))
    params = nnx.to_pure_dict(nnx.state(layer, nnx.Param))
    expected = jax.jit(linen_layer.apply)({"params": params}, X, **arguments)
    assert_close(_apply(layer, X, arguments), expected, rtol=1e-6, atol=1e-6)


def test_same_arguments_and_defaults_as_linen():
    ours = inspect.signature(Attention.__init__).parameters
    theirs = inspect.signature(LinenAttention).parameters
    common = [name for name in theirs if name not in ("parent", "name")]
    assert list(ours) == ["self", "in_features", *common, "rngs"]
    assert all(ours[name].default == theirs[name].default for name in common)


def test_gradients():
    layer = _layer(dtype=jnp.bfloat16)
    gradients = _gradient(layer, X, X, {})
    likes = (nnx.state(layer, nnx.Param), X)
    for leaf, like in zip(jax.tree.leaves(gradients), jax.tree.leaves(likes), strict=True):
        assert leaf.dtype == like.dtype == jnp.float32
        assert np.isfinite(leaf).all() and leaf.any()


def test_poison_beyond_the_length_changes_nothing():
    layer = _layer()
    lengths = {"seq_lengths": jnp.array([LENGTH, 5])}
    poisoned = X.at[1, 5:].set(jnp.nan)
    assert_close(_apply(layer, poisoned, lengths), _apply(layer, X, lengths), rtol=0, atol=0)
    actual, expected = (jax.tree.leaves(_gradient(layer, x, X, lengths)) for x in (poisoned, X))
    assert_close(actual, expected, rtol=0, atol=0)


def test_remat_with_save_attention():
    layer = _layer()

    def gradient(apply):
        return nnx.jit(nnx.grad(lambda layer, x: (apply(layer, x) * X).sum()))(layer, X)

    plain = gradient(lambda layer, x: layer(x))
    saved = gradient(nnx.remat(lambda layer, x: layer(x), policy=save_attention))
    assert_close(jax.tree.leaves(saved), jax.tree.leaves(plain), rtol=1e-4, atol=1e-5)


def test_vmap_and_scan_over_layers():
    @nnx.vmap(in_axes=0, out_axes=0)
    def stack(key):
        return Attention(FEATURES, 4, 2, recipe=recipes.bf16, rngs=nnx.Rngs(key))

    layers = stack(jax.random.split(jax.random.key(0), 2))

    @nnx.jit
    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    def apply(layer, x):
        return x + layer(x)

    graph, state = nnx.split(layers)
    x = X
    for i in range(2):
        x += _apply(nnx.merge(graph, jax.tree.map(lambda leaf, i=i: leaf[i], state)), x, {})
    assert_close(apply(layers, X), x, rtol=1e-5, atol=1e-5)


def test_a_model_built_again_is_not_traced_again():
    traces: list[None] = []

    @nnx.jit
    def apply(layer, x):
        traces.append(None)
        return layer(x)

    for _ in range(2):
        apply(_layer(implementation=["reference"]), X)
    assert len(traces) == 1


def test_partitioning_metadata(cpu_devices):
    mesh = jax.make_mesh((2,), ("model",), (jax.sharding.AxisType.Auto,), devices=cpu_devices[:2])
    normal = nnx.initializers.normal(0.1)
    with jax.set_mesh(mesh):
        layer = _layer(
            use_bias=True,
            kernel_init=nnx.with_partitioning(normal, (None, "model", None)),
            out_kernel_init=nnx.with_partitioning(normal, ("model", None, None)),
            bias_init=nnx.with_partitioning(normal, ("model", None)),
            out_bias_init=nnx.with_partitioning(normal, (None,)),
        )
        actual = _apply(layer, X, {})
    assert layer.key.kernel[...].addressable_shards[0].data.shape == (FEATURES, 1, 8)
    assert layer.out.kernel[...].addressable_shards[0].data.shape == (2, 8, FEATURES)
    plain = _layer(use_bias=True)
    nnx.update(plain, jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(layer, nnx.Param))))
    assert_close(actual, _apply(plain, X, {}), rtol=1e-4, atol=1e-5)


def test_heads_split_on_an_explicit_mesh(cpu_devices):
    mesh = jax.make_mesh((2, 2), ("data", "model"), (jax.sharding.AxisType.Explicit,) * 2, devices=cpu_devices[:4])
    expected = _apply(_layer(), X, {})
    with jax.set_mesh(mesh):
        layer = _layer(
            kernel_init=nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "model", None)),
            out_kernel_init=nnx.with_partitioning(nnx.initializers.lecun_normal(), ("model", None, None)),
        )
        sharded, whole = (nnx.to_pure_dict(nnx.state(x, nnx.Param)) for x in (layer, _layer()))
        nnx.update(layer, jax.tree.map(lambda x, y: jax.device_put(x, y.sharding), whole, sharded))
        x = jax.device_put(X, jax.NamedSharding(mesh, P("data")))
        apply = nnx.jit(lambda layer, x: layer(x, qkv_sharding=P("data", None, "model"), out_sharding=P("data")))
        actual = apply(layer, x)
    assert actual.sharding.spec[0] == "data"
    assert_close(jnp.asarray(np.asarray(actual)), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
def test_split_sequence_has_the_positions_of_the_whole(order, cpu_devices):
    mesh = jax.make_mesh((2,), ("seq",), (jax.sharding.AxisType.Auto,), devices=cpu_devices[:2])
    x = jax.random.normal(jax.random.key(1), (2, 256, FEATURES))
    lengths = jnp.array([256, 200])
    expected = _apply(_layer(), x, {"seq_lengths": lengths})
    permutation = zigzag_order(256, 2) if order == "zigzag" else np.arange(256)
    layer = _layer(context_axis="seq", context_order=order)
    apply = jax.shard_map(
        lambda x: layer(x, seq_lengths=lengths), mesh=mesh, in_specs=P(None, "seq"), out_specs=P(None, "seq")
    )
    actual = jax.jit(apply)(x[:, permutation])[:, np.argsort(permutation)]
    assert_close(actual, expected, rtol=0, atol=4.4e-3)  # heads are bfloat16, values up to 2.4


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        (
            {"num_heads": 5},
            ValueError,
            "num_heads: expected a divisor of the 32 input features, got 5; or pass head_dim",
        ),
        ({"num_kv_heads": 3}, ValueError, "num_kv_heads: expected a divisor of num_heads=4, got 3"),
        ({"head_dim": 7}, ValueError, "head_dim: expected an even number .* got 7"),
        ({"dtype": jnp.float16}, TypeError, "dtype: expected None, bfloat16 or float32, got float16"),
    ],
)
def test_refuses_fields(fields, error, message):
    with pytest.raises(error, match=message):
        _layer(**({"num_kv_heads": None} | fields))


@pytest.mark.parametrize(
    ("x", "arguments", "error", "message"),
    [
        (jnp.ones((2, LENGTH, 16)), {}, ValueError, r"x: expected \[\*B, T, 32\], got shape \(2, 8, 16\)"),
        (X, {"segment_ids": np.ones((LENGTH,), int)}, ValueError, r"segment_ids: expected shape \(2, 8\), got \(8,\)"),
        (X, {"seq_lengths": np.ones((2,))}, TypeError, "seq_lengths: expected an integer dtype, got float"),
        (X, {"positions": np.arange(7)}, ValueError, r"positions: expected shape \(8,\) or \(2, 8\), got \(7,\)"),
    ],
)
def test_refuses_inputs(x, arguments, error, message):
    with pytest.raises(error, match=message):
        _layer()(x, **arguments)
