import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jax_fp4attn import formats
from jax_fp4attn.formats import E2M1, E4M3, E5M2, decode, round_to_bfloat16
from tests.formats.oracles import (
    E2M1_GRID,
    E2M1_MIDPOINTS,
    assert_same_floats,
    bfloat16,
    decode_e4m3,
    encode_e2m1,
    encode_e4m3,
)

NARROW = {
    E2M1: ml_dtypes.float4_e2m1fn,
    E4M3: ml_dtypes.float8_e4m3fn,
    E5M2: ml_dtypes.float8_e5m2,
}
TIES = ("even", "toward_zero")

# Compiling one function is faster than compiling its operations one by one.
encode = jax.jit(formats.encode, static_argnames=("fmt", "ties"))
round_to = jax.jit(formats.round_to, static_argnames=("fmt", "ties"))

all_formats = pytest.mark.parametrize("fmt", NARROW, ids=lambda fmt: fmt.name)
both_ties = pytest.mark.parametrize("ties", TIES)

# Fixed shapes compile once; values of all magnitudes, subnormal ones and both zeros included.
float32_arrays = hnp.arrays(
    np.float32,
    64,
    elements=st.one_of(
        st.floats(width=32),
        st.floats(-512, 512, width=32),
        st.floats(-6.5, 6.5, width=32),
    ),
)


def all_codes(fmt):
    return np.arange(1 << fmt.bits, dtype=np.uint8)


def magnitudes(fmt):
    """The finite values that are not negative, in the order of their codes."""
    return all_codes(fmt)[: fmt.first_special].view(NARROW[fmt]).astype(np.float32)


def cast(x, fmt):
    """The saturated cast of ml_dtypes, as float32; NaN stays NaN."""
    x = np.asarray(x).astype(np.float32)
    clipped = np.clip(np.nan_to_num(x, nan=0.0, posinf=np.inf, neginf=-np.inf), -1e30, 1e30)
    rounded = np.clip(clipped, -fmt.max_value, fmt.max_value).astype(NARROW[fmt])
    return np.where(np.isnan(x), np.float32(np.nan), rounded.astype(np.float32))


def cast_codes(x, fmt):
    numbers = np.where(np.isnan(x), 0, x).astype(np.float32)
    codes = np.clip(numbers, -fmt.max_value, fmt.max_value).astype(NARROW[fmt]).view(np.uint8)
    return np.where(np.isnan(x), fmt.nan_code, codes).astype(np.uint8)


class TestMiniFloat:
    @all_formats
    def test_describes_the_format_of_ml_dtypes(self, fmt):
        info = ml_dtypes.finfo(NARROW[fmt])
        assert fmt.bits == info.bits
        assert fmt.mantissa_bits == info.nmant
        assert fmt.exponent_bits == info.nexp
        assert fmt.max_value == float(info.max)
        assert fmt.min_exponent == info.minexp


class TestDecode:
    @all_formats
    def test_every_code(self, fmt):
        codes = all_codes(fmt)
        assert_same_floats(decode(codes, fmt), codes.view(NARROW[fmt]).astype(np.float32))

    def test_e2m1_is_the_grid_with_signs(self):
        assert_same_floats(decode(np.arange(16), E2M1), np.concatenate([E2M1_GRID, -E2M1_GRID]))

    @all_formats
    def test_jit_decodes_the_same(self, fmt):
        codes = all_codes(fmt)
        assert_same_floats(jax.jit(lambda c: decode(c, fmt))(codes), decode(codes, fmt))


