"""Linen's `Attention`."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_fp4attn
from jax_fp4attn import SegmentIds, recipes
from jax_fp4attn.checkpoint_policies import save_attention
from jax_fp4attn.flax import apply_rotary
from jax_fp4attn.flax.linen import Attention
from tests.assertions import assert_close

FEATURES, LENGTH = 32, 8
X = jax.random.normal(jax.random.key(0), (2, LENGTH, FEATURES))

# Two query heads a key head. The recipe is the quickest to compile, and has no block scales, through which one segment
# could be felt in another.
plain = Attention(num_heads=4, num_kv_heads=2, recipe=recipes.bf16)


@functools.partial(jax.jit, static_argnums=0)
def _init(layer: Any, x: jax.Array = X) -> Any:
    return layer.init(jax.random.key(1), x)


@functools.partial(jax.jit, static_argnums=0)
def _apply(layer: Any, variables: Any, x: jax.Array, **arguments: Any) -> Any:
    return layer.apply(variables, x, **arguments)


@functools.partial(jax.jit, static_argnums=0)
def _gradient(layer: Any, variables: Any, x: jax.Array, weights: jax.Array, **arguments: Any) -> Any:
    """Of the parameters and the input."""

    def loss(variables, x):
        return (layer.apply(variables, x, **arguments) * weights).astype(jnp.float32).sum()

    return jax.grad(loss, argnums=(0, 1))(variables, x)


def _equal(actual, expected):
    assert_close(actual, expected, rtol=0, atol=0)


def test_parameters_are_named_shaped_and_drawn_as_flax_does():
    ours = Attention(num_heads=4, use_bias=True, recipe=recipes.bf16)
    _equal(_init(ours), _init(nn.MultiHeadDotProductAttention(num_heads=4)))
    assert all("bias" not in params for params in _init(plain)["params"].values())


def test_is_projections_rotary_embedding_and_attention():
    layer = plain.clone(head_dim=6, use_bias=True, rope_theta=100.0, local_window_size=(3, 0))
    layer = layer.clone(bias_init=nn.initializers.normal(0.5))
    variables = _init(layer)
    segment_ids = jnp.array([[1] * 5 + [2] * 3, [1] * 6 + [0] * 2])
    positions = jnp.array([[*range(5), *range(3)], [*range(6), 0, 0]])

    @jax.jit
    def expected(params, x):
        def project(name, inputs, equation):
            return jnp.einsum(equation, inputs, params[name]["kernel"]) + params[name]["bias"]

        x = jnp.where((segment_ids > 0)[..., None], x, 0)
        query, key, value = (project(name, x, "btf,fnh->btnh") for name in ("query", "key", "value"))
        heads = jax_fp4attn.attention(
            apply_rotary(query, positions, 100.0),
            apply_rotary(key, positions, 100.0),
            value,
            is_causal=True,
            local_window_size=(3, 0),
            segment_ids=SegmentIds(segment_ids, segment_ids),
            recipe=recipes.bf16,
        )
        return project("out", heads, "btnh,nhf->btf")

    actual = _apply(layer, variables, X, segment_ids=segment_ids, positions=positions)
    assert_close(actual, expected(variables["params"], X), rtol=1e-5, atol=1e-5)


def test_positions_matter_only_with_rotary_embedding():
    variables = _init(plain)
    # A common offset changes nothing but rounding, other distances do.
    moved = _apply(plain, variables, X, positions=jnp.arange(LENGTH) * 3)
    assert jnp.abs(moved - _apply(plain, variables, X)).max() > 1e-3
    without = plain.clone(rope_theta=None)
    _equal(_apply(without, variables, X, positions=jnp.arange(LENGTH) * 3), _apply(without, variables, X))


def test_causal():
    variables = _init(plain)
    future = X.at[:, 5:].add(1.0)
    _equal(_apply(plain, variables, future)[:, :5], _apply(plain, variables, X)[:, :5])
    full = plain.clone(is_causal=False)
    assert jnp.abs(_apply(full, variables, future)[:, :5] - _apply(full, variables, X)[:, :5]).max() > 1e-3


@pytest.mark.parametrize(("is_causal", "recipe"), [(True, recipes.train), (False, recipes.square)])
def test_default_recipe(is_causal, recipe):
    variables = _init(plain)
    by_default, by_name = (plain.clone(is_causal=is_causal, recipe=r) for r in (None, recipe))
    _equal(_apply(by_default, variables, X), _apply(by_name, variables, X))


@pytest.mark.parametrize("is_causal", [True, False])
def test_lengths_shut_out_what_lies_beyond(is_causal):
    layer = plain.clone(is_causal=is_causal)
    variables = _init(layer)
    lengths = jnp.array([LENGTH, 5])
    poisoned = X.at[1, 5:].set(jnp.nan)
    actual = _apply(layer, variables, poisoned, seq_lengths=lengths)
    _equal(actual, _apply(layer, variables, X, seq_lengths=lengths))
    assert not actual[1, 5:].any()
    short = _apply(layer, variables, X[1:, :5])
    assert_close(actual[1:, :5], short, rtol=1e-5, atol=1e-6)
    gradients = _gradient(layer, variables, poisoned, X, seq_lengths=lengths)
    _equal(gradients, _gradient(layer, variables, X, X, seq_lengths=lengths))
    assert not gradients[1][1, 5:].any()


def test_segments_are_isolated_and_padding_is_shut_out():
    variables = _init(plain)
    segment_ids = jnp.array([1, 1, 1, 2, 2, 2, 0, 0])[None]
    positions = jnp.array([0, 1, 2, 0, 1, 2, 0, 0])
    apply = functools.partial(_apply, plain, variables, segment_ids=segment_ids, positions=positions)
    packed = apply(X[:1])
    assert_close(packed[:, :3], _apply(plain, variables, X[:1, :3]), rtol=1e-5, atol=1e-6)
    assert_close(packed[:, 3:6], _apply(plain, variables, X[:1, 3:6]), rtol=1e-5, atol=1e-6)
    assert not packed[:, 6:].any()
    _equal(apply(X[:1].at[:, 6:].set(jnp.nan)), packed)
    _equal(apply(X[:1].at[:, :3].mul(-50.0))[:, 3:], packed[:, 3:])
    gradients = _gradient(
        plain, variables, X[:1].at[:, 6:].set(jnp.nan), X[:1], segment_ids=segment_ids, positions=positions
    )
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))


@pytest.mark.parametrize(("dtype", "recipe"), [(None, recipes.bf16), (jnp.bfloat16, recipes.train)])
def test_gradients(dtype, recipe):
    layer = plain.clone(dtype=dtype, recipe=recipe)
    variables = _init(layer)
    assert jax.eval_shape(layer.apply, variables, X).dtype == (dtype or jnp.float32)
    gradients = _gradient(layer, variables, X, X)
    for leaf, like in zip(jax.tree.leaves(gradients), jax.tree.leaves((variables, X)), strict=True):
        assert leaf.dtype == like.dtype == jnp.float32
        assert np.isfinite(leaf).all() and leaf.any()


def test_bfloat16_parameters_and_input():
    layer = plain.clone(param_dtype=jnp.bfloat16)
    variables = jax.eval_shape(layer.init, jax.random.key(0), X)
    assert {leaf.dtype for leaf in jax.tree.leaves(variables)} == {jnp.dtype(jnp.bfloat16)}
    assert jax.eval_shape(layer.apply, variables, X.astype(jnp.bfloat16)).dtype == jnp.bfloat16


def test_vmap_and_batch_dimensions():
    variables = _init(plain)
    expected = _apply(plain, variables, X)
    _equal(jax.jit(jax.vmap(lambda x: plain.apply(variables, x)))(X), expected)
    lengths = jnp.full((1, 2), LENGTH)
    _equal(_apply(plain, variables, X[None], seq_lengths=lengths)[0], expected)
    assert jax.eval_shape(plain.apply, variables, X[0]).shape == X[0].shape


class Block(nn.Module):
    """As `nn.scan` wants it."""

    remat: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, _: None = None) -> tuple[jax.Array, None]:
        attention = nn.remat(Attention, policy=save_attention) if self.remat else Attention
        x += attention(num_heads=4, num_kv_heads=2, recipe=recipes.bf16, name="attention")(nn.RMSNorm()(x))
        return x, None


class Stack(nn.Module):
    """Two blocks."""

    remat: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scan = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
        return scan(self.remat, name="blocks")(x, None)[0]


def test_scan_over_layers():
    variables = _init(Stack())
    x = X
    for i in range(2):
        block = jax.tree.map(lambda leaf, i=i: leaf[i], variables["params"]["blocks"])
        x = _apply(Block(), {"params": block}, x)[0]
    assert_close(_apply(Stack(), variables, X), x, rtol=1e-5, atol=1e-5)


def test_remat_with_save_attention():
    variables = _init(Stack())
    expected = _gradient(Stack(), variables, X, X)
    actual = _gradient(Stack(remat=True), variables, X, X)
    assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def _partitioned(**arguments: Any) -> Attention:
    normal = nn.initializers.normal(0.1)
    return Attention(
        num_heads=4,
        num_kv_heads=2,
        recipe=recipes.bf16,
        use_bias=True,
        kernel_init=nn.with_partitioning(normal, (None, "model", None)),
        out_kernel_init=nn.with_partitioning(normal, ("model", None, None)),
        bias_init=nn.with_partitioning(normal, ("model", None)),
        out_bias_init=nn.with_partitioning(normal, (None,)),
    )


def test_partitioning_metadata(cpu_devices):
    mesh = jax.make_mesh((2,), ("model",), (jax.sharding.AxisType.Auto,), devices=cpu_devices[:2])
    layer = _partitioned()
    specs = nn.get_partition_spec(jax.eval_shape(layer.init, jax.random.key(0), X))["params"]
    assert specs["query"] == {"kernel": P(None, "model", None), "bias": P("model", None)}
    assert specs["out"] == {"kernel": P("model", None, None), "bias": P(None)}
    expected = _apply(layer, _init(layer), X)
    with jax.set_mesh(mesh):
        variables = _init(layer)
        kernel = nn.meta.unbox(variables)["params"]["key"]["kernel"]
        assert kernel.addressable_shards[0].data.shape == (FEATURES, 1, 8)
        assert_close(_apply(layer, variables, X), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"num_heads": 0}, ValueError, "num_heads: expected a positive int, got 0"),
        (
            {"num_heads": 5},
            ValueError,
            "num_heads: expected a divisor of the 32 input features, got 5; or pass head_dim",
        ),
        ({"num_kv_heads": 3}, ValueError, "num_kv_heads: expected a divisor of num_heads=4, got 3"),
        ({"num_kv_heads": 2.0}, ValueError, "num_kv_heads: expected a positive int, got 2.0"),
        ({"head_dim": 7}, ValueError, "head_dim: expected an even number .* got 7"),
        ({"head_dim": -8}, ValueError, "head_dim: expected a positive int, got -8"),
        ({"head_dim": 258}, NotImplementedError, "head sizes up to 256 .* H=258"),
        ({"dtype": jnp.float16}, TypeError, "dtype: expected None, bfloat16 or float32, got float16"),
        ({"rope_theta": -1.0}, ValueError, "theta: expected a finite positive number, got -1.0"),
        ({"local_window_size": -1}, ValueError, "local_window_size: "),
        ({"recipe": "fast"}, TypeError, "recipe: expected a jax_fp4attn.Recipe"),
        ({"implementation": "fast"}, ValueError, "implementation: "),
    ],
)
def test_refuses_fields(fields, error, message):
    layer = Attention(**({"num_heads": 4} | fields))
    with pytest.raises(error, match=message):
        jax.eval_shape(layer.init, jax.random.key(0), X)


@pytest.mark.parametrize(
    ("x", "arguments", "error", "message"),
    [
        (jnp.ones(FEATURES), {}, ValueError, r"x: expected \[\*B, T, features\], got shape \(32,\)"),
        (X, {"segment_ids": np.ones((LENGTH,), int)}, ValueError, r"segment_ids: expected shape \(2, 8\), got \(8,\)"),
        (X, {"segment_ids": np.ones((2, LENGTH))}, TypeError, "segment_ids: expected an integer dtype, got float"),
        (X, {"seq_lengths": np.ones((3,), int)}, ValueError, r"seq_lengths: expected shape \(2,\), got \(3,\)"),
        (X, {"seq_lengths": np.ones((2,))}, TypeError, "seq_lengths: expected an integer dtype, got float"),
        (X, {"positions": np.arange(7)}, ValueError, r"positions: expected shape \(8,\) or \(2, 8\), got \(7,\)"),
    ],
)
def test_refuses_inputs(x, arguments, error, message):
    with pytest.raises(error, match=message):
        jax.eval_shape(lambda x: plain.init(jax.random.key(0), x, **arguments), x)
