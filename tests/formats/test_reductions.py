import jax
import numpy as np
import pytest

from jax_fp4attn.formats.reductions import max_magnitude, rounded_product, sum_of_neighbours, sum_of_squares
from tests.formats import oracles
from tests.formats.oracles import assert_same_floats

transforms = pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])


class TestMaxMagnitude:
    @transforms
    @pytest.mark.parametrize("axis", [None, -1, (-3, -1)])
    def test_is_the_maximum_of_numpy(self, axis, transform):
        x = np.random.default_rng(0).standard_normal((16, 4, 3, 32)).astype(np.float32)
        x[3, 1, 2, 5], x[4] = -np.inf, -0.0
        for keepdims in (False, True):
            largest = transform(lambda x, k=keepdims: max_magnitude(x, axis, keepdims=k))(x)
            assert_same_floats(largest, np.abs(x).max(axis, keepdims=keepdims))

    @transforms
    @pytest.mark.parametrize("axis", [-1, (-3, -1)])
    @pytest.mark.parametrize("nan", [0x7FC00000, 0xFFC00000, 0x7F800001])
    def test_keeps_nan(self, nan, axis, transform):
        # Large enough for a vectorised reduction.
        x = np.random.default_rng(0).standard_normal((64, 4, 3, 32)).astype(np.float32)
        x[5, 1, 2, 7] = np.array(nan, np.uint32).view(np.float32)
        x[5, 1, 2, 8] = np.inf
        assert_same_floats(transform(lambda x: max_magnitude(x, axis))(x), np.abs(x).max(axis))


class TestSumOfSquares:
    @transforms
    @pytest.mark.parametrize("size", [1, 2, 32, 1024])
    def test_rounds_as_the_sum_by_halves_does(self, size, transform):
        # A square contracted into an addition, or another order, gives other last bits.
        x = np.random.default_rng(size).standard_normal((2048, size)).astype(np.float32)
        assert_same_floats(transform(sum_of_squares)(x), oracles.sum_of_squares(x))

    @transforms
    def test_rounds_the_same_after_a_computation_that_it_is_fused_with(self, transform):
        rng = np.random.default_rng(0)
        x, y = rng.standard_normal((2, 2048, 32)).astype(np.float32)
        fused = transform(lambda x, y: sum_of_squares(x - y))
        assert_same_floats(fused(x, y), oracles.sum_of_squares(x - y))

    def test_order(self):
        # 1 is lost beside 2**24 and its pair is not: the first half meets the second.
        large, ones = 2.0**12, 1.0
        x = np.array([[large, ones, 0, ones], [large, 0, ones, ones]], np.float32)
        assert sum_of_squares(x).tolist() == [2.0**24 + 2, 2.0**24]

    def test_overflows_to_infinity_and_keeps_nan(self):
        x = np.array([[1e30, 0.0], [np.nan, 0.0]], np.float32)
        assert_same_floats(sum_of_squares(x), [np.inf, np.nan])


class TestSumOfNeighbours:
    @transforms
    @pytest.mark.parametrize("size", [1, 2, 64, 128, 256])
    def test_rounds_as_the_tree_of_neighbours_does(self, size, transform):
        x = np.random.default_rng(size).standard_normal((2048, size)).astype(np.float32)
        expected = oracles.sum_of_neighbours(x)
        assert_same_floats(transform(sum_of_neighbours)(x), expected)
        if size > 2:
            assert np.mean(expected != x.sum(-1, dtype=np.float32)) > 0.1

    @transforms
    def test_products_of_few_bits_may_be_contracted_into_it(self, transform):
        rng = np.random.default_rng(0)
        x, y = (oracles.bfloat16(rng.standard_normal((2048, 64))) for _ in range(2))
        fused = transform(lambda x, y: sum_of_neighbours(x * y))
        assert_same_floats(fused(x, y), oracles.sum_of_neighbours(x * y))

    def test_order(self):
        # 1 is lost beside 2**24 and the sum of two is not: neighbours meet first.
        large = 2.0**24
        x = np.array([[large, 0, 1, 1], [large, 1, 0, 1]], np.float32)
        assert sum_of_neighbours(x).tolist() == [large + 2, large]

    def test_zeros_at_the_end_change_nothing(self):
        x = np.random.default_rng(0).standard_normal((256, 64)).astype(np.float32)
        assert_same_floats(sum_of_neighbours(np.pad(x, ((0, 0), (0, 64)))), sum_of_neighbours(x))


class TestRoundedProduct:
    @transforms
    def test_is_rounded_before_an_addition(self, transform):
        rng = np.random.default_rng(0)
        a, c = rng.standard_normal((2, 10_000)).astype(np.float32)
        b = rng.uniform(1, 2, 10_000).astype(np.float32)
        add = transform(lambda a, b, c: rounded_product(a, b) + c)
        assert_same_floats(add(a, b, c), a * b + c)

    def test_keeps_the_sign_of_zero(self):
        zeros = np.array([0.0, -0.0], np.float32)
        assert_same_floats(rounded_product(zeros, 6.0), zeros)
