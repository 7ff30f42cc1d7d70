"""`attention_fn` inside Flax's own attention layers."""

import functools
import inspect
import subprocess
import sys
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype as nnx_promote_dtype

import jax_fp4attn
from jax_fp4attn import recipes
from jax_fp4attn.flax import attention_fn, make_attention_fn
from tests.assertions import assert_close

FEATURES, HEADS, LENGTH = 32, 4, 8

# The quickest recipe to compile, where the numbers do not matter.
plain = make_attention_fn(recipe=recipes.bf16)

# Every argument of Flax's two functions, beside query, key and value. Each has a test below.
HONOURED = {"bias", "mask", "dtype", "promote_dtype", "is_causal"}
REFUSED: dict[str, Any] = {
    "dropout_rate": 0.1,
    "precision": jax.lax.Precision.HIGHEST,
    "module": object(),
    "einsum_dot_general": jax.lax.dot_general,
    "qk_attn_weights_einsum": jnp.einsum,
    "attn_weights_value_einsum": jnp.einsum,
}
WITHOUT_EFFECT: dict[str, Any] = {
    "broadcast_dropout": False,
    "dropout_rng": jax.random.key(0),
    "force_fp32_for_softmax": True,
    "deterministic": True,
}
NAMED = HONOURED | REFUSED.keys() | WITHOUT_EFFECT.keys()


def _normal(*shape: int, seed: int = 0, dtype: jnp.dtype = jnp.float32) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def _qkv(length: int = LENGTH, num_keys: int = LENGTH, kv_heads: int = HEADS) -> Any:
    return (
        _normal(2, length, HEADS, 8),
        _normal(2, num_keys, kv_heads, 8, seed=1),
        _normal(2, num_keys, kv_heads, 8, seed=2),
    )


_STATIC = ("recipe", "is_causal", "scale", "implementation", "local_window_size")

# Compiled, because the operator is slow op by op, and shared between tests.
_attention = jax.jit(jax_fp4attn.attention, static_argnames=_STATIC)


@functools.partial(jax.jit, static_argnums=0, static_argnames=("static", *_STATIC))
def _adapter(adapter: Any, *args: Any, static: Any = (), **arguments: Any) -> jax.Array:
    return adapter(*args, **dict(static), **arguments)


def _equal(actual, expected):
    assert_close(actual, expected, rtol=0, atol=0)


class _AnyName(inspect.Signature):
    """A signature that has a parameter of any name, so that Linen filters nothing."""

    class _Parameters:
        def __contains__(self, name):
            return True

    parameters = property(lambda self: self._Parameters())


class _Recorder:
    __signature__ = _AnyName()

    def __init__(self):
        self.arguments = {}

    def __call__(self, query, key, value, **arguments):
        self.arguments = arguments
        return query


class TestSignature:
    @pytest.mark.parametrize("flax_function", [nn.dot_product_attention, nnx.dot_product_attention])
    def test_names_every_argument_of_flax(self, flax_function):
        theirs = inspect.signature(flax_function).parameters
        ours = inspect.signature(attention_fn).parameters
        assert theirs.keys() - {"query", "key", "value"} <= NAMED, "new in this Flax: honour or refuse it"
        assert theirs.keys() <= ours.keys()
        same_default = theirs.keys() - {"query", "key", "value", "promote_dtype"}
        assert {n: theirs[n].default for n in same_default} == {n: ours[n].default for n in same_default}

    def test_has_no_argument_without_a_test(self):
        assert inspect.signature(attention_fn).parameters.keys() == NAMED | {"query", "key", "value"}

    def test_takes_the_common_arguments_in_flax_order(self):
        theirs = [inspect.signature(f).parameters for f in (nn.dot_product_attention, nnx.dot_product_attention)]
        common = [name for name in theirs[0] if name in theirs[1]]
        positional = [
            p.name for p in inspect.signature(attention_fn).parameters.values() if p.kind is not p.KEYWORD_ONLY
        ]
        assert positional == common

    def test_names_what_the_linen_layer_passes(self):
        recorder = _Recorder()
        layer = nn.MultiHeadDotProductAttention(HEADS, attention_fn=recorder)
        x = _normal(2, LENGTH, FEATURES)
        layer.init_with_output(jax.random.key(0), x, sow_weights=True)
        assert "mask" in recorder.arguments
        assert recorder.arguments.keys() <= NAMED

    def test_names_what_the_nnx_layer_passes(self):
        recorder = _Recorder()
        layer = nnx.MultiHeadAttention(HEADS, FEATURES, attention_fn=recorder, decode=False, rngs=nnx.Rngs(0))
        layer(_normal(2, LENGTH, FEATURES), sow_weights=True)
        assert {"mask", "is_causal"} <= recorder.arguments.keys()
        assert recorder.arguments.keys() <= NAMED


