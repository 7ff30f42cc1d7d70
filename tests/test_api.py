"""`attention`: what it accepts, what it refuses and how it says so, its defaults and its layout."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jax_fp4attn
from jax_fp4attn import SegmentIds, recipes
from tests import oracles, shapes
from tests.shapes import SHAPES, Shape

SHAPE = Shape((2,), 6, 8, 4, 2, 16)
Q, K, V, _, _ = shapes.normal(SHAPE).jax()


def attend(**changes: Any) -> Any:
    """A call that is fine but for `changes`."""
    return jax_fp4attn.attention(**{"query": Q, "key": K, "value": V, **changes})


def array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
    return jnp.zeros(shape, dtype)


class TestRefusals:
    """Each names the argument, what it expected and what it got, and raises before anything is computed."""

    @pytest.mark.parametrize(
        ("changes", "error", "message"),
        [
            (
                {"query": array(6, 4)},
                ValueError,
                r"query: expected \[\*B, length, heads, head size\], got shape \(6, 4\)",
            ),
            ({"key": array(8, 2, 16)}, ValueError, r"key: expected the query's rank 4, got shape \(8, 2, 16\)"),
            ({"key": array(3, 8, 2, 16)}, ValueError, r"key: expected shape \(2, 8, 2, 16\)"),
            ({"key": array(2, 8, 2, 18)}, ValueError, r"key: expected shape \(2, 8, 2, 16\)"),
            ({"value": array(2, 9, 2, 16)}, ValueError, r"value: expected shape \(2, 8, 2, 16\) .*got \(2, 9, 2, 16\)"),
            ({"value": array(2, 8, 1, 16)}, ValueError, r"value: expected shape \(2, 8, 2, 16\)"),
            ({"value": array(2, 8, 2, 18)}, ValueError, r"value: expected shape \(2, 8, 2, 16\)"),
            (
                {"key": array(2, 8, 3, 16), "value": array(2, 8, 3, 16)},
                ValueError,
                r"key: expected a number of heads K that divides the query's N=4, got K=3",
            ),
            ({"key": array(2, 8, 8, 16), "value": array(2, 8, 8, 16)}, ValueError, "key: .*divides.*got K=8"),
            ({"key": array(2, 8, 0, 16), "value": array(2, 8, 0, 16)}, ValueError, "key: .*divides.*got K=0"),
            ({"query": array(2, 0, 4, 16)}, ValueError, "query, key: expected non-empty sequences, got T=0, S=8"),
            ({"key": array(2, 0, 2, 16), "value": array(2, 0, 2, 16)}, ValueError, "query, key: .*got T=6, S=0"),
            (
                {"query": array(0, 6, 4, 16), "key": array(0, 8, 2, 16), "value": array(0, 8, 2, 16)},
                ValueError,
                "query: expected a non-empty batch",
            ),
            ({"query": Q.astype(jnp.float16)}, TypeError, "query: expected bfloat16 or float32, got float16; cast it"),
            ({"key": K.astype(jnp.float16)}, TypeError, "key: expected bfloat16 or float32, got float16"),
            ({"value": V.astype(jnp.int32)}, TypeError, "value: expected bfloat16 or float32, got int32"),
            ({"query": np.zeros(Q.shape)}, TypeError, "query: expected bfloat16 or float32, got float64"),
            ({"query": Q.astype(jnp.float32)}, TypeError, "key: expected the query's dtype float32, got bfloat16"),
            ({"value": V.astype(jnp.float32)}, TypeError, "value: expected the query's dtype bfloat16, got float32"),
            ({"query": [[[1.0]]]}, TypeError, "query: expected a JAX or NumPy array, got list"),
            ({"key": None}, TypeError, "key: expected a JAX or NumPy array, got NoneType"),
            ({"mask": jnp.ones((2, 4, 6, 8))}, TypeError, "mask: expected bool .*got float32; use `mask != 0`"),
            ({"mask": jnp.ones((2, 4, 6, 8), int)}, TypeError, "mask: expected bool"),
            (
                {"mask": jnp.ones((2, 1, 4, 6, 8), bool)},
                ValueError,
                r"mask: expected \[\*B, N, T, S\] = \(2, 4, 6, 8\) or 1 in place of any of them, got shape",
            ),
            ({"mask": jnp.ones((6, 8), bool)}, ValueError, r"mask: expected \[\*B, N, T, S\]"),
            ({"mask": jnp.ones((2, 2, 6, 8), bool)}, ValueError, "mask: expected"),
            ({"mask": jnp.ones((2, 4, 8, 6), bool)}, ValueError, "mask: expected"),
            ({"bias": jnp.ones((2, 4, 6, 9))}, ValueError, r"bias: expected \[\*B, N, T, S\] = \(2, 4, 6, 8\)"),
            ({"bias": jnp.ones((6, 8))}, ValueError, "bias: expected"),
            ({"bias": jnp.ones((2, 4, 6, 8), bool)}, TypeError, "bias: expected a floating dtype, got bool"),
            ({"scale": 0}, ValueError, "scale: expected a positive number between .*, float32's range, got 0"),
            ({"scale": -0.5}, ValueError, "scale: expected a positive number"),
            ({"scale": float("nan")}, ValueError, "scale: expected a positive number"),
            ({"scale": float("inf")}, ValueError, "scale: expected a positive number"),
            ({"scale": 1e-40}, ValueError, "scale: expected a positive number between 1.2e-38"),
            ({"scale": 10**400}, ValueError, "scale: expected a positive number"),
            ({"scale": True}, TypeError, "scale: expected a Python number, got bool"),
            ({"scale": "1"}, TypeError, "scale: expected a Python number, got str"),
            ({"scale": jnp.float32(1)}, TypeError, "scale: expected a Python number"),
            ({"is_causal": 1}, TypeError, "is_causal: expected a Python bool, got int"),
            ({"is_causal": None}, TypeError, "is_causal: expected a Python bool, got NoneType"),
            ({"return_residual": 1}, TypeError, "return_residual: expected a Python bool"),
            (
                {"query_seq_lengths": jnp.array([1])},
                ValueError,
                r"query_seq_lengths: expected shape \(2,\), got \(1,\)",
            ),
            ({"query_seq_lengths": jnp.array(1)}, ValueError, r"query_seq_lengths: expected shape \(2,\), got \(\)"),
            ({"key_value_seq_lengths": jnp.ones((2, 1), int)}, ValueError, r"key_value_seq_lengths: expected shape"),
            ({"key_value_seq_lengths": jnp.array([1.0, 2.0])}, TypeError, "key_value_seq_lengths: expected an integer"),
            (
                {"query_seq_lengths": np.array([2**31, 1])},
                ValueError,
                "query_seq_lengths: expected int32 values, got 1 to",
            ),
            (
                {"segment_ids": SegmentIds(np.full((2, 6), 3_000_000_000, np.uint32), np.ones((2, 8), int))},
                ValueError,
                "segment_ids.query: expected int32 values, got 3000000000 to 3000000000",
            ),
            ({"segment_ids": SegmentIds(None, None)}, TypeError, "segment_ids.query: expected an integer array, got"),
            ({"query_seq_lengths": jnp.array([True, True])}, TypeError, "query_seq_lengths: expected an integer"),
            ({"segment_ids": jnp.ones((2, 6), int)}, TypeError, r"segment_ids: expected jax_fp4attn.SegmentIds"),
            (
                {"segment_ids": SegmentIds(jnp.ones((2, 6), int), jnp.ones((2, 6), int))},
                ValueError,
                r"segment_ids.key_value: expected shape \(2, 8\), got \(2, 6\)",
            ),
            (
                {"segment_ids": SegmentIds(jnp.ones((2, 8), int), jnp.ones((2, 8), int))},
                ValueError,
                r"segment_ids.query: expected shape \(2, 6\)",
            ),
            (
                {"segment_ids": SegmentIds(jnp.ones((2, 6)), jnp.ones((2, 8), int))},
                TypeError,
                r"segment_ids.query: expected an integer",
            ),
            ({"local_window_size": -1}, ValueError, "local_window_size: expected an int or .*all >= 0, got -1"),
            ({"local_window_size": (1, -2)}, ValueError, "local_window_size: expected an int"),
            ({"local_window_size": (1, 2, 3)}, ValueError, "local_window_size: expected an int"),
            ({"local_window_size": (1.0, 2)}, ValueError, "local_window_size: expected an int"),
            ({"local_window_size": True}, ValueError, "local_window_size: expected an int"),
            ({"local_window_size": np.array(3)}, ValueError, r"local_window_size: .*got an array of shape \(\)"),
            ({"local_window_size": 2.5}, TypeError, "local_window_size: expected an int or .*, got float"),
            ({"local_window_size": jnp.array([1, 2])}, TypeError, "local_window_size: expected an int"),
            ({"recipe": "train"}, TypeError, r"recipe: expected a jax_fp4attn.Recipe .*got str"),
            ({"recipe": {}}, TypeError, "recipe: expected a jax_fp4attn.Recipe"),
            ({"implementation": "xla"}, ValueError, "implementation: expected None, one of"),
            ({"implementation": ()}, ValueError, "implementation: expected None, one of"),
            ({"implementation": "cuda"}, NotImplementedError, "^implementation: cuda: ."),
        ],
    )
    def test_names_the_argument(self, changes, error, message):
        with pytest.raises(error, match=message):
            attend(**changes)

    @pytest.mark.parametrize("head_size", [1, 17, 127])
    def test_odd_head_sizes_say_what_to_do(self, head_size):
        x = array(1, 4, 1, head_size)
        with pytest.raises(ValueError, match=rf"query: expected an even head size .*got H={head_size}; pad with zero"):
            jax_fp4attn.attention(x, x, x)

    def test_an_empty_head_is_refused(self):
        x = array(1, 4, 1, 0)
        with pytest.raises(ValueError, match="query: expected an even head size"):
            jax_fp4attn.attention(x, x, x)

    def test_heads_beyond_256_are_not_implemented(self):
        x = array(1, 4, 1, 258)
        with pytest.raises(NotImplementedError, match="query: head sizes up to 256 are implemented, got H=258"):
            jax_fp4attn.attention(x, x, x)

    @pytest.mark.parametrize(
        ("argument", "value"),
        [("scale", 0.5), ("is_causal", True), ("return_residual", True), ("local_window_size", 2)],
    )
    def test_static_arguments_may_not_be_traced(self, argument, value):
        with pytest.raises(TypeError, match=f"{argument}: expected .*(traced|Tracer).*part of the compiled program"):
            jax.jit(lambda x: attend(**{argument: x}))(value)


class TestAccepted:
    def test_layout_dtypes_and_residual(self):
        for dtype in (jnp.bfloat16, jnp.float32):
            output, lse = jax.eval_shape(
                functools.partial(jax_fp4attn.attention, return_residual=True), *(x.astype(dtype) for x in (Q, K, V))
            )
            assert (output.shape, output.dtype) == ((2, 6, 4, 16), dtype)
            assert (lse.shape, lse.dtype) == ((2, 6, 4), jnp.float32)
        assert jax.eval_shape(jax_fp4attn.attention, Q, K, V).shape == Q.shape

    def test_numpy_arrays(self):
        arrays = (np.asarray(x) for x in (Q, K, V))
        np.testing.assert_array_equal(*map(np.asarray, (jax_fp4attn.attention(*arrays), attend())))

    def test_lists_of_lengths_and_integers_of_numpy(self):
        expected = attend(key_value_seq_lengths=jnp.array([3, 8]), local_window_size=(2, 3), scale=0.5)
        actual = attend(
            key_value_seq_lengths=np.array([3, 8], np.int64),
            local_window_size=(np.int64(2), np.int32(3)),
            scale=np.float64(0.5),
            is_causal=np.bool_(False),
        )
        np.testing.assert_array_equal(*map(np.asarray, (actual, expected)))

    def test_lengths_that_do_not_fit_int32_are_longer_than_any_sequence(self):
        actual = attend(key_value_seq_lengths=jnp.array([3, 3_000_000_000], jnp.uint32))
        np.testing.assert_array_equal(*map(np.asarray, (actual, attend(key_value_seq_lengths=jnp.array([3, 8])))))

    @pytest.mark.parametrize("implementation", ["reference", ("cuda", "reference"), ["reference"], None])
    def test_implementations_fall_through(self, implementation):
        jax.eval_shape(functools.partial(attend, implementation=implementation))

    @pytest.mark.parametrize("name", ["no_batch", "two_batch_dims"])
    def test_batch_dimensions_are_flattened_and_restored(self, name):
        shape = SHAPES[name]
        inputs = shapes.normal(shape).jax()
        rng = np.random.default_rng(0)
        options = {
            "is_causal": True,
            "key_value_seq_lengths": jnp.asarray(rng.integers(1, shape.keys, shape.batch)),
            "query_seq_lengths": jnp.asarray(rng.integers(1, shape.queries, shape.batch)),
            "segment_ids": SegmentIds(
                jnp.ones((*shape.batch, shape.queries), int), jnp.ones((*shape.batch, shape.keys), int)
            ),
            "mask": jnp.asarray(rng.random(shape.scores) < 0.8),
        }
        # A bias that is shared by the first batch dimension only.
        bias = jnp.asarray(rng.standard_normal((*(1,) * bool(shape.batch), *shape.scores[1:])), jnp.float32)
        if not shape.batch:
            bias = jnp.asarray(rng.standard_normal(shape.scores), jnp.float32)
        whole = shapes.evaluate(inputs, bias, recipe=recipes.train, **options)
        assert whole.output.shape == inputs.query.shape
        assert whole.d_bias.shape == bias.shape
        full_bias = jnp.broadcast_to(bias, shape.scores)
        count = int(np.prod(shape.batch))

        def one(x: Any, index: int) -> Any:
            return None if x is None else x.reshape(count, *x.shape[len(shape.batch) :])[index : index + 1]

        for index in range(count):
            part = shapes.evaluate(
                shapes.Inputs(*(one(x, index) for x in inputs)),
                one(full_bias, index),
                recipe=recipes.train,
                is_causal=True,
                **jax.tree.map(
                    functools.partial(one, index=index), {k: v for k, v in options.items() if k != "is_causal"}
                ),
            )
            for name_, x, y in zip(whole._fields, whole[:5], part[:5], strict=False):
                # The order of a float32 sum may depend on the batch; bfloat16 hides it.
                rtol = 1e-6 if name_ == "lse" else 0
                np.testing.assert_allclose(oracles.float64(one(x, index)), oracles.float64(y), rtol, err_msg=name_)

    def test_an_integer_window_has_two_equal_sides(self):
        np.testing.assert_array_equal(*(np.asarray(attend(local_window_size=window)) for window in (2, (2, 2))))

    def test_scale_defaults_to_the_root_of_the_unpadded_head_size(self):
        np.testing.assert_array_equal(*map(np.asarray, (attend(), attend(scale=0.25))))

    @pytest.mark.parametrize(("is_causal", "recipe"), [(True, recipes.train), (False, recipes.square)])
    def test_recipe_defaults_to_train_under_causality_and_square_without(self, is_causal, recipe):
        # The jaxprs are the same; the other recipe's is not.
        def jaxpr(recipe: Any) -> str:
            return str(jax.make_jaxpr(functools.partial(attend, is_causal=is_causal, recipe=recipe))())

        other = recipes.square if is_causal else recipes.train
        assert jaxpr(None) == jaxpr(recipe) != jaxpr(other)

    def test_query_heads_share_key_value_heads_in_order(self):
        # Query heads 0 and 1 use key/value head 0: changing head 1's values leaves them alone.
        first, second = (np.float32(attend(value=v)) for v in (V, V.at[:, :, 1].mul(-2)))
        np.testing.assert_array_equal(first[:, :, :2], second[:, :, :2])
        assert (first[:, :, 2:] != second[:, :, 2:]).any(axis=(0, 1, 3)).all()


class TestProperties:
    """Random values and restrictions on few compiled programs."""

    SHAPE = Shape((2,), 9, 40, 2, 1, 64)
    RECIPES = ("train", "square", "accurate", "nvfp4_pv")

    @staticmethod
    def _bound(recipe_name: str) -> float:
        # An output is a mean of represented values. Rounding to FP4 can lengthen the largest value of a block by a
        # fifth (5/6 of a scale becomes 1); rounded probabilities need not sum to a denominator of unrounded ones.
        return {"train": 1.1, "square": 1.25, "accurate": 1.25, "nvfp4_pv": 1.5}[recipe_name]

    @given(data=st.data())
    @settings(max_examples=30)
    def test_outputs_are_finite_means_of_the_values(self, data):
        name = data.draw(st.sampled_from(self.RECIPES))
        seed = data.draw(st.integers(0, 2**16))
        std, magnitude = data.draw(st.sampled_from([0.0, 0.1, 1.0, 3.0])), data.draw(st.sampled_from([1e-2, 1.0, 30.0]))
        inputs = shapes.normal(self.SHAPE, seed, std=std)
        inputs = inputs._replace(value=(magnitude * inputs.value.astype(np.float32)).astype(ml_dtypes.bfloat16))
        query_lengths = np.array(data.draw(st.lists(st.integers(0, 9), min_size=2, max_size=2)))
        key_lengths = np.array(data.draw(st.lists(st.integers(0, 40), min_size=2, max_size=2)))
        rng = np.random.default_rng(seed)
        ids = SegmentIds(rng.integers(-1, 3, (2, 9)), rng.integers(-1, 3, (2, 40)))
        mask = rng.random((2, 1, 9, 40)) < data.draw(st.sampled_from([0.05, 0.5, 1.0]))
        options = {
            "is_causal": name == "train",
            "query_seq_lengths": query_lengths,
            "key_value_seq_lengths": key_lengths,
            "segment_ids": ids,
            "mask": mask,
        }
        result = shapes.evaluate(inputs, recipe=recipes.named()[name], **options)
        visible = shapes.oracle_call(inputs, **options).visible
        empty = np.swapaxes(~visible.any(-1), 1, 2)

        assert result.output.shape == inputs.query.shape
        assert result.output.dtype == inputs.query.dtype
        assert all(np.isfinite(oracles.float64(x)).all() for x in (result.output, *result[2:5]))
        np.testing.assert_array_equal(np.isneginf(result.lse), empty)
        assert not np.isnan(result.lse).any()
        np.testing.assert_array_equal(result.output[empty], 0)
        np.testing.assert_array_equal(result.d_query[empty], 0)
        unseen = ~visible.any((1, 2))
        np.testing.assert_array_equal(result.d_key[unseen], 0)
        np.testing.assert_array_equal(result.d_value[unseen], 0)

        largest = np.abs(oracles.float64(inputs.value)).max(axis=(1, 2))
        output = np.abs(oracles.float64(result.output)).max(axis=(1, 2))
        # Below 6 * 2**-9 block scales are subnormal, and a step of them may be added.
        assert (output <= self._bound(name) * largest + 6 * 2**-10).all()

    @given(shape=st.tuples(*(st.integers(1, 300) for _ in range(2))), groups=st.integers(1, 4), heads=st.integers(1, 3),
           head_size=st.integers(1, 128).map(lambda half: 2 * half), batch=st.lists(st.integers(1, 3), max_size=2),
           recipe=st.sampled_from(sorted(recipes.named())), is_causal=st.booleans())  # fmt: skip
    @settings(max_examples=15)
    def test_every_shape_traces_forward_and_backward(self, shape, groups, heads, head_size, batch, recipe, is_causal):
        queries, keys = shape
        query = jax.ShapeDtypeStruct((*batch, queries, groups * heads, head_size), jnp.bfloat16)
        key = jax.ShapeDtypeStruct((*batch, keys, heads, head_size), jnp.bfloat16)

        def loss(q, k, v):
            output, lse = jax_fp4attn.attention(
                q, k, v, recipe=recipes.named()[recipe], is_causal=is_causal, return_residual=True
            )
            assert output.shape == query.shape
            assert lse.shape == query.shape[:-1]
            return output.astype(jnp.float32).sum()

        gradients = jax.eval_shape(jax.grad(loss, argnums=(0, 1, 2)), query, key, key)
        assert [(g.shape, g.dtype) for g in gradients] == [(x.shape, x.dtype) for x in (query, key, key)]
