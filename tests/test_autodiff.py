"""The operator under JAX's transformations gives what a loop of plain calls gives."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fp4attn
from jax_fp4attn import SegmentIds, recipes
from jax_fp4attn.checkpoint_policies import save_attention
from tests import shapes
from tests.shapes import COMPILER_OPTIONS, SHAPES, Shape

SMALL = Shape((3, 2), 6, 6, 2, 1, 16)  # a leading axis to map
Q, K, V, D_OUT, _ = shapes.normal(SMALL).jax()

attend = functools.partial(jax_fp4attn.attention, is_causal=True)


def compiled(function: Any, *arguments: Any) -> Any:
    return jax.jit(function, compiler_options=COMPILER_OPTIONS)(*arguments)


def gradients(q: Any, k: Any, v: Any, d_out: Any, **options: Any) -> Any:
    """dQ, dK and dV of one call."""
    return jax.vjp(functools.partial(attend, **options), q, k, v)[1](d_out)


class Arguments(NamedTuple):
    """Everything that a call can take, and the cotangent of its output."""

    query: Any
    key: Any
    value: Any
    d_output: Any
    bias: Any
    mask: Any
    query_lengths: Any
    key_lengths: Any
    query_segments: Any
    key_segments: Any


def draw_arguments() -> Arguments:
    """Arguments with a leading axis to map; the bias is broadcast along the batch, so its gradient is a sum over it."""
    rng = np.random.default_rng(1)
    return Arguments(
        Q,
        K,
        V,
        D_OUT,
        jnp.asarray(rng.standard_normal((3, 1, 2, 1, 6)), jnp.float32),
        jnp.asarray(rng.random((3, 1, 1, 6, 6)) < 0.7),
        *(jnp.asarray(rng.integers(2, 7, (3, 2)), jnp.int32) for _ in range(2)),
        *(jnp.asarray(rng.integers(0, 3, (3, 2, 6)), jnp.int32) for _ in range(2)),
    )


def evaluate(*arguments: Any) -> Any:
    """Output, lse and all gradients; with the recipe that compiles fastest, as mapping knows nothing of recipes."""
    x = Arguments(*arguments)

    def call(query: Any, key: Any, value: Any, bias: Any) -> Any:
        return attend(
            query,
            key,
            value,
            bias,
            x.mask,
            query_seq_lengths=x.query_lengths,
            key_value_seq_lengths=x.key_lengths,
            segment_ids=SegmentIds(x.query_segments, x.key_segments),
            recipe=recipes.bf16,
            return_residual=True,
        )

    (output, lse), vjp = jax.vjp(call, x.query, x.key, x.value, x.bias)
    return output, lse, *vjp((x.d_output, jnp.ones_like(lse)))


def in_a_loop(function: Any, in_axes: tuple[int | None, ...], *arguments: Any) -> Any:
    """What `vmap` should give, by calls one at a time."""
    calls = [
        compiled(function, *(x if axis is None else x[i] for x, axis in zip(arguments, in_axes, strict=True)))
        for i in range(3)
    ]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *calls)


def assert_same(actual: Any, expected: Any) -> None:
    """Asserts equality: batching may not move a code, and bfloat16 hides the order of float32 sums."""
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert x.dtype == y.dtype
        rtol = 1e-6 if x.dtype == jnp.float32 else 0
        np.testing.assert_allclose(np.float32(x), np.float32(y), rtol=rtol, atol=rtol)


class TestCompilation:
    def test_a_plain_call_equals_a_compiled_one(self):
        plain = gradients(Q, K, V, D_OUT)
        assert_same(compiled(gradients, Q, K, V, D_OUT), plain)
        assert_same(compiled(attend, Q, K, V), attend(Q, K, V))

    @pytest.mark.slow
    def test_an_uncompiled_call_equals_a_compiled_one(self):
        q, k, v = (x[0] for x in (Q, K, V))
        expected = compiled(attend, q, k, v)
        with jax.disable_jit():
            assert_same(attend(q, k, v), expected)

    def test_optimised_code_equals_the_quickly_compiled_code_of_the_other_tests(self):
        inputs = shapes.normal(SHAPES["mqa"]).jax()
        for is_causal in (True, False):
            function = functools.partial(gradients, is_causal=is_causal)
            optimised = jax.jit(function)(*inputs[:4])
            for x, y in zip(optimised, compiled(function, *inputs[:4]), strict=True):
                x, y = np.float32(x), np.float32(y)
                # Sums in another order move few bfloat16 values.
                assert np.linalg.norm(x - y) < 2e-3 * np.linalg.norm(y)
                assert np.mean(x != y) < 0.05


class TestVmap:
    @pytest.mark.parametrize(
        "in_axes",
        [(0, 0, 0), (0, None, None), (None, 0, None), (None, None, 0), (None, 0, 0), (0, None, 0), (0, 0, None)],
        ids=["all", "query", "key", "value", "key_value", "query_value", "query_key"],
    )
    def test_gradient_of_a_mapped_subset(self, in_axes):
        arguments = [x if axis == 0 else x[0] for x, axis in zip((Q, K, V), in_axes, strict=True)]
        axes = (*in_axes, 0)
        mapped = compiled(jax.vmap(gradients, in_axes=axes), *arguments, D_OUT)
        assert_same(mapped, in_a_loop(gradients, axes, *arguments, D_OUT))

    @pytest.mark.parametrize("name", [*Arguments._fields, "all"])
    def test_one_mapped_argument_of_a_call_with_all_of_them(self, name):
        in_axes = tuple(0 if name in (field, "all") else None for field in Arguments._fields)
        arguments = [x if axis == 0 else x[0] for x, axis in zip(draw_arguments(), in_axes, strict=True)]
        mapped = compiled(jax.vmap(evaluate, in_axes=in_axes), *arguments)
        assert_same(mapped, in_a_loop(evaluate, in_axes, *arguments))

    @pytest.mark.parametrize(
        "in_axes", [(0, None, None), (None, 0, None), (None, None, 0)], ids=["query", "key", "value"]
    )
    def test_value_and_gradient_whose_cotangent_is_not_mapped(self, in_axes):
        def loss(q: Any, k: Any, v: Any) -> Any:
            return attend(q, k, v, recipe=recipes.bf16).astype(jnp.float32).sum()

        function = jax.value_and_grad(loss, argnums=(0, 1, 2))
        arguments = [x if axis == 0 else x[0] for x, axis in zip((Q, K, V), in_axes, strict=True)]
        values, mapped = compiled(jax.vmap(function, in_axes=in_axes), *arguments)
        expected_values, expected = in_a_loop(function, in_axes, *arguments)
        np.testing.assert_allclose(values, expected_values, rtol=1e-5)
        assert_same(mapped, expected)

    def test_a_head_size_between_tiles_over_several_key_tiles(self):
        function = functools.partial(gradients, recipe=recipes.bf16)
        arguments = shapes.normal(Shape((3, 1), 150, 150, 2, 1, 48)).jax()[:4]
        mapped = compiled(jax.vmap(function), *arguments)
        assert_same(mapped, in_a_loop(function, (0, 0, 0, 0), *arguments))

    def test_axes_other_than_the_first(self):
        moved = jnp.moveaxis(Q, 0, 2), jnp.moveaxis(K, 0, 1), jnp.moveaxis(V, 0, -1)
        function = functools.partial(attend, recipe=recipes.bf16)
        mapped = compiled(jax.vmap(function, in_axes=(2, 1, -1), out_axes=1), *moved)
        assert_same(jnp.moveaxis(mapped, 1, 0), in_a_loop(function, (0, 0, 0), Q, K, V))

    def test_nested(self):
        q, k, v, d_out = (jnp.stack([x, x[::-1]]) for x in (Q, K, V, D_OUT))
        inner = jax.vmap(gradients, in_axes=(0, None, 0, 0))
        nested = compiled(jax.vmap(inner, in_axes=(0, 0, None, 0)), q, k[:, 0], v[0], d_out)
        rows = [in_a_loop(gradients, (0, None, 0, 0), q[i], k[i, 0], v[0], d_out[i]) for i in range(2)]
        assert_same(nested, jax.tree.map(lambda *leaves: jnp.stack(leaves), *rows))

    def test_collectives_over_the_mapped_axis(self):
        function = functools.partial(attend, recipe=recipes.bf16)

        def call(q: Any) -> Any:
            return jax.lax.psum(function(q, K[0], V[0]).astype(jnp.float32), "members")

        mapped = compiled(jax.vmap(call, axis_name="members"), Q)
        expected = in_a_loop(function, (0, None, None), Q, K[0], V[0]).astype(jnp.float32).sum(0)
        np.testing.assert_allclose(mapped, jnp.stack([expected] * 3), rtol=1e-6, atol=1e-6)

    def test_gradient_of_a_mapped_call(self):
        def loss(q, k, v):
            return (jax.vmap(attend, in_axes=(0, None, 0))(q, k, v).astype(jnp.float32) * D_OUT).sum()

        dq, dk, dv = compiled(jax.grad(loss, argnums=(0, 1, 2)), Q, K[0], V)
        loop_q, loop_k, loop_v = in_a_loop(gradients, (0, None, 0, 0), Q, K[0], V, D_OUT)
        assert_same((dq, dv), (loop_q, loop_v))
        # The unmapped key collects three bfloat16 gradients, added in bfloat16.
        np.testing.assert_allclose(np.float32(dk), np.float32(loop_k).sum(0), rtol=0.02, atol=0.02)


class TestComposition:
    def test_jacobian_rows_are_gradients(self):
        q, k, v = Q[0], K[0], V[0]
        jacobian = compiled(jax.jacrev(lambda q: attend(q, k, v)[0, :2, 1, 3].astype(jnp.float32)), q)
        assert jacobian.shape == (2, *q.shape)
        for row in range(2):
            one = jnp.zeros_like(q).at[0, row, 1, 3].set(1)
            assert_same(jacobian[row], compiled(gradients, q, k, v, one)[0])

    @pytest.mark.parametrize(
        "remat",
        [lambda f: f, jax.checkpoint, functools.partial(jax.checkpoint, policy=save_attention)],
        ids=["plain", "remat", "save_attention"],
    )
    def test_scan_over_layers_equals_a_python_loop(self, remat):
        weights = jnp.asarray(np.random.default_rng(2).standard_normal((3, 16, 16)) / 4, jnp.bfloat16)

        def layer(x, w):
            y = x @ w
            return x + attend(y, y[:, :, :1], x[:, :, :1])

        def scanned(weights, x):
            return jax.lax.scan(lambda x, w: (remat(layer)(x, w), None), x, weights)[0].astype(jnp.float32).sum()

        def looped(weights, x):
            for w in weights:
                x = layer(x, w)
            return x.astype(jnp.float32).sum()

        actual, expected = (compiled(jax.value_and_grad(f), weights, Q[0]) for f in (scanned, looped))
        np.testing.assert_allclose(actual[0], expected[0], rtol=1e-2)
        error = np.linalg.norm(np.float32(actual[1]) - np.float32(expected[1]))
        assert error < 0.02 * np.linalg.norm(np.float32(expected[1]))

    def test_remat_of_odd_shapes(self):
        q, k, v, d_out, _ = shapes.normal(SHAPES["head_size_18"]).jax()
        remat = compiled(lambda *x: jax.vjp(jax.checkpoint(jax_fp4attn.attention), *x[:3])[1](x[3]), q, k, v, d_out)
        assert_same(remat, compiled(functools.partial(gradients, is_causal=False), q, k, v, d_out))

    @pytest.mark.parametrize("transform", [jax.jit, jax.vmap, jax.checkpoint, jax.grad], ids=lambda f: f.__name__)
    def test_refusals_come_through_transformations(self, transform):
        x = jnp.zeros((3, 16, 5, 19), jnp.bfloat16)
        with pytest.raises(ValueError, match=r"query: expected an even head size .*got H=19; pad with zero channels"):
            transform(lambda x: jax_fp4attn.attention(x, x, x))(x)

    def test_only_the_lse_is_differentiated(self):
        def loss(q):
            return attend(q, K[0], V[0], return_residual=True)[1].sum()

        gradient = compiled(jax.grad(loss), Q[0])
        assert np.isfinite(np.float32(gradient)).all()
        assert np.float32(gradient).any()

    def test_forward_mode_is_refused(self):
        with pytest.raises(TypeError, match="custom_vjp"):
            jax.jvp(lambda q: attend(q, K[0], V[0]), (Q[0],), (Q[0],))

    @pytest.mark.parametrize("transform", [jax.hessian, lambda f: jax.grad(lambda x: jax.grad(f)(x).sum())])
    def test_second_derivatives_are_refused(self, transform):
        def loss(v: Any) -> Any:
            return (attend(Q[0], K[0], v).astype(jnp.float32) ** 2).sum()

        with pytest.raises(NotImplementedError, match=r"second derivatives .* are not implemented"):
            transform(loss)(V[0])

    def test_what_a_refused_second_derivative_recommends_works(self):
        def loss(v: Any) -> Any:
            return (attend(Q[0], K[0], v).astype(jnp.float32) ** 2).sum()

        def penalty(v: Any) -> Any:
            return (jax.grad(loss)(jax.lax.stop_gradient(v)) * v).astype(jnp.float32).sum()

        gradient = jax.grad(penalty)(V[0])
        np.testing.assert_array_equal(np.asarray(gradient), np.asarray(jax.grad(loss)(V[0])))

    def test_integer_inputs_have_no_gradient(self):
        lengths = jnp.array([4, 6], jnp.int32)

        def loss(lengths):
            return attend(Q[0], K[0], V[0], key_value_seq_lengths=lengths).astype(jnp.float32).sum()

        gradient = jax.grad(loss, allow_int=True)(lengths)
        assert gradient.dtype == jax.dtypes.float0
