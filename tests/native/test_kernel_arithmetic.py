"""The arithmetic of the kernels, emulated in numpy over all scales and bfloat16 values.

Approximate instructions differ from GPU to GPU, so reciprocals are taken to be a little off.
"""

import functools

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


def nearest_scales(quotient):
    rounded = ((quotient.view(np.uint32) + 0x100) & np.uint32(0xFFFFFE00)).view(np.float32)
    return np.minimum(rounded, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


class TestScale:
    """`kernels.nvfp4.scale_of`"""

    @pytest.mark.parametrize("ulps", [-1, 0, 1])
    def test_rounds_the_quotient_by_six_of_every_magnitude_and_multiple(self, ulps):
        for multiple in MULTIPLES:
            amax = BFLOAT16[:-0x100] * multiple  # All but the largest two binades, which saturate in any case.
            byte = nearest_scales(amax * move(1 / 6, ulps))
            np.testing.assert_array_equal(byte, np.asarray(encode(amax, E4M3, divisor=6.0)))

    @pytest.mark.parametrize("ulps", [-1, 0, 1])
    def test_a_multiple_and_the_sixth_may_be_one_factor(self, ulps):
        amax = BFLOAT16[:-0x100]
        for multiple in MULTIPLES:
            byte = nearest_scales(amax * move(np.float32(multiple / 6), ulps))
            np.testing.assert_array_equal(byte, np.asarray(encode(amax * multiple, E4M3, divisor=6.0)))


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
    """`kernels.folded_scale` where it works out errors exactly, with codes from a quotient."""

    @pytest.mark.parametrize("ulps", [-8, -2, -1, 0, 1, 2, 8])
    def test_every_value_gets_a_nearest_code(self, ulps):
        for step in SCALES:
            actual, nearest = differences(step, ulps)
            np.testing.assert_array_equal(actual, nearest)

    def test_an_exact_binade_would_not_do(self):
        assert any((actual != nearest).any() for actual, nearest in (differences(s, -1, factor=1.0) for s in SCALES))


LEAST_SEARCHED, LAST_SEARCHED = 0x3B9A, 0x4621
UP_ON_TIE = 1.0 + 3.0 * 2.0**-16
RATIO, SLACK = 1.006, 2.0**-18
RECIPROCAL_ULPS = [-2, -1, 0, 1, 2]


def scales_of(amax, multiple):
    return nearest_scales(amax * np.float32(multiple / 6)).view(ml_dtypes.float8_e4m3fn).astype(np.float32)


@functools.cache
def units_and_scales():
    """Every power of two in a largest magnitude with every scale but zero that a block with it may try."""
    bits = np.arange(LEAST_SEARCHED, LAST_SEARCHED + 1, dtype=np.uint16)
    units = (bits & 0x7F80).view(ml_dtypes.bfloat16).astype(np.float32)
    amax = bits.view(ml_dtypes.bfloat16).astype(np.float32)
    pairs = {pair for m in MULTIPLES for pair in zip(units.tolist(), scales_of(amax, m).tolist(), strict=True)}
    return sorted((unit, scale) for unit, scale in pairs if scale)


def in_units(value, unit):
    """`kernels.half_quotients.in_units`"""
    magnitude = (np.abs(value).astype(ml_dtypes.bfloat16).view(np.uint16)).astype(np.int32)
    exponent = np.asarray(unit, ml_dtypes.bfloat16).view(np.uint16).astype(np.int32)
    return (np.clip(magnitude + (15 << 7) - exponent, 0, 0x7FF) << 3).astype(np.uint16).view(np.float16)


def inverse_of(scale, unit, ulps=0, factor=1.0):
    reciprocal = move(np.float32(1) / np.float32(scale), ulps)
    return (reciprocal * np.float32(unit * 2.0**-14) * np.float32(factor)).astype(np.float16)


def quotients(magnitudes, inverse):
    """Bits of the products, that a float32 holds exactly before they are rounded."""
    return (magnitudes.astype(np.float32) * inverse.astype(np.float32)).astype(np.float16).view(np.uint16)


def rounded(quotient):
    """Values of E2M1."""
    code = np.minimum(quotient.astype(np.int32) + 0x100, 0xFFF) & 0xFE00
    return code.astype(np.uint16).view(np.float16).astype(np.float32) * 2.0**14


def folded_codes(value, scale, unit, ties, ulps=0, up_on_tie=UP_ON_TIE):
    factor = 1.0 if ties == "toward_zero" else up_on_tie
    quotient = quotients(in_units(value, unit), inverse_of(scale, unit, ulps, factor)).astype(np.int32)
    addend = 0xFF + (0 if ties == "toward_zero" else quotient >> 9 & 1)
    return VALUES[np.minimum(quotient + addend, 0xFFF) >> 9]


def estimated_errors(magnitudes, scale, unit):
    """Of blocks [n, 32], by pairs in the order of the kernel."""
    step = (scale * np.float32(2.0**14 / unit)).astype(np.float16).astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):  # The scale may be 0.
        quotient = quotients(magnitudes, inverse_of(scale, unit)[:, None])
    code = (rounded(quotient) * 2.0**-14).astype(np.float64)
    difference = (magnitudes - code * step[:, None]).astype(np.float16).astype(np.float64)
    pairs = difference.reshape(-1, 4, 4, 2)
    sums = np.zeros((len(magnitudes), 4, 2))
    for i in range(4):
        sums = (pairs[:, i] ** 2 + sums).astype(np.float16).astype(np.float64)
    sums = (sums[:, 0::2] + sums[:, 1::2]).astype(np.float16)
    return (sums[:, 0] + sums[:, 1]).astype(np.float32).sum(1)


