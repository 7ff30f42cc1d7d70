"""The arithmetic of the kernels, emulated in numpy over all scales and bfloat16 values.

Approximate instructions differ from GPU to GPU, so reciprocals are taken to be a little off.
"""

import ml_dtypes
import numpy as np
import pytest

from jax_fp4attn.formats import E2M1, E4M3, encode, quantize_mxfp4, round_to

VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
MIDPOINTS = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5], np.float32)
MULTIPLES = np.array([4, 5, 6, 7, 8, 10, 12, 14, 16, 18, 20], np.float32) / 16
HALF_STEP_UNIT = 2.0**22
JUST_ABOVE = 1.0 + 2.0**-18

SCALES = np.arange(1, 0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
BFLOAT16 = np.arange(0x0080, 0x7F80, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)


def move(x, ulps):
    """The float32 so many units in the last place away."""
    return (np.asarray(x, np.float32).view(np.uint32) + np.uint32(ulps % 2**32)).view(np.float32)


def near(scale):
    """All bfloat16 values within six binades of a scale."""
    return BFLOAT16[np.abs(np.log2(BFLOAT16) - np.log2(scale)) <= 6]


def next_bfloat16(x):
    return (np.asarray(x, ml_dtypes.bfloat16).view(np.uint16) + 1).view(ml_dtypes.bfloat16).astype(np.float32)


class TestScale:
    """`kernels.nvfp4.scale_of`"""

    @pytest.mark.parametrize("ulps", [-1, 0, 1])
    def test_rounds_the_quotient_by_six_of_every_magnitude_and_multiple(self, ulps):
        for multiple in MULTIPLES:
            amax = BFLOAT16[:-0x100] * multiple  # All but the largest two binades, which saturate in any case.
            bits = (amax * move(1 / 6, ulps)).view(np.uint32)
            quotient = ((bits + 0x100) & np.uint32(0xFFFFFE00)).view(np.float32)
            byte = np.minimum(quotient, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
            np.testing.assert_array_equal(byte, np.asarray(encode(amax, E4M3, divisor=6.0)))


class TestThresholds:
    """`kernels.nvfp4.thresholds_of` and `kernels.mxfp4.THRESHOLDS`"""

    def test_a_midpoint_times_a_scale_is_a_bfloat16(self):
        exact = MIDPOINTS[:, None].astype(np.float64) * SCALES
        np.testing.assert_array_equal(exact, exact.astype(ml_dtypes.bfloat16).astype(np.float64))

    def test_the_factor_gives_the_next_bfloat16(self):
        for midpoint in MIDPOINTS:
            above = SCALES * np.float32(midpoint * (1 + 0.75 / 128))
            rounded = above.astype(ml_dtypes.bfloat16).astype(np.float32)
            np.testing.assert_array_equal(rounded, next_bfloat16(SCALES * midpoint))

    @pytest.mark.parametrize("ties", ["even", "toward_zero"])
    def test_codes_by_comparison(self, ties):
        goes_up = np.array([False, True] * 3 + [False]) & (ties == "even")
        for scale in SCALES:
            value = near(scale)
            thresholds = np.where(goes_up, MIDPOINTS * scale, next_bfloat16(MIDPOINTS * scale))
            code = (value[:, None] >= thresholds).sum(1)
            expected = np.asarray(round_to(value, E2M1, ties=ties, divisor=scale))
            np.testing.assert_array_equal(VALUES[code], expected)

    @pytest.mark.parametrize("exponent", [-100, -1, 0, 5, 100])
    def test_codes_of_mxfp4(self, exponent):
        sixths = MIDPOINTS.astype(np.float64) / 6
        below = sixths.astype(ml_dtypes.bfloat16)
        thresholds = np.where(below.astype(np.float64) >= sixths, below.astype(np.float32), next_bfloat16(below))
        value = np.arange(0x3C00, 0x3F80, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
        # One block for each value, with 1 beside it to set the scale.
        blocks = np.zeros((value.size, 32), np.float32)
        blocks[:, 0], blocks[:, 1] = value, 1
        q = quantize_mxfp4(np.ldexp(blocks, exponent), rule="floor")
        assert (np.asarray(q.scales) == 127 + exponent).all()
        np.testing.assert_array_equal((value[:, None] >= thresholds).sum(1), np.asarray(q.codes)[:, 0] & 0xF)


def emulate(value, step, ulps, factor=JUST_ABOVE):
    """The code's value, with a reciprocal that is off by so many units in the last place."""
    inverse = move(np.float32(1) / step, ulps)
    coarse = inverse * np.float32(HALF_STEP_UNIT * factor)
    rounder = np.maximum(value * coarse, np.float32(HALF_STEP_UNIT))
    # A fused multiply-add: products of floats are exact in float64, and so is this sum up to the rounding to float32.
    shifted = (value.astype(np.float64) * inverse + rounder).astype(np.float32)
    return np.minimum(shifted - rounder, np.float32(6))


def differences(step, ulps, **options):
    value = BFLOAT16[(step / 64 <= BFLOAT16) & (step * 64 >= BFLOAT16)]
    code = emulate(value, np.full_like(value, step), ulps, **options)
    nearest = np.abs(value[:, None] - VALUES * step).min(1)
    return np.abs(code * step - value), nearest


class TestFoldedCodes:
    """`kernels.folded_scale`, which takes codes from a quotient."""

    @pytest.mark.parametrize("ulps", [-8, -2, -1, 0, 1, 2, 8])
    def test_every_value_gets_a_nearest_code(self, ulps):
        for step in SCALES:
            actual, nearest = differences(step, ulps)
            np.testing.assert_array_equal(actual, nearest)

    def test_an_exact_binade_would_not_do(self):
        assert any((actual != nearest).any() for actual, nearest in (differences(s, -1, factor=1.0) for s in SCALES))
