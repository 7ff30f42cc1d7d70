import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tests.assertions import assert_close, assert_same_bytes, cosine, relative_l2

NAN, INF = float("nan"), float("inf")


def f32(*values):
    return np.array(values, np.float32)


class TestAssertClose:
    def test_accepts_equal_arrays_of_jax_and_numpy(self):
        assert_close(jnp.arange(3.0), f32(0, 1, 2), rtol=0, atol=0)

    @pytest.mark.parametrize(
        "dtype",
        [jnp.bfloat16, jnp.float8_e4m3fn, ml_dtypes.float4_e2m1fn, np.float64, np.int32, np.bool_],
    )
    def test_accepts_every_dtype_that_attention_meets(self, dtype):
        x = np.array([0, 1, 1]).astype(dtype)
        assert_close(x, x.copy(), rtol=0, atol=0)

    def test_accepts_values_at_the_tolerance(self):
        assert_close(f32(1.5, 4.5), f32(1.0, 4.0), rtol=0, atol=0.5)
        assert_close(f32(1.5, 6.0), f32(1.0, 4.0), rtol=0.5, atol=0)

    def test_rejects_values_beyond_the_tolerance(self):
        with pytest.raises(AssertionError, match="not approximately equal"):
            assert_close(f32(1.0, 4.6), f32(1.0, 4.0), rtol=0, atol=0.5)

    def test_takes_the_tolerance_relative_to_expected(self):
        assert_close(f32(1.0), f32(2.0), rtol=0.5, atol=0)
        with pytest.raises(AssertionError, match="not approximately equal"):
            assert_close(f32(2.0), f32(1.0), rtol=0.5, atol=0)

    def test_does_not_round_narrow_types_before_comparing(self):
        with pytest.raises(AssertionError, match="not approximately equal"):
            x = jnp.array([256.0, 258.0], jnp.bfloat16)
            assert_close(x, x[::-1], rtol=0, atol=1)

    @pytest.mark.parametrize("bad", [NAN, INF, -INF])
    def test_rejects_what_is_not_finite_even_if_equal(self, bad):
        with pytest.raises(AssertionError, match=r"actual is not finite at 1 of 2 .* \(1,\)"):
            assert_close(f32(0, bad), f32(0, bad), rtol=1, atol=1)
        with pytest.raises(AssertionError, match="actual is not finite"):
            assert_close(f32(bad), f32(0), rtol=1, atol=INF)
        with pytest.raises(AssertionError, match="expected is not finite"):
            assert_close(f32(0), f32(bad), rtol=INF, atol=INF)

    def test_allows_neg_inf_at_equal_positions_only_on_request(self):
        lse = f32(-INF, 1.0)
        assert_close(lse, lse, rtol=0, atol=0, allow_neg_inf=True)
        with pytest.raises(AssertionError, match="-inf where expected is not"):
            assert_close(lse, f32(0.0, 1.0), rtol=0, atol=INF, allow_neg_inf=True)
        with pytest.raises(AssertionError, match="not -inf where expected is"):
            assert_close(f32(0.0, 1.0), lse, rtol=INF, atol=INF, allow_neg_inf=True)
        with pytest.raises(AssertionError, match="not approximately equal"):
            assert_close(f32(-INF, 2.0), lse, rtol=0, atol=0, allow_neg_inf=True)

    @pytest.mark.parametrize("bad", [NAN, INF])
    def test_allowing_neg_inf_allows_nothing_else(self, bad):
        with pytest.raises(AssertionError, match="not -inf where expected is"):
            assert_close(f32(bad), f32(-INF), rtol=0, atol=0, allow_neg_inf=True)
        with pytest.raises(AssertionError, match="actual is not finite"):
            assert_close(f32(-INF, bad), f32(-INF, bad), rtol=0, atol=0, allow_neg_inf=True)

    def test_rejects_another_dtype(self):
        with pytest.raises(AssertionError, match="dtypes"):
            assert_close(jnp.ones(2, jnp.bfloat16), f32(1, 1), rtol=1, atol=1)

    @pytest.mark.parametrize("shape", [(), (1,), (2, 1), (1, 2)])
    def test_rejects_another_shape_even_if_it_broadcasts(self, shape):
        with pytest.raises(AssertionError, match="shapes"):
            assert_close(np.ones(shape, np.float32), f32(1, 1), rtol=1, atol=1)

    def test_accepts_empty_arrays_of_one_shape(self):
        assert_close(jnp.zeros((0, 2)), jnp.zeros((0, 2)), rtol=0, atol=0)
        with pytest.raises(AssertionError, match="shapes"):
            assert_close(jnp.zeros((0, 2)), jnp.zeros((0, 3)), rtol=0, atol=0)

    @pytest.mark.parametrize("value", [1.0, [1.0]])
    def test_rejects_python_numbers(self, value):
        with pytest.raises(AssertionError, match="expected an array"):
            assert_close(value, value, rtol=1, atol=1)

    def test_compares_trees_and_names_the_leaf(self):
        grads = {"dq": f32(1), "dk": f32(2)}
        assert_close(grads, dict(grads), rtol=0, atol=0)
        with pytest.raises(AssertionError, match=r"actual\['dk'\] is not finite"):
            assert_close(grads | {"dk": f32(NAN)}, grads, rtol=0, atol=0)
        with pytest.raises(AssertionError):
            assert_close({"dq": f32(1)}, grads, rtol=INF, atol=INF)

    def test_rejects_a_leaf_that_is_missing(self):
        with pytest.raises(AssertionError):
            assert_close((f32(1), None), (f32(1), f32(1)), rtol=INF, atol=INF)