class TestHalfQuotients:
    """`kernels.half_quotients`"""

    def test_magnitudes_are_exact_but_for_the_smallest(self):
        for unit in (2.0**-8, 1.0, 2.0**13):
            value = BFLOAT16[2 * unit > BFLOAT16]
            off = np.abs(in_units(value, unit).astype(np.float64) - value / unit)
            assert not off[value >= unit * 2.0**-14].any()
            assert off.max() < 2.0**-14
            assert (in_units(BFLOAT16[2 * unit <= BFLOAT16], unit) == 2 - 2.0**-7).all()

    @pytest.mark.parametrize("ulps", RECIPROCAL_ULPS)
    def test_every_value_gets_a_nearest_code_and_its_difference_is_exact(self, ulps):
        for unit, scale in units_and_scales():
            value = BFLOAT16[(unit * 2.0**-14 <= BFLOAT16) & (2 * unit > BFLOAT16)]
            step = np.float64(np.float16(scale / unit * 2.0**14))
            assert step == scale / unit * 2.0**14
            code = rounded(quotients(in_units(value, unit), inverse_of(scale, unit, ulps)))
            difference = code * 2.0**-14 * step - in_units(value, unit).astype(np.float64)
            np.testing.assert_array_equal(difference.astype(np.float16), difference)
            nearest = np.abs(value[:, None].astype(np.float64) - VALUES * scale).min(1)
            np.testing.assert_array_equal(np.abs(difference) * unit, nearest)

    @pytest.mark.parametrize("ties", ["even", "toward_zero"])
    @pytest.mark.parametrize("ulps", RECIPROCAL_ULPS)
    def test_codes(self, ties, ulps):
        value = BFLOAT16[(BFLOAT16 >= 2.0**-30) & (BFLOAT16 <= 2.0**20)]
        for unit, scale in [*units_and_scales(), (2.0**13, 448.0)]:
            # A larger value has a larger unit, except where the scale is the largest one.
            some = value if scale == 448 else value[value < 2 * unit]
            expected = np.asarray(oracle_codes(scale, ties))[np.searchsorted(BFLOAT16, some)]
            np.testing.assert_array_equal(folded_codes(some, scale, unit, ties, ulps), expected)

    def test_ties_would_go_down_without_the_factor(self):
        wrong = [
            (
                folded_codes(tie, scale, unit, "even", up_on_tie=1.0) < np.asarray(round_to(tie, E2M1, divisor=scale))
            ).any()
            for unit, scale in units_and_scales()
            for tie in [MIDPOINTS * scale]
        ]
        assert any(wrong)