class TestEncode:
    @both_ties
    @all_formats
    def test_undoes_decode_for_every_finite_code(self, fmt, ties):
        codes = all_codes(fmt)
        codes = codes[codes % (1 << (fmt.bits - 1)) < fmt.first_special]
        encoded = encode(decode(codes, fmt), fmt, ties=ties)
        assert encoded.dtype == jnp.uint8
        np.testing.assert_array_equal(encoded, codes)

    @all_formats
    def test_nan(self, fmt):
        nans = np.array([0x7FC00000, 0xFFC00000, 0x7F800001], np.uint32).view(np.float32)
        assert encode(nans, fmt).tolist() == [fmt.nan_code] * 3
        assert np.isnan(round_to(nans, fmt)).all()

    def test_nan_codes(self):
        # The hardware's conversions of NaN: the largest value, and the canonical NaNs.
        nan = jnp.float32(jnp.nan)
        assert [int(encode(nan, fmt)) for fmt in (E2M1, E4M3, E5M2)] == [0x7, 0x7F, 0x7F]

    @all_formats
    def test_keeps_the_sign_of_zero_and_of_what_rounds_to_zero(self, fmt):
        x = np.array([0.0, 1e-45, 1e-38, 1e-7], np.float32)
        sign = 1 << (fmt.bits - 1)
        assert encode(x, fmt).tolist() == [0] * 4
        assert encode(-x, fmt).tolist() == [sign] * 4
        assert_same_floats(round_to(-x, fmt), np.full(4, -0.0))

    @both_ties
    @all_formats
    def test_saturates(self, fmt, ties):
        top = np.float32(fmt.max_value)
        x = np.array(
            [top, np.nextafter(top, np.float32(np.inf)), 1.03 * top, 1.5 * top, 1e30, np.inf],
            np.float32,
        )
        assert encode(x, fmt, ties=ties).tolist() == [fmt.first_special - 1] * 6
        assert_same_floats(round_to(x, fmt, ties=ties), np.full(6, top))
        assert_same_floats(round_to(-x, fmt, ties=ties), np.full(6, -top))

    @all_formats
    def test_midpoints_go_to_the_even_code(self, fmt):
        values = magnitudes(fmt)
        midpoints = (values[:-1] + values[1:]) / 2
        codes = np.arange(len(midpoints))
        expected = codes + codes % 2
        np.testing.assert_array_equal(encode(midpoints, fmt), expected)
        np.testing.assert_array_equal(encode(-midpoints, fmt), expected | (1 << (fmt.bits - 1)))
        assert_same_floats(round_to(midpoints, fmt), values[expected])

    @all_formats
    def test_midpoints_go_to_the_smaller_magnitude_if_asked(self, fmt):
        values = magnitudes(fmt)
        midpoints = (values[:-1] + values[1:]) / 2
        expected = np.arange(len(midpoints))
        np.testing.assert_array_equal(encode(midpoints, fmt, ties="toward_zero"), expected)
        assert_same_floats(round_to(-midpoints, fmt, ties="toward_zero"), -values[:-1])

    @both_ties
    @all_formats
    def test_the_floats_next_to_a_midpoint_go_to_the_nearer_code(self, fmt, ties):
        values = magnitudes(fmt)
        midpoints = (values[:-1] + values[1:]) / 2
        below = np.nextafter(midpoints, np.float32(0))
        above = np.nextafter(midpoints, np.float32(np.inf))
        np.testing.assert_array_equal(encode(below, fmt, ties=ties), np.arange(len(midpoints)))
        np.testing.assert_array_equal(encode(above, fmt, ties=ties), np.arange(len(midpoints)) + 1)

    @all_formats
    def test_every_bfloat16_is_converted_as_ml_dtypes_does(self, fmt):
        x = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16)
        x32 = x.astype(np.float32)
        assert_same_floats(round_to(jnp.asarray(x), fmt), cast(x, fmt))
        np.testing.assert_array_equal(encode(jnp.asarray(x), fmt), cast_codes(x32, fmt))

    @all_formats
    @given(x=float32_arrays)
    def test_any_float32_is_converted_as_ml_dtypes_does(self, fmt, x):
        assert_same_floats(round_to(x, fmt), cast(x, fmt))
        np.testing.assert_array_equal(encode(x, fmt), cast_codes(x, fmt))

    @given(x=float32_arrays)
    def test_strict_ties_are_comparisons_with_the_midpoints(self, x):
        x = np.nan_to_num(x, nan=2.5)
        np.testing.assert_array_equal(encode(x, E2M1, ties="toward_zero"), encode_e2m1(x, "toward_zero"))

    @both_ties
    @all_formats
    def test_under_jit_rounding_stays(self, fmt, ties):
        # A compiler that drops casts to a narrow type and back would return the input.
        x = np.linspace(-fmt.max_value, fmt.max_value, 9973, dtype=np.float32)
        eager = formats.round_to(x, fmt, ties=ties)
        jitted = jax.jit(lambda x: decode(formats.encode(x, fmt, ties=ties), fmt))(x)
        assert_same_floats(jitted, eager)
        assert np.mean(np.asarray(jitted) != x) > 0.9

    def test_rejects_unknown_ties(self):
        for function in (encode, round_to):
            with pytest.raises(ValueError, match="ties: expected 'even' or 'toward_zero', got 'up'"):
                function(jnp.ones(2), E2M1, ties="up")


