import functools
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jax_fp4attn.formats import BlockScaled, nvfp4_tensor_scale, quantize_nvfp4
from tests.assertions import assert_close, relative_l2
from tests.formats import oracles
from tests.formats.oracles import E2M1_GRID, E2M1_MIDPOINTS, assert_same_bytes, assert_same_floats

FOLDS = ("none", "k64_mse", "k64_max")
TIES = ("even", "toward_zero")
LARGEST = 6.0 * 448.0
FLOAT32_MAX = float(np.finfo(np.float32).max)
NAN_BYTE, LARGEST_BYTE = 0x7F, 0x7E

all_folds = pytest.mark.parametrize("fold", FOLDS)
both_ties = pytest.mark.parametrize("ties", TIES)

# Compiling one function is faster than compiling its operations one by one.
compiled = jax.jit(quantize_nvfp4, static_argnames=("fold", "ties"))
dequantize = jax.jit(BlockScaled.dequantize)


def jitted(x, *, tensor_scale=None, fold="none", ties="even") -> BlockScaled:
    # All arguments every time: those left out and those with their default are compiled twice.
    return compiled(x, tensor_scale=tensor_scale, fold=fold, ties=ties)


def quantized_row(x, **options) -> BlockScaled:
    """The quantised vector, by the function that other tests compile for two rows."""
    return jax.tree.map(lambda leaf: leaf[0], jitted(np.stack([x, x]).astype(np.float32), **options))


both_ways = pytest.mark.parametrize("quantize", [quantize_nvfp4, jitted], ids=["eager", "jit"])

any_finite = hnp.arrays(
    np.float32,
    (2, 128),
    elements=st.one_of(
        st.floats(-FLOAT32_MAX, FLOAT32_MAX, width=32),
        st.floats(-3000, 3000, width=32),
        st.sampled_from([1e38, -1e38, 1e-38, 1e-40, -1e-45, FLOAT32_MAX]),
    ),
)


def scale_values() -> np.ndarray:
    """The 126 positive finite E4M3 values, in the order of their bytes."""
    return oracles.decode_e4m3(np.arange(1, 0x7F, dtype=np.uint8))


def blocks_of_midpoints() -> np.ndarray:
    """A row for each E4M3 value s: a block with 6 s, which makes s its scale, and ±s times each midpoint."""
    units = np.concatenate([[6.0, 0.0], E2M1_MIDPOINTS, -E2M1_MIDPOINTS]).astype(np.float32)
    return scale_values()[:, None] * units  # exact: 4 bits times 3


def varied_rows() -> np.ndarray:
    """Rows of 128: Gaussian at scales from underflow to saturation, integers (many ties), outliers and zeros."""
    rng = np.random.default_rng(0)
    gaussian = rng.standard_normal((12, 128)) * 2.0 ** np.linspace(-14, 12, 12)[:, None]
    integers = rng.integers(-24, 25, (10, 128))
    sparse = integers * (rng.random((10, 128)) < 0.1)
    outliers = rng.standard_normal((4, 128))
    outliers[:, ::32] *= 100
    midpoints = rng.permutation(blocks_of_midpoints())[:80].reshape(10, 128)
    return np.concatenate([gaussian, integers, sparse, outliers, midpoints]).astype(np.float32)


def assert_quantized(actual: BlockScaled, codes: np.ndarray, scales: np.ndarray) -> None:
    assert actual.codes.dtype == actual.scales.dtype == jnp.uint8
    np.testing.assert_array_equal(actual.scales, scales)
    np.testing.assert_array_equal(oracles.unpack(actual.codes), codes)


def magnitude_code(quotient: Fraction, ties: str) -> int:
    """Code of a non-negative number: how many midpoints lie below it, and those that it equals."""
    code = 0
    for below, midpoint in enumerate(Fraction(float(m)) for m in E2M1_MIDPOINTS):
        to_even = ties == "even" and below % 2 == 1
        code += quotient > midpoint or (quotient == midpoint and to_even)
    return code