@functools.cache
def oracle_codes(scale, ties):
    """Of every bfloat16."""
    return np.asarray(round_to(BFLOAT16, E2M1, ties=ties, divisor=scale))


def blocks(kind, count=4096):
    """Magnitudes [count, 32] that are searched."""
    rng = np.random.default_rng(0)
    value = np.abs(rng.standard_normal((count, 32)))
    size = np.exp2(rng.uniform(-7, 12, (count, 1)))
    if kind == "normal":
        value = value * size
    elif kind == "of all sizes":
        value = size * np.exp2(rng.uniform(-24, 0, value.shape))
    elif kind == "one large":
        value = size * np.where(np.arange(32) == 7, 1, value * np.exp2(rng.uniform(-12, -2, (count, 1))))
    elif kind == "equal":
        value = np.broadcast_to(size, value.shape)
    elif kind == "near codes":
        value = size * rng.choice(VALUES, value.shape) * (1 + rng.choice([0, 2.0**-7], value.shape))
    elif kind == "midpoints":
        value = size * rng.choice(MIDPOINTS, value.shape)
    value = value.astype(ml_dtypes.bfloat16)
    amax = value.view(np.uint16).max(1)
    return value[(amax >= LEAST_SEARCHED) & (amax <= LAST_SEARCHED)].astype(np.float32)


class TestEstimates:
    """`kernels.folded_scale`: errors in float16, of which the best decides if no other one is near."""

    def test_outside_the_search_all_candidates_have_one_scale(self):
        bits = np.arange(0x7F80, dtype=np.uint16)
        amax = bits.view(ml_dtypes.bfloat16).astype(np.float32)
        amax = np.minimum(amax, 2.0**20)
        differ = np.asarray(encode(amax * MULTIPLES[0], E4M3, divisor=6.0)) != np.asarray(
            encode(amax * MULTIPLES[-1], E4M3, divisor=6.0)
        )
        np.testing.assert_array_equal(bits[differ], np.arange(LEAST_SEARCHED, LAST_SEARCHED + 1))

    def test_the_limit_covers_what_both_estimates_may_be_off_by(self):
        roundings, scale_bits = 6, 2.0**-16
        above, below = ((1 + sign * 2.0**-11) ** roundings * (1 + sign * scale_bits) for sign in (1, -1))
        assert above / below < RATIO
        # Each of 16 products a half may be off by half the smallest float16, and small magnitudes by 2^-14 of the unit.
        assert SLACK > 2 * (32 * 2.0**-25 + 32 * 2.0**-28)

    @pytest.mark.parametrize("kind", ["normal", "of all sizes", "one large", "equal", "near codes", "midpoints"])
    def test_no_best_candidate_is_beyond_the_limit(self, kind):
        value = blocks(kind)
        assert len(value) > 2000
        amax = value.max(1)
        unit = np.exp2(np.floor(np.log2(amax)))
        exact, estimated = [], []
        for multiple in MULTIPLES:
            scale = scales_of(amax, multiple)
            step = scale[:, None].astype(np.float64)
            nearest = np.abs(value[..., None] - VALUES * step[..., None]).min(-1)
            exact.append((nearest**2).sum(1) / unit**2)
            estimated.append(estimated_errors(in_units(value, unit[:, None]), scale, unit))
        exact, estimated = np.array(exact), np.array(estimated)
        np.testing.assert_allclose(estimated, exact, rtol=0.00294, atol=SLACK / 2)
        # Sums in float32 make equals of what differs by less than 2^-20.
        is_best = exact <= exact.min(0) * (1 + 2.0**-20)
        assert (estimated <= estimated.min(0) * RATIO + SLACK)[is_best].all()