class TestArguments:
    @pytest.mark.parametrize("name", REFUSED)
    def test_refused(self, name):
        with pytest.raises(NotImplementedError, match=f"{name}: expected .*got"):
            attention_fn(*_qkv(), **{name: REFUSED[name]})

    def test_without_effect(self):
        static = tuple((name, x) for name, x in WITHOUT_EFFECT.items() if name != "dropout_rng")
        actual = _adapter(plain, *_qkv(), static=static, dropout_rng=WITHOUT_EFFECT["dropout_rng"])
        _equal(actual, _attention(*_qkv(), recipe=recipes.bf16))

    def test_dropout_is_off_when_deterministic(self):
        actual = _adapter(plain, *_qkv(), static=(("dropout_rate", 0.5), ("deterministic", True)))
        _equal(actual, _attention(*_qkv(), recipe=recipes.bf16))

    @pytest.mark.parametrize(
        "precision", ["default", jax.lax.Precision.DEFAULT, (None, jax.lax.Precision.DEFAULT), ("default", "default")]
    )
    def test_takes_default_precision(self, precision):
        jax.eval_shape(lambda q, k, v: attention_fn(q, k, v, precision=precision), *_qkv())

    @pytest.mark.parametrize(
        "precision", ["high", "highest", (None, "highest"), jax.lax.DotAlgorithmPreset.BF16_BF16_F32, 3]
    )
    def test_refuses_other_precision(self, precision: Any):
        with pytest.raises(NotImplementedError, match=r"precision: expected None .* recipes.bf16"):
            attention_fn(*_qkv(), **{"precision": precision})

    def test_bias(self):
        bias = _normal(2, HEADS, LENGTH, LENGTH, seed=3)
        _equal(_adapter(plain, *_qkv(), bias), _attention(*_qkv(), bias, recipe=recipes.bf16))

    @pytest.mark.parametrize("dtype", [jnp.bool_, jnp.float32, jnp.bfloat16, jnp.int32])
    def test_mask(self, dtype):
        keep = jax.random.bernoulli(jax.random.key(4), 0.6, (2, 1, LENGTH, LENGTH))
        actual = _adapter(plain, *_qkv(), mask=keep.astype(dtype))
        _equal(actual, _attention(*_qkv(), mask=keep, recipe=recipes.bf16))

    def test_dtype_casts(self):
        actual = _adapter(plain, *_qkv(), static=(("dtype", jnp.bfloat16),))
        _equal(actual, _attention(*(x.astype(jnp.bfloat16) for x in _qkv()), recipe=recipes.bf16))

    def test_mixed_dtypes_promote_as_in_flax(self):
        query, key, value = _qkv()
        assert jax.eval_shape(attention_fn, query.astype(jnp.bfloat16), key, value).dtype == jnp.float32

    def test_promote_dtype(self):
        calls = []

        def promote_dtype(arrays, *, dtype):
            calls.append(dtype)
            return nnx_promote_dtype(arrays, dtype=dtype)

        def function(query, key, value):
            return attention_fn(query, key, value, dtype=jnp.bfloat16, promote_dtype=promote_dtype)

        assert jax.eval_shape(function, *_qkv()).dtype == jnp.bfloat16
        assert calls == [jnp.bfloat16]

    @pytest.mark.parametrize(("made", "asked"), [(True, False), (False, True), (True, True)])
    def test_is_causal_from_either_side(self, made, asked):
        adapter = make_attention_fn(is_causal=made, recipe=recipes.bf16)
        actual = _adapter(adapter, *_qkv(), is_causal=asked)
        _equal(actual, _attention(*_qkv(), is_causal=True, recipe=recipes.bf16))

    @pytest.mark.parametrize(("is_causal", "recipe"), [(True, recipes.train), (False, recipes.square)])
    def test_default_recipe_depends_on_is_causal(self, is_causal, recipe):
        actual = _adapter(attention_fn, *_qkv(), is_causal=is_causal)
        _equal(actual, _attention(*_qkv(), is_causal=is_causal, recipe=recipe))

    def test_factory_arguments_reach_the_operator(self):
        arguments: Any = {
            "recipe": recipes.bf16,
            "scale": 0.3,
            "local_window_size": (2, 0),
            "is_causal": True,
        }
        qkv = _qkv(kv_heads=2)
        adapter = make_attention_fn(implementation=["reference"], **arguments)
        _equal(_adapter(adapter, *qkv), _attention(*qkv, **arguments))
        with pytest.raises(ValueError, match="implementation: "):
            make_attention_fn(implementation=["reference", "nowhere"])(*qkv)

    def test_a_split_sequence_reaches_the_operator(self):
        bias = jnp.zeros((1, 1, LENGTH, LENGTH))
        with pytest.raises(NotImplementedError, match="bias: expected None with context_axis"):
            make_attention_fn(context_axis="seq")(*_qkv(), bias)
        with pytest.raises(ValueError, match="context_order: expected a mesh with axis 'seq' in scope"):
            make_attention_fn(context_axis="seq", context_order="zigzag")(*_qkv())
        with pytest.raises(ValueError, match="context_order: expected 'contiguous' without context_axis"):
            make_attention_fn(context_order="zigzag")(*_qkv())

    def test_equal_adapters_are_equal(self):
        made = [make_attention_fn(recipe=recipes.fast, implementation=["reference"]) for _ in range(2)]
        assert made[0] == made[1] and hash(made[0]) == hash(made[1])
        assert attention_fn == make_attention_fn() != make_attention_fn(is_causal=True)
        windows = [make_attention_fn(local_window_size=window) for window in ((2, 3), [2, 3], np.array([2, 3]))]
        assert len(set(windows)) == 1
        with pytest.raises(ValueError, match="local_window_size: expected an int or"):
            make_attention_fn(local_window_size=[2])(*_qkv())

    @pytest.mark.parametrize(
        ("arguments", "error", "message"),
        [
            ({"dtype": jnp.float16}, TypeError, "query: expected bfloat16 or float32, got float16"),
            ({"is_causal": jnp.array(True)}, TypeError, "is_causal: expected a Python bool"),
            (
                {"mask": jnp.ones((2, FEATURES, 1, LENGTH, LENGTH))},
                ValueError,
                r"mask: expected \[\*B, N, T, S\] = \(2, 4, 8, 8\) .* got shape \(2, 32, 1, 8, 8\); .*token ids",
            ),
            ({"mask": jnp.ones((LENGTH, LENGTH))}, ValueError, r"mask: .*\(2, 4, 8, 8\).* \(8, 8\); insert axes"),
            ({"mask": jnp.ones((2, 1, LENGTH, 7))}, ValueError, r"mask: .*\(2, 4, 8, 8\).* \(2, 1, 8, 7\)"),
            ({"bias": jnp.ones((LENGTH, LENGTH))}, ValueError, r"bias: .*\(2, 4, 8, 8\).* \(8, 8\)"),
        ],
    )
    def test_errors(self, arguments, error, message):
        with pytest.raises(error, match=message):
            attention_fn(*_qkv(), **arguments)

    def test_refuses_causal_decoding(self):
        with pytest.raises(NotImplementedError, match="is_causal: expected False for one query and S=8 keys"):
            attention_fn(*_qkv(length=1), is_causal=True)
        jax.eval_shape(make_attention_fn(is_causal=True), *_qkv(length=1, num_keys=1))