class TestBytes:
    @both_ties
    @all_folds
    def test_are_those_of_the_numpy_quantiser(self, fold, ties):
        x = varied_rows()
        assert_quantized(jitted(x, fold=fold, ties=ties), *oracles.nvfp4(x, fold=fold, ties=ties))

    @both_ties
    @given(x=any_finite)
    def test_are_those_of_the_numpy_quantiser_for_any_finite_float32(self, ties, x):
        assert_quantized(jitted(x, ties=ties), *oracles.nvfp4(x, ties=ties))

    @both_ties
    @given(x=any_finite)
    def test_codes_are_the_nearest_to_the_exact_quotient(self, ties, x):
        q = jitted(x, ties=ties)
        scales = np.repeat(oracles.decode_e4m3(np.asarray(q.scales)), 16, axis=-1)
        pairs = zip(np.abs(x).ravel().tolist(), scales.ravel().tolist(), strict=True)
        expected = [magnitude_code(Fraction(value) / Fraction(scale), ties) if scale else 0 for value, scale in pairs]
        np.testing.assert_array_equal(oracles.unpack(q.codes).ravel() % 8, expected)

    @pytest.mark.parametrize("shape", [(16,), (3, 48), (2, 1, 3, 16)], ids=str)
    def test_one_scale_for_16_elements_of_the_last_axis(self, shape):
        x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
        q = jitted(x)
        assert q.shape == shape
        assert q.codes.shape == (*shape[:-1], shape[-1] // 2)
        assert q.scales.shape == (*shape[:-1], shape[-1] // 16)
        assert_quantized(q, *oracles.nvfp4(x))

    @pytest.mark.parametrize("fold", ["none", "k64_mse"])
    def test_of_empty_batches_are_empty(self, fold):
        q = jitted(np.zeros((0, 128), np.float32), fold=fold)
        assert (q.shape, q.scales.shape) == ((0, 128), (0, 8))

    def test_describe_themselves_as_nvfp4(self):
        q = jitted(jnp.ones(16))
        assert (q.block_size, q.scale_format, q.endpoint_scale, q.tensor_scale) == (16, "e4m3", False, None)

    def test_the_even_element_is_in_the_low_nibble(self):
        x = jnp.array([0.5, -6.0] + [0.0] * 14)
        assert jitted(x).codes.tolist() == [0xF1] + [0] * 7


class TestDivision:
    """A quotient by a scale or by 6 that is a midpoint stays one, whatever a compiler makes of the division."""

    EVEN = np.array([0, 2, 2, 4, 4, 6, 6])
    SMALLER = np.arange(7)

    @both_ways
    @pytest.mark.parametrize(("ties", "expected"), [("even", EVEN), ("toward_zero", SMALLER)], ids=TIES)
    def test_every_midpoint_of_every_scale(self, quantize, ties, expected):
        codes = np.concatenate([[7, 0], expected, expected + 8])
        q = quantize(blocks_of_midpoints(), ties=ties)
        assert_quantized(q, np.tile(codes, (126, 1)), np.arange(1, 0x7F)[:, None])

    @both_ways
    @both_ties
    @pytest.mark.parametrize("direction", [0.0, np.inf], ids=["below", "above"])
    def test_the_floats_next_to_a_midpoint_go_to_the_nearer_code(self, quantize, ties, direction):
        x = blocks_of_midpoints()
        x[:, 2:] = np.copysign(np.nextafter(np.abs(x[:, 2:]), np.float32(direction)), x[:, 2:])
        magnitude = np.arange(7) + (direction > 0)
        codes = np.concatenate([[7, 0], magnitude, magnitude + 8])
        q = quantize(x, ties=ties)
        assert_quantized(q, np.tile(codes, (126, 1)), np.arange(1, 0x7F)[:, None])

    @both_ways
    @both_ties
    def test_a_maximum_between_two_scales_takes_the_even_byte(self, quantize, ties):
        # `ties` is about codes; scales always round to even.
        below = np.concatenate([[0], scale_values()])
        x = np.zeros((126, 16), np.float32)
        x[:, 3] = 3 * (below[:-1] + below[1:])
        byte = np.arange(126)
        np.testing.assert_array_equal(quantize(x, ties=ties).scales[:, 0], byte + byte % 2)


class TestFold:
    @both_ties
    @pytest.mark.parametrize("fold", ["k64_mse", "k64_max"])
    def test_blocks_i_and_i_plus_4_share_a_scale_and_no_others(self, fold, ties):
        # Block b has values of ±(b + 1): joint maxima differ for all four pairs.
        x = np.repeat(np.arange(1.0, 9.0), 16) * np.tile([1.0, -1.0], 64)
        scales = np.asarray(quantized_row(x, fold=fold, ties=ties).scales)
        np.testing.assert_array_equal(scales[:4], scales[4:])
        assert len(set(scales[:4].tolist())) == 4

    def test_max_takes_the_joint_maximum(self):
        x = np.zeros((2, 128), np.float32)
        x[0, 5], x[0, 64 + 7], x[1, 16], x[1, 80] = 3.0, -12.0, 24.0, 6.0
        scales = jitted(x, fold="k64_max").scale_values()
        assert scales.tolist() == [[2.0, 0, 0, 0, 2.0, 0, 0, 0], [0, 4.0, 0, 0, 0, 4.0, 0, 0]]

    @both_ties
    def test_mse_takes_the_first_of_equal_errors(self, ties):
        x = np.zeros(128, np.float32)
        x[0], x[64] = 18.0, 15.0
        # A scale of 2.5 (multiplier 0.875) gives 15 and 15, one of 3 (1.0) gives 18 and 12, and one
        # of 3.75 (1.25) gives 15 and 15: a squared error of 9 each. 15 / 3 = 5 goes to 4 either way.
        assert quantized_row(x, fold="k64_mse", ties=ties).scale_values()[::4].tolist() == [2.5, 2.5]

    @pytest.mark.parametrize(
        ("multiplier", "units"),
        [
            (0.75, [6.0, -4.0]),
            (0.875, [3.0, 1.5, 1.0, -0.5, 2.0, -3.0, 4.0]),
            (1.0, [3.0, 1.5, 1.0, -0.5, 2.0, -3.0, 4.0]),
            (1.125, [3.0, 1.5, 1.0, -0.5, 2.0, -3.0, 4.0]),
            (1.25, [3.0, 1.5, 1.0, -0.5, 2.0, -3.0, 4.0]),
        ],
    )
    def test_mse_finds_the_scale_that_is_exact_but_for_one_element(self, multiplier, units):
        # One element sets the maximum; the 31 others, all on the grid of the scale, outweigh it.
        scale = 4.0 * multiplier
        pair = scale * np.resize(units, 32)
        pair[0] = 24.0
        x = np.zeros(128, np.float32)
        x[:16], x[64:80] = pair[:16], pair[16:]
        assert quantized_row(x, fold="k64_mse").scale_values()[::4].tolist() == [scale] * 2

    def test_mse_has_less_error_than_max(self):
        x = np.random.default_rng(1).standard_normal((46, 128)).astype(np.float32)
        errors = {fold: relative_l2(dequantize(jitted(x, fold=fold)), x) for fold in FOLDS}
        assert errors["k64_mse"] < min(errors["k64_max"], 0.1)

    @both_ties
    def test_max_of_equal_halves_is_unfolded(self, ties):
        half = varied_rows()[:, :64]
        x = np.concatenate([half, half], -1)
        assert_same_bytes(jitted(x, fold="k64_max", ties=ties), jitted(x, ties=ties))


class TestTensorScale:
    @pytest.mark.parametrize(
        ("shape", "fold", "ties"),
        [
            ((), "none", "even"),
            ((), "k64_max", "toward_zero"),
            ((46, 1), "none", "toward_zero"),
            ((46, 1), "k64_mse", "even"),
        ],
    )
    def test_bytes_are_those_of_the_numpy_quantiser(self, shape, fold, ties):
        x = varied_rows()
        scale = np.random.default_rng(3).uniform(0.1, 3.0, shape).astype(np.float32)
        q = jitted(x, tensor_scale=scale, fold=fold, ties=ties)
        assert_quantized(q, *oracles.nvfp4(x, tensor_scale=scale, fold=fold, ties=ties))
        assert_same_floats(q.tensor_scale, scale)

    @pytest.mark.parametrize("fold", ["none", "k64_mse"])
    def test_a_power_of_two_only_moves_the_values(self, fold):
        x = varied_rows()
        plain = jitted(x, fold=fold)
        scale = np.full((46, 1), 2.0**-9, np.float32)
        scaled = jitted(x * scale, tensor_scale=scale, fold=fold)
        assert_quantized(scaled, oracles.unpack(plain.codes), np.asarray(plain.scales))
        assert_same_floats(dequantize(scaled), dequantize(plain) * 2.0**-9)

    def test_lets_the_largest_block_scale_reach_the_top(self):
        amax = np.geomspace(1e-30, 1e30, 46, dtype=np.float32)[:, None]
        x = amax * np.linspace(-1, 0.9, 128, dtype=np.float32)
        scale = nvfp4_tensor_scale(x, -1)
        # A division by a constant may become a product with its reciprocal.
        assert_close(scale, amax / np.float32(LARGEST), rtol=2.0**-22, atol=0.0)
        assert set(jitted(x, tensor_scale=scale).scales.max(-1).tolist()) == {LARGEST_BYTE}

    @pytest.mark.parametrize(
        ("axis", "expected"),
        [(None, [[[4.0]]]), (-1, [[[1.0], [4.0]]]), (1, [[[0.5, 4.0]]]), ((0, 2), [[[1.0], [4.0]]])],
        ids=str,
    )
    def test_axes_are_kept(self, axis, expected):
        x = LARGEST * jnp.array([[[0.5, -1.0], [0.25, 4.0]]])
        assert nvfp4_tensor_scale(x, axis).tolist() == expected

    def test_of_zeros_is_one_and_of_the_smallest_numbers_is_normal(self):
        x = jnp.array([[0.0, -0.0], [1e-45, 0.0], [1e-38, -1e-38], [2.0**-126, 0.0]])
        for scale in (nvfp4_tensor_scale(x, -1), jax.jit(lambda x: nvfp4_tensor_scale(x, -1))(x)):
            assert scale[0, 0] == 1.0
            # Whether a subnormal maximum is zero depends on the platform.
            assert scale[1, 0] in (1.0, 2.0**-126)
            assert scale[3, 0] == 2.0**-126

    def test_of_the_largest_float_does_not_overflow(self):
        x = np.full((46, 128), FLOAT32_MAX, np.float32)
        values = dequantize(jitted(x, tensor_scale=nvfp4_tensor_scale(x, -1)))
        assert np.isfinite(values).all()
        assert relative_l2(values, x) < 1e-6

    def test_recovers_small_values_that_underflow_without_it(self):
        # Keys times 1e-6: amax / 6 is far below the smallest E4M3 value.
        x = 1e-6 * np.random.default_rng(4).standard_normal((46, 128)).astype(np.float32)
        without = jitted(x)
        assert not without.codes.any()
        assert not without.scales.any()
        scaled = jitted(x, tensor_scale=nvfp4_tensor_scale(x, -1))
        assert relative_l2(dequantize(scaled), x) < 0.12


class TestExtremes:
    def test_an_infinity_saturates_under_a_tensor_scale_too(self):
        x = np.ones((1, 128), np.float32)
        x[0, 3] = np.inf
        values = np.asarray(quantize_nvfp4(x, tensor_scale=nvfp4_tensor_scale(x)).dequantize())
        assert np.isfinite(values).all()
        assert values[0, 3] > 1e38

    @pytest.mark.parametrize(
        ("quantize", "fold"),
        [(quantize_nvfp4, "none"), (jitted, "none"), (jitted, "k64_mse")],
        ids=["eager", "jit", "jit-k64_mse"],
    )
    def test_zeros_have_scale_0_and_codes_0(self, quantize, fold):
        x = np.zeros((2, 128), np.float32)
        x[1] = -0.0
        with jax.debug_nans(True):
            q = quantize(x, fold=fold)
            values = dequantize(q)
        assert_quantized(q, np.zeros((2, 128)), np.zeros((2, 8)))
        assert_same_floats(values, np.zeros((2, 128)))

    @both_ways
    def test_zero_blocks_beside_others(self, quantize):
        x = np.random.default_rng(8).standard_normal((2, 128)).astype(np.float32)
        x[:, 16:32] = 0.0
        with jax.debug_nans(True):
            q = quantize(x)
        assert not q.scales[:, 1].any()
        assert not q.codes[:, 8:16].any()
        assert np.delete(q.scales, 1, axis=1).all()

    def test_subnormal_scales(self):
        # Half of the smallest scale ties to zero, the float above it does not.
        multiples = np.array([0.25, 0.5, np.nextafter(np.float32(0.5), np.float32(1)), 1, 2, 3, 4, 5, 6, 7, 8])
        x = np.zeros((16, 16), np.float32)
        x[:11, 0] = 6 * 2.0**-9 * multiples
        q = jitted(x.reshape(2, 128))
        assert q.scales.ravel()[:11].tolist() == [0, 0, 1, 1, 2, 3, 4, 5, 6, 7, 8]
        # 3 times the smallest scale and a bit, over that scale, is code 5.
        assert oracles.unpack(q.codes).reshape(16, 16)[:11, 0].tolist() == [0, 0, 5] + [7] * 8
        assert_same_floats(dequantize(q).reshape(16, 16)[3:], x[3:])

    @all_folds
    def test_saturates_beyond_six_times_448(self, fold):
        largest = np.float32(LARGEST)
        above = np.nextafter(largest, np.float32(np.inf))
        x = np.zeros((2, 8, 16), np.float32)
        x[0, :, 3] = largest, above, 2784.0, 2784.1, 1e4, 1e38, FLOAT32_MAX, np.inf
        x[1] = -x[0]
        q = jitted(x.reshape(2, 128), fold=fold)
        assert q.scales.tolist() == [[LARGEST_BYTE] * 8] * 2
        expected = np.zeros((2, 8, 16), np.float32)
        expected[1] = -0.0
        expected[:, :, 3] = [[LARGEST], [-LARGEST]]
        assert_same_floats(dequantize(q), expected.reshape(2, 128))

    def test_one_element_of_1e4_costs_only_its_block(self):
        x = np.random.default_rng(5).standard_normal((2, 128)).astype(np.float32)
        with_outlier = x.copy()
        with_outlier[0, 20] = 1e4
        plain, q = jitted(x), jitted(with_outlier)
        other_blocks = np.arange(8) != 1
        np.testing.assert_array_equal(q.scales[:, other_blocks], plain.scales[:, other_blocks])
        values = np.asarray(dequantize(q))[0].reshape(8, 16)
        np.testing.assert_array_equal(values[other_blocks], dequantize(plain)[0].reshape(8, 16)[other_blocks])
        assert values[1].tolist() == [0.0] * 4 + [LARGEST] + [0.0] * 11

    def test_an_outlier_keeps_three_bits_and_its_block_loses_what_is_below_a_24th(self):
        x = np.ones(128, np.float32)
        for outlier, scale, others in ((24.0, 4.0, 0.0), (23.0, 3.75, 1.875), (-100.0, 16.0, 0.0)):
            x[7] = outlier
            q = quantized_row(x)
            assert float(q.scale_values()[0]) == scale
            values = np.asarray(dequantize(q))[:16]
            assert values[7] == np.copysign(6 * scale, outlier)
            assert values[np.arange(16) != 7].tolist() == [others] * 15

    @pytest.mark.parametrize(("fold", "blocks"), [("none", [2]), ("k64_max", [2, 6]), ("k64_mse", [2, 6])])
    def test_nan_marks_the_blocks_of_its_scale_and_no_others(self, fold, blocks):
        x = np.random.default_rng(9).standard_normal((2, 128)).astype(np.float32)
        plain = jitted(x, fold=fold)
        x[0, 16 * 2 + 9] = np.nan
        q = jitted(x, fold=fold)
        marked = np.zeros((2, 8), bool)
        marked[0, blocks] = True
        np.testing.assert_array_equal(np.asarray(q.scales) == NAN_BYTE, marked)
        np.testing.assert_array_equal(np.asarray(q.scales)[~marked], np.asarray(plain.scales)[~marked])
        codes, plain_codes = (np.asarray(a.codes).reshape(2, 8, 8) for a in (q, plain))
        np.testing.assert_array_equal(codes[~marked], plain_codes[~marked])
        np.testing.assert_array_equal(np.isnan(dequantize(q)), np.repeat(marked, 16, -1))

    @all_folds
    def test_infinities_saturate(self, fold):
        x = np.random.default_rng(10).standard_normal((2, 128)).astype(np.float32)
        x[0, 4], x[0, 100] = np.inf, -np.inf
        values = np.asarray(dequantize(jitted(x, fold=fold)))
        assert np.isfinite(values).all()
        assert (values[0, 4], values[0, 100]) == (LARGEST, -LARGEST)

    @all_folds
    @given(x=any_finite)
    @example(x=np.full((2, 128), FLOAT32_MAX, np.float32))
    @example(x=np.full((2, 128), 1e-40, np.float32))
    def test_finite_numbers_give_finite_numbers(self, fold, x):
        q = jitted(x, fold=fold)
        assert int(q.scales.max()) <= LARGEST_BYTE
        assert np.isfinite(dequantize(q)).all()

    @all_folds
    @pytest.mark.parametrize("exponent", [-9, -6, 0, 3, 8])
    def test_the_grid_times_a_power_of_two_is_exact(self, exponent, fold):
        grid = np.concatenate([E2M1_GRID, -E2M1_GRID[1:], [6.0]]).astype(np.float32)
        x = np.tile(grid * np.float32(2.0**exponent), (2, 8))
        assert_same_floats(dequantize(jitted(x, fold=fold)), x)


class TestTransforms:
    @both_ties
    @pytest.mark.parametrize("fold", ["none", "k64_mse"])
    def test_eager_jit_and_vmap_give_the_same_bytes(self, fold, ties):
        x = varied_rows()
        q = jitted(x, fold=fold, ties=ties)
        assert_same_bytes(quantize_nvfp4(x, fold=fold, ties=ties), q)
        assert_same_bytes(jax.vmap(functools.partial(jitted, fold=fold, ties=ties))(x), q)

    def test_vmap_over_tensor_scales(self):
        x = varied_rows()
        scale = np.random.default_rng(6).uniform(0.1, 3.0, (len(x), 1)).astype(np.float32)
        mapped = jax.vmap(lambda x, scale: jitted(x, tensor_scale=scale))(x, scale)
        assert_same_bytes(mapped, jitted(x, tensor_scale=scale))

    @pytest.mark.parametrize("fold", ["none", "k64_mse"])
    def test_under_jit_quantisation_is_not_removed(self, fold):
        x = np.random.default_rng(7).standard_normal((46, 128)).astype(np.float32)
        values = jax.jit(lambda x: quantize_nvfp4(x, fold=fold).dequantize())(x)
        assert np.mean(np.asarray(values) != x) > 0.9
        assert_same_floats(values, dequantize(jitted(x, fold=fold)))

    def test_bfloat16_inputs_give_the_bytes_of_their_float32_values(self):
        x = jnp.asarray(varied_rows(), jnp.bfloat16)
        assert_same_bytes(jitted(x), jitted(x.astype(jnp.float32)))

    @pytest.mark.gpu
    @both_ties
    @all_folds
    def test_a_gpu_gives_the_bytes_of_the_numpy_quantiser(self, fold, ties):
        x = varied_rows()
        assert_quantized(jitted(x, fold=fold, ties=ties), *oracles.nvfp4(x, fold=fold, ties=ties))


class TestRejects:
    def test_unknown_folds(self):
        with pytest.raises(ValueError, match="fold: expected 'none', 'k64_mse' or 'k64_max', got 'k64'"):
            quantize_nvfp4(jnp.ones(128), fold="k64")

    @both_ties
    def test_unknown_ties(self, ties):
        with pytest.raises(ValueError, match="ties: expected 'even' or 'toward_zero', got"):
            quantize_nvfp4(jnp.ones(16), ties=ties.upper())

    @pytest.mark.parametrize(
        ("shape", "fold", "width"),
        [((), "none", 16), ((8,), "none", 16), ((16, 17), "none", 16), ((), "k64_max", 128), ((64,), "k64_mse", 128)],
    )
    def test_last_dimensions_that_are_no_multiple_of_a_block(self, shape, fold, width):
        with pytest.raises(ValueError, match=f"x: expected a last dimension that {width} divides, got shape"):
            quantize_nvfp4(jnp.zeros(shape), fold=fold)
