import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jax_fp4attn.formats import block_exponent, decode_e8m0, encode_e8m0, exp2_int
from tests.formats import oracles
from tests.formats.oracles import assert_same_floats

RULES = ("floor", "ceil", "rte", 1.5, 1.203125)
INF, NAN = float("inf"), float("nan")

all_rules = pytest.mark.parametrize("rule", RULES)

normal_maxima = hnp.arrays(np.float32, 64, elements=st.floats(2.0**-126, float(np.finfo(np.float32).max), width=32))


class TestE8M0:
    def test_every_byte_is_decoded_as_ml_dtypes_does(self):
        byte = np.arange(256, dtype=np.uint8)
        assert_same_floats(decode_e8m0(byte), byte.view(ml_dtypes.float8_e8m0fnu).astype(np.float32))

    def test_encodes_every_exponent(self):
        exponents = np.arange(-127, 128)
        encoded = encode_e8m0(exponents)
        assert encoded.dtype == jnp.uint8
        np.testing.assert_array_equal(encoded, np.arange(255))

    def test_clamps_to_the_finite_bytes(self):
        assert encode_e8m0(jnp.array([-128, -(2**30), 128, 2**30])).tolist() == [0, 0, 254, 254]


class TestExp2Int:
    def test_is_exact_for_every_exponent(self):
        exponents = np.arange(-127, 128)
        expected = [math.ldexp(1.0, int(e)) for e in exponents]
        assert_same_floats(exp2_int(exponents), expected)

    def test_clamps(self):
        assert_same_floats(exp2_int(jnp.array([-200, 200])), [2.0**-127, 2.0**127])

    def test_is_exact_under_jit(self):
        # exp2 of a compiler need not be.
        exponents = np.arange(-127, 128)
        assert_same_floats(jax.jit(exp2_int)(exponents), exp2_int(exponents))


class TestBlockExponent:
    @all_rules
    def test_boundaries_of_every_binade(self, rule):
        mantissas = np.array([1.0, 1.203125, 1.25, 1.5, 1.75, 2 - 2.0**-23], np.float32)
        mantissas = np.concatenate(
            [
                mantissas,
                np.nextafter(mantissas[1:5], np.float32(1)),
                np.nextafter(mantissas[:5], np.float32(2)),
            ]
        )
        amax = np.ldexp(mantissas, np.arange(-126, 128)[:, None]).astype(np.float32)
        expected = [[oracles.block_exponent(m, rule) for m in row] for row in amax]
        exponent = block_exponent(amax, rule)
        assert exponent.dtype == jnp.int32
        np.testing.assert_array_equal(exponent, expected)

    @all_rules
    @given(amax=normal_maxima)
    def test_any_normal_maximum(self, rule, amax):
        expected = [oracles.block_exponent(m, rule) for m in amax]
        np.testing.assert_array_equal(block_exponent(amax, rule), expected)

    @pytest.mark.parametrize(
        ("rule", "expected"),
        [
            # 1, just above 1, just below 1.5, 1.5, 3, just above 1.5 and just below 2.
            ("floor", [0, 0, 0, 0, 1, 0, 0]),
            ("ceil", [0, 1, 1, 1, 2, 1, 1]),
            # 1.5 has the odd byte 127, 3 the even byte 128.
            ("rte", [0, 0, 0, 1, 1, 1, 1]),
            (1.5, [0, 0, 0, 1, 2, 1, 1]),
            (1.203125, [0, 0, 1, 1, 2, 1, 1]),
        ],
    )
    def test_examples(self, rule, expected):
        ulp = 2.0**-23
        amax = jnp.array([1.0, 1 + ulp, 1.5 - ulp, 1.5, 3.0, 1.5 + ulp, 2 - ulp])
        assert block_exponent(amax, rule).tolist() == expected

    @pytest.mark.parametrize("threshold", [1.0 + 2.0**-40, 2.0 - 2.0**-40])
    def test_thresholds_between_floats_are_not_rounded(self, threshold):
        amax = np.array([1.0, 1 + 2.0**-23, 2 - 2.0**-23], np.float32)
        expected = [oracles.block_exponent(m, threshold) for m in amax]
        assert block_exponent(amax, threshold).tolist() == expected

    @all_rules
    def test_zero_and_subnormal_maxima(self, rule):
        amax = np.array([0.0, 1e-45, 2.0**-127, 1.1754942e-38], np.float32)
        assert block_exponent(amax, rule).tolist() == [-127] * 4

    @all_rules
    def test_largest_infinite_and_nan_maxima(self, rule):
        largest = float(np.finfo(np.float32).max)
        assert block_exponent(jnp.array([largest, INF, NAN, -NAN]), rule).tolist() == [127] * 4

    @all_rules
    def test_jit_chooses_the_same(self, rule):
        amax = np.random.default_rng(0).lognormal(0, 20, 1000).astype(np.float32)
        jitted = jax.jit(lambda amax: block_exponent(amax, rule))(amax)
        np.testing.assert_array_equal(jitted, block_exponent(amax, rule))

    @pytest.mark.parametrize("rule", ["best_l2", "round", 1.0, 2.0, 0.5, INF, NAN, 1, None])
    def test_rejects_unknown_rules(self, rule):
        with pytest.raises(ValueError, match=r"rule: expected 'floor'.* got"):
            block_exponent(jnp.ones(1), rule)