class TestDivisor:
    """`encode(x, fmt, divisor=d)` rounds the exact quotient, whatever a compiler makes of x / d."""

    SCALES = magnitudes(E4M3)[1:]

    @both_ties
    @pytest.mark.parametrize("encode", [formats.encode, encode], ids=["eager", "jit"])
    def test_midpoints_of_every_scale_and_the_floats_next_to_them(self, encode, ties):
        midpoints = self.SCALES[:, None] * E2M1_MIDPOINTS  # exact
        for x in (
            midpoints,
            np.nextafter(midpoints, np.float32(0)),
            np.nextafter(midpoints, np.float32(np.inf)),
        ):
            expected = encode_e2m1(x / self.SCALES[:, None], ties)
            for sign in (1, -1):
                codes = encode(sign * x, E2M1, ties=ties, divisor=self.SCALES[:, None])
                np.testing.assert_array_equal(codes, expected + (8 if sign < 0 else 0))

    def test_midpoints_of_six_times_e4m3_and_the_floats_next_to_them(self):
        values = magnitudes(E4M3)
        midpoints = 3 * (values[:-1] + values[1:])
        for x in (
            midpoints,
            np.nextafter(midpoints, np.float32(0)),
            np.nextafter(midpoints, np.float32(np.inf)),
        ):
            np.testing.assert_array_equal(encode(x, E4M3, divisor=6.0), encode_e4m3(x / np.float32(6)))

    @given(x=float32_arrays, scale=hnp.arrays(np.uint8, (64,), elements=st.integers(1, 0x7E)))
    def test_is_the_rounded_quotient_of_any_float32_and_scale(self, x, scale):
        scale = decode_e4m3(scale)
        with np.errstate(over="ignore"):
            expected = cast(x / scale, E2M1)
        assert_same_floats(round_to(x, E2M1, divisor=scale), expected)

    def test_zero_gives_zero(self):
        x = np.array([0.0, -1.0, 1e30, np.inf], np.float32)
        with jax.debug_nans(True):
            assert formats.encode(x, E2M1, divisor=jnp.zeros(4)).tolist() == [0] * 4
        assert_same_floats(round_to(x, E2M1, divisor=0.0), np.zeros(4))

    def test_nan_gives_nan(self):
        divisor = np.array([np.nan, 1.0], np.float32)
        assert_same_floats(round_to(jnp.ones(2), E2M1, divisor=divisor), [np.nan, 1.0])

    def test_broadcasts(self):
        x, d = np.full((2, 3), 3.0, np.float32), np.array([[1.0], [2.0]], np.float32)
        assert round_to(x, E2M1, divisor=d).tolist() == [[3.0] * 3, [1.5] * 3]


class TestRoundToBfloat16:
    @given(x=float32_arrays)
    def test_is_the_cast_of_ml_dtypes(self, x):
        assert_same_floats(round_to_bfloat16(x), bfloat16(x))

    def test_ties_go_to_even_and_the_largest_values_to_infinity(self):
        bits = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x7F7F7FFF, 0x7F7F8000], np.uint32)
        expected = np.array([0x3F800000, 0x3F820000, 0x3F810000, 0x7F7F0000, 0x7F800000], np.uint32)
        assert_same_floats(round_to_bfloat16(bits.view(np.float32)), expected.view(np.float32))

    def test_keeps_every_bfloat16(self):
        x = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16)
        assert_same_floats(round_to_bfloat16(jnp.asarray(x)), x.astype(np.float32))

    def test_under_jit_rounding_stays(self):
        x = np.linspace(1.0, 2.0, 9973, dtype=np.float32)
        jitted = jax.jit(round_to_bfloat16)(x)
        assert_same_floats(jitted, bfloat16(x))
        assert np.mean(np.asarray(jitted) != x) > 0.9