def _linen(**arguments):
    layer = nn.MultiHeadDotProductAttention(HEADS, **arguments)
    return layer, jax.jit(layer.init)(jax.random.key(1), _normal(2, LENGTH, FEATURES))


@functools.partial(jax.jit, static_argnames=_STATIC)
def _by_hand(params, x, **arguments):
    """The layer with the public operator between Flax's own projections, on Linen's parameters."""

    def dense(name, features, axis, inputs):
        return nn.DenseGeneral(features, axis).apply({"params": params[name]}, inputs)

    kv_heads = params["key"]["kernel"].shape[1]
    query = dense("query", (HEADS, FEATURES // HEADS), -1, x)
    key, value = (dense(name, (kv_heads, FEATURES // HEADS), -1, x) for name in ("key", "value"))
    return dense("out", FEATURES, (-2, -1), jax_fp4attn.attention(query, key, value, **arguments))


class TestLinen:
    x = _normal(2, LENGTH, FEATURES)

    def test_causal_float_mask_gives_the_causal_result(self):
        layer, variables = _linen(attention_fn=make_attention_fn(recipe=recipes.train))
        mask = nn.make_causal_mask(jnp.ones((2, LENGTH)))
        assert mask.dtype == jnp.float32
        actual = jax.jit(layer.apply)(variables, self.x, mask=mask)
        _equal(actual, _by_hand(variables["params"], self.x, is_causal=True, recipe=recipes.train))

    def test_causal_adapter(self):
        layer, variables = _linen(attention_fn=make_attention_fn(is_causal=True, recipe=recipes.bf16))
        actual = jax.jit(layer.apply)(variables, self.x)
        _equal(actual, _by_hand(variables["params"], self.x, is_causal=True, recipe=recipes.bf16))

    @pytest.mark.filterwarnings("ignore:SelfAttention:DeprecationWarning")
    def test_self_attention_with_a_padding_mask(self):
        # This recipe has no block scales, through which keys behind a mask could be felt.
        layer = nn.SelfAttention(HEADS, attention_fn=plain)
        variables = jax.jit(layer.init)(jax.random.key(1), self.x)
        keep = jnp.arange(LENGTH) < jnp.array([LENGTH, 5])[:, None]
        mask = nn.make_attention_mask(keep, keep)
        apply = jax.jit(layer.apply)
        actual = apply(variables, self.x, mask=mask)
        _equal(actual, _by_hand(variables["params"], self.x, mask=mask != 0, recipe=recipes.bf16))
        other = apply(variables, self.x.at[1, 5:].set(7.0), mask=mask)
        _equal(other[1, :5], actual[1, :5])

    def test_bfloat16(self):
        layer, variables = _linen(attention_fn=make_attention_fn(is_causal=True), dtype=jnp.bfloat16)
        assert jax.eval_shape(layer.apply, variables, self.x).dtype == jnp.bfloat16

    @pytest.mark.parametrize(
        ("arguments", "call", "message"),
        [
            ({"dropout_rate": 0.1, "deterministic": False}, {"dropout_rng": jax.random.key(0)}, "dropout_rate: .* 0.1"),
            ({"precision": "highest"}, {}, "precision: "),
            ({}, {"sow_weights": True}, "module: .* sow_weights=False"),
            ({"qk_attn_weights_einsum_cls": lambda: jnp.einsum}, {}, "qk_attn_weights_einsum: "),
        ],
    )
    def test_refusals_arrive_through_the_layer(self, arguments, call, message):
        layer = nn.MultiHeadDotProductAttention(HEADS, attention_fn=attention_fn, **arguments)
        with pytest.raises(NotImplementedError, match=message):
            jax.eval_shape(lambda: layer.init(jax.random.key(0), self.x, **call))

    def test_mask_of_features_is_explained(self):
        layer, variables = _linen(attention_fn=attention_fn)
        with pytest.raises(ValueError, match=r"mask: .*\(2, 4, 8, 8\).*make_causal_mask takes token ids"):
            layer.apply(variables, self.x, mask=nn.make_causal_mask(self.x))

    def test_decodes_as_it_attends(self):
        layer = nn.MultiHeadDotProductAttention(HEADS, attention_fn=plain, decode=True)
        params, cache = (jax.jit(layer.init)(jax.random.key(1), self.x)[name] for name in ("params", "cache"))

        @jax.jit
        def step(cache, token):
            output, updated = layer.apply({"params": params, "cache": cache}, token, mutable=["cache"])
            return updated["cache"], output[:, 0]

        cache, outputs = jax.lax.scan(step, cache, jnp.swapaxes(self.x, 0, 1)[:, :, None])
        expected = _by_hand(params, self.x, is_causal=True, recipe=recipes.bf16)
        assert_close(jnp.swapaxes(outputs, 0, 1), expected, rtol=0, atol=1e-5)

    def test_gradients(self):
        layer, variables = _linen(attention_fn=make_attention_fn(is_causal=True), dtype=jnp.bfloat16)

        def loss(variables, x):
            return layer.apply(variables, x).astype(jnp.float32).var()

        gradients = jax.jit(jax.grad(loss, argnums=(0, 1)))(variables, self.x)
        _assert_live(gradients, like=(variables, self.x))


def _assert_live(gradients, like):
    """Asserts gradients of the right dtypes, finite and nonzero."""
    assert jax.tree.map(lambda g: (g.shape, g.dtype), gradients) == jax.tree.map(lambda x: (x.shape, x.dtype), like)
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradients):
        assert np.isfinite(leaf.astype(jnp.float32)).all(), path
        # A bias of the keys adds one number to all of a row's scores, which softmax ignores.
        if "['key']['bias']" not in jax.tree_util.keystr(path):
            assert (leaf != 0).any(), path


def _nnx(**arguments: Any) -> nnx.MultiHeadAttention:
    arguments = {"attention_fn": plain, "decode": False, **arguments}
    return nnx.MultiHeadAttention(HEADS, FEATURES, rngs=nnx.Rngs(0), **arguments)


def _params(layer):
    """Linen's parameters of an NNX layer."""
    return {
        name: {"kernel": getattr(layer, name).kernel[...], "bias": getattr(layer, name).bias[...]}
        for name in ("query", "key", "value", "out")
    }


class TestNnx:
    x = _normal(2, LENGTH, FEATURES)

    @pytest.mark.parametrize("kv_heads", [2, 1])
    def test_causal_with_grouped_heads(self, kv_heads):
        layer = _nnx(num_kv_heads=kv_heads)
        actual = nnx.jit(lambda layer, x: layer(x, is_causal=True))(layer, self.x)
        assert_close(
            actual, _by_hand(_params(layer), self.x, is_causal=True, recipe=recipes.bf16), rtol=1e-5, atol=1e-6
        )

    def test_causal_and_a_padding_mask(self):
        layer = _nnx()
        keep = jnp.arange(LENGTH) < jnp.array([LENGTH, 5])[:, None]
        mask = nnx.make_attention_mask(keep, keep)
        actual = nnx.jit(lambda layer, x, mask: layer(x, mask=mask, is_causal=True))(layer, self.x, mask)
        expected = _by_hand(_params(layer), self.x, mask=mask != 0, is_causal=True, recipe=recipes.bf16)
        assert_close(actual, expected, rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
    def test_decodes_as_it_attends(self, dtype):
        layer = _nnx(attention_fn=make_attention_fn(recipe=recipes.train), num_kv_heads=2, dtype=dtype)
        expected = nnx.jit(lambda layer, x: layer(x, is_causal=True))(layer, self.x)
        layer.init_cache(self.x.shape, dtype or jnp.float32)
        step = nnx.jit(lambda layer, token: layer(token, decode=True))
        outputs = [step(layer, self.x[:, i : i + 1]) for i in range(LENGTH)]
        assert_close(jnp.concatenate(outputs, axis=1), expected, rtol=0, atol=1e-5 if dtype is None else 0.02)

    def test_decoding_with_a_causal_adapter_is_refused(self):
        layer = _nnx(attention_fn=make_attention_fn(is_causal=True), decode=True)
        layer.init_cache(self.x.shape)
        with pytest.raises(NotImplementedError, match="is_causal: expected False for one query"):
            layer(self.x[:, :1])

    @pytest.mark.parametrize(
        ("arguments", "call", "message"),
        [
            ({"dropout_rate": 0.1}, {"deterministic": False, "rngs": nnx.Rngs(0)}, "dropout_rate: .* 0.1"),
            ({"precision": "highest"}, {}, "precision: "),
            ({}, {"sow_weights": True}, "module: .* sow_weights=False"),
        ],
    )
    def test_refusals_arrive_through_the_layer(self, arguments, call, message):
        with pytest.raises(NotImplementedError, match=message):
            _nnx(**arguments)(self.x, **call)

    def test_gradients(self):
        layer = _nnx(num_kv_heads=2)

        @nnx.jit
        def gradient(layer, x):
            return nnx.grad(lambda layer: layer(x, is_causal=True).var())(layer)

        _assert_live(nnx.to_pure_dict(gradient(layer, self.x)), nnx.to_pure_dict(nnx.state(layer, nnx.Param)))

    def test_a_model_built_again_is_not_traced_again(self):
        traces: list[None] = []

        @nnx.jit
        def apply(layer, x):
            traces.append(None)
            return layer(x)

        for _ in range(2):
            apply(_nnx(attention_fn=make_attention_fn(recipe=recipes.bf16)), self.x)
        assert len(traces) == 1


def test_vmap():
    qkv = _qkv()
    actual = jax.jit(jax.vmap(make_attention_fn(is_causal=True, recipe=recipes.bf16)))(*qkv)
    _equal(actual, _attention(*qkv, is_causal=True, recipe=recipes.bf16))


def test_import_without_flax():
    program = """
import sys
import jax_fp4attn
assert "flax" not in sys.modules, "jax_fp4attn imports flax"
sys.modules["flax"] = None
try:
    import jax_fp4attn.flax
except ImportError as error:
    print(error)
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "pip install 'jax-fp4attn[flax]'" in run.stdout