class TestRelativeL2:
    def test_is_the_norm_of_the_difference_over_that_of_expected(self):
        assert relative_l2(f32(3, 4), f32(0, 4)) == 0.75
        assert relative_l2(jnp.array([[3.0, 4.0]]), f32(3, 4)[None]) == 0.0

    def test_of_a_zero_array(self):
        assert relative_l2(f32(0, 0), f32(0, 0)) == 0.0
        assert relative_l2(f32(0, 1), f32(0, 0)) == INF

    def test_sums_in_float64(self):
        n = 10_000
        x = np.full(n, 3.0, ml_dtypes.bfloat16)
        assert relative_l2(x, np.full(n, 2.0, np.float16)) == pytest.approx(0.5, rel=1e-12)

    def test_rejects_shapes_that_broadcast_and_what_is_not_finite(self):
        with pytest.raises(AssertionError, match=r"expected shape \(1,\), got \(2,\)"):
            relative_l2(f32(1, 1), f32(1))
        with pytest.raises(AssertionError, match="actual is not finite"):
            relative_l2(f32(NAN), f32(1))


class TestCosine:
    def test_does_not_depend_on_scale(self):
        assert cosine(f32(1, 2, 3), f32(2, 4, 6)) == pytest.approx(1.0, abs=1e-15)
        assert cosine(f32(1, 0), f32(-1e-30, 0)) == -1.0
        assert cosine(f32(1, 0), f32(0, 1e30)) == 0.0

    def test_rejects_zero_shapes_that_broadcast_and_what_is_not_finite(self):
        with pytest.raises(AssertionError, match="expected nonzero arrays"):
            cosine(f32(0), f32(1))
        with pytest.raises(AssertionError, match=r"expected shape \(2,\), got \(1,\)"):
            cosine(f32(1), f32(1, 1))
        with pytest.raises(AssertionError, match="expected is not finite"):
            cosine(f32(1), f32(INF))


class TestAssertSameBytes:
    def test_equal_trees(self):
        tree = {"codes": np.arange(6, dtype=np.uint8), "sums": np.array([0.0, np.nan, np.inf], np.float32)}
        assert_same_bytes(tree, jax.tree.map(np.copy, tree))

    def test_nans_of_any_payload_are_equal(self):
        bits = np.array([0x7FC00000, 0xFFC00001, 0x7F800001], np.uint32)
        assert_same_bytes(bits.view(np.float32), np.full(3, np.nan, np.float32))

    @pytest.mark.parametrize(
        ("actual", "message"),
        [
            (np.array([1, 2, 4], np.uint8), r"1 of 3 elements differ, the first at \(2,\)"),
            (np.array([1, 2, 3], np.int8), "dtype"),
            (np.array([[1, 2, 3]], np.uint8), "shape"),
        ],
    )
    def test_differences(self, actual, message):
        with pytest.raises(AssertionError, match=message):
            assert_same_bytes(actual, np.array([1, 2, 3], np.uint8))

    def test_zeros_of_different_sign_differ(self):
        with pytest.raises(AssertionError, match="1 of 1 elements differ"):
            assert_same_bytes(np.array([-0.0]), np.array([0.0]))

    def test_a_nan_differs_from_a_number(self):
        with pytest.raises(AssertionError, match="1 of 2 elements differ"):
            assert_same_bytes(np.array([np.nan, 1.0]), np.array([0.0, 1.0]))
