import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jax_fp4attn.formats import BlockScaled, quantize_mxfp4
from jax_fp4attn.formats.packing import unpack_codes
from tests.assertions import relative_l2
from tests.formats import oracles
from tests.formats.oracles import (
    E2M1_GRID,
    E2M1_MIDPOINTS,
    assert_same_bytes,
    assert_same_floats,
    bfloat16,
)

RULES = ("floor", "ceil", "rte", 1.5, 1.203125, "best_l2")
CONVENTIONS = ("endpoint", "ocp")

all_rules = pytest.mark.parametrize("rule", RULES)
both_conventions = pytest.mark.parametrize("convention", CONVENTIONS)
both_tiles = pytest.mark.parametrize("rows_per_scale", [1, 32])

# Compiling one function is faster than compiling its operations one by one.
jitted = jax.jit(quantize_mxfp4, static_argnames=("rule", "rows_per_scale", "convention", "ties"))
dequantize = jax.jit(BlockScaled.dequantize)

finite_arrays = hnp.arrays(
    np.float32,
    (2, 64),
    elements=st.one_of(
        st.floats(width=32, allow_nan=False, allow_infinity=False),
        st.floats(-3, 3, width=32),
        st.sampled_from([0.0, -0.0, 1e-40, -1e-40, 1e38, -1e38]),
    ),
)


def quantize(x, *, rule="rte", rows_per_scale=1, convention="endpoint", ties="even") -> BlockScaled:
    # All arguments every time: those left out and those with their default are compiled twice.
    return jitted(x, rule=rule, rows_per_scale=rows_per_scale, convention=convention, ties=ties)


def gaussian(shape, seed=0):
    return bfloat16(np.random.default_rng(seed).standard_normal(shape))


def ties(shape, seed=0):
    """Multiples of 1/24 with maxima at powers of two times 1, 1.25, 1.5 and 1.75.

    In code units, 6 times over, many of them are midpoints, and so are the maxima of exponents.
    """
    rng = np.random.default_rng(seed)
    x = rng.integers(-24, 25, shape) / 24
    x[..., ::32] = rng.choice([0.5, 0.625, 0.75, 0.875], x[..., ::32].shape)
    x = x.clip(-0.875, 0.875) * 2.0 ** rng.integers(-3, 4, (*shape[:-1], 1))
    return x.astype(np.float32)


def assert_matches_oracle(q, x, **options):
    codes, scales = oracles.mxfp4(x, **options)
    np.testing.assert_array_equal(q.scales, scales)
    np.testing.assert_array_equal(oracles.unpack(q.codes), codes)


class TestBytes:
    @both_tiles
    @both_conventions
    @all_rules
    @pytest.mark.parametrize("draw", [gaussian, ties])
    def test_are_those_of_the_oracle(self, draw, rule, convention, rows_per_scale):
        x = draw((2, 64, 64))
        options = {"rule": rule, "convention": convention, "rows_per_scale": rows_per_scale}
        q = quantize(x, **options)
        assert q.codes.dtype == q.scales.dtype == jnp.uint8
        assert (q.codes.shape, q.scales.shape, q.shape) == ((2, 64, 32), (2, 64, 2), x.shape)
        assert (q.block_size, q.scale_format, q.tensor_scale) == (32, "e8m0", None)
        assert q.endpoint_scale == (convention == "endpoint")
        assert_matches_oracle(q, x, **options)

    @both_conventions
    @pytest.mark.parametrize("rule", ["rte", "best_l2"])
    def test_with_strict_ties_are_those_of_the_oracle(self, rule, convention):
        x = ties((64, 64))
        if convention == "ocp":
            # The units of an endpoint are sixths, those of OCP are not.
            x = np.random.default_rng(0).integers(-24, 25, (64, 64)).astype(np.float32)
        options = {"rule": rule, "convention": convention, "ties": "toward_zero"}
        q = quantize(x, **options)
        assert_matches_oracle(q, x, **options)
        assert (q.codes != quantize(x, rule=rule, convention=convention).codes).any()

    @both_conventions
    @pytest.mark.parametrize("rule", ["floor", "ceil", "rte", 1.203125])
    @given(x=finite_arrays)
    def test_of_any_finite_float32_are_those_of_the_oracle(self, rule, convention, x):
        # Without the numbers that are subnormal here or after scaling: they may be flushed, and
        # are rounded to zero, but to which one?
        x = np.where(np.abs(x) < 2.0**-110, np.float32(0), x)
        scaled = np.abs(x) / np.maximum(np.abs(x).reshape(2, 2, 32).max(-1).repeat(32, -1), 1e-30)
        x = np.where(scaled < 2.0**-100, np.float32(0), x)
        options = {"rule": rule, "convention": convention}
        assert_matches_oracle(quantize(x, **options), x, **options)

    @both_conventions
    @pytest.mark.parametrize(("rule", "rows_per_scale"), [("rte", 1), ("rte", 32), ("best_l2", 32)])
    def test_are_the_same_eagerly_in_jit_and_in_vmap(self, rule, convention, rows_per_scale):
        x = np.stack([gaussian((64, 64)), ties((64, 64))])
        options = {"rule": rule, "convention": convention, "rows_per_scale": rows_per_scale}
        compiled = quantize(x, **options)
        assert_same_bytes(quantize_mxfp4(x, **options), compiled)
        assert_same_bytes(jax.vmap(functools.partial(quantize, **options))(x), compiled)

    def test_of_a_vector_are_those_of_a_row(self):
        x = gaussian((1, 64))
        assert_same_bytes(quantize(x[0]), jax.tree.map(lambda leaf: leaf[0], quantize(x)))

    @both_conventions
    def test_of_a_bfloat16_input_are_those_of_its_float32_value(self, convention):
        x = gaussian((4, 64))
        narrow = quantize(jnp.asarray(x, jnp.bfloat16), convention=convention)
        assert_same_bytes(narrow, quantize(x, convention=convention))

    @both_conventions
    def test_under_jit_quantising_and_dequantising_is_not_the_identity(self, convention):
        x = gaussian((4, 64))
        fake = jax.jit(lambda x: quantize_mxfp4(x, convention=convention).dequantize())(x)
        assert np.mean(np.asarray(fake) != x) > 0.5
        assert_same_floats(fake, dequantize(quantize(x, convention=convention)))

    @pytest.mark.gpu
    @both_conventions
    @all_rules
    def test_are_the_same_on_a_gpu(self, rule, convention):
        options = {"rule": rule, "convention": convention, "rows_per_scale": 32}
        for x in (gaussian((64, 64)), ties((64, 64))):
            assert_matches_oracle(quantize(x, **options), x, **options)


class TestConventions:
    @pytest.mark.parametrize(
        ("convention", "rule", "byte", "codes"),
        [
            # The endpoint alpha = 1 stands for code 6; the unit of OCP is 2**(0 - 2).
            ("endpoint", "floor", 127, [7, 5]),
            ("ocp", "floor", 125, [6, 4]),
            ("endpoint", "ceil", 127, [7, 5]),
            ("ocp", "ceil", 125, [6, 4]),
        ],
    )
    def test_of_a_maximum_of_1(self, convention, rule, byte, codes):
        x = np.zeros(32, np.float32)
        x[:2] = 1.0, 0.5
        q = quantize(x, convention=convention, rule=rule)
        assert q.scales.tolist() == [byte]
        assert oracles.unpack(q.codes)[:2].tolist() == codes
        assert_same_floats(dequantize(q), x)

    def test_the_endpoint_clips_what_lies_above_it(self):
        # 1.4375 is nearer to 1 than to 2, so that it becomes code 8.625, which is 6.
        x = np.full(32, 1.4375, np.float32)
        q = quantize(x, rule=1.5)
        assert q.scales.tolist() == [127]
        assert_same_floats(dequantize(q), np.ones(32))

    @pytest.mark.parametrize(("amax", "byte"), [(1.5, 128), (3.0, 128), (0.75, 126), (6.0, 130)])
    def test_rte_goes_to_the_even_byte(self, amax, byte):
        assert quantize(np.full(32, amax, np.float32)).scales.tolist() == [byte]

    def test_best_l2_takes_the_larger_of_equally_good_exponents(self):
        # 1 is code 6 of alpha = 1 and code 3 of alpha = 2; both are exact.
        q = quantize(np.ones(32, np.float32), rule="best_l2")
        assert q.scales.tolist() == [128]
        assert set(oracles.unpack(q.codes)) == {5}

    @both_tiles
    @both_conventions
    def test_best_l2_is_no_worse_than_any_other_rule(self, convention, rows_per_scale):
        x = gaussian((2, 64, 64))
        errors = {
            rule: relative_l2(
                dequantize(quantize(x, rule=rule, convention=convention, rows_per_scale=rows_per_scale)),
                x,
            )
            for rule in RULES
        }
        assert errors.pop("best_l2") <= min(errors.values())


class TestTiles:
    def test_32_rows_share_the_scale_of_their_joint_maximum(self):
        x = np.ones((64, 96), np.float32)
        x[5, 40] = 8.0
        scales = np.asarray(quantize(x, rows_per_scale=32).scales)
        expected = np.full((64, 3), 127)
        expected[:32, 1] = 130
        np.testing.assert_array_equal(scales, expected)

    def test_a_zero_row_of_a_tile_has_the_scale_of_the_tile(self):
        x = gaussian((32, 32))
        x[3] = 0.0
        q = quantize(x, rows_per_scale=32)
        assert len(np.unique(q.scales)) == 1 and q.scales.all()
        assert not q.codes[3].any()


class TestSpecialBlocks:
    @both_conventions
    @pytest.mark.parametrize("rule", ["rte", "best_l2"])
    @pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
    def test_zeros_have_byte_0_and_codes_0(self, transform, rule, convention):
        x = gaussian((2, 64))
        x[:, :32] = 0.0
        x[1, :32] = -0.0
        with jax.debug_nans(True):
            q = transform(functools.partial(quantize_mxfp4, rule=rule, convention=convention))(x)
            values = dequantize(q)
        assert not q.scales[:, 0].any() and not q.codes[:, :16].any()
        assert not values[:, :32].any() and values[:, 32:].any()
        assert q.scales[:, 1].all()

    @both_conventions
    @all_rules
    def test_subnormal_numbers_become_zero(self, rule, convention):
        x = np.full((2, 64), -1.1754942e-38, np.float32)
        q = quantize(x, rule=rule, convention=convention)
        assert not q.scales.any() and not q.codes.any()

    @both_conventions
    @pytest.mark.parametrize("rule", ["floor", "ceil", "rte", 1.203125])
    def test_the_smallest_normal_number_does_not(self, rule, convention):
        x = np.full((2, 64), 2.0**-126, np.float32)
        q = quantize(x, rule=rule, convention=convention)
        assert q.scales.tolist() == [[1, 1]] * 2
        assert set(oracles.unpack(q.codes).ravel()) == {7 if convention == "endpoint" else 2}

    @pytest.mark.parametrize("exponent", [-120, -20, 0, 20, 123])
    def test_the_grid_times_a_power_of_two_is_exact(self, exponent):
        # OCP: the unit is a power of two. With an endpoint, the values are sixths.
        grid = np.ldexp(np.concatenate([E2M1_GRID, -E2M1_GRID]), exponent).astype(np.float32)
        x = np.tile(grid, 2)
        q = quantize(x, rule="floor", convention="ocp")
        assert q.scales.tolist() == [exponent + 127]
        assert_same_floats(dequantize(q), x)
        # Those sixths that a float32 holds.
        x = np.ldexp(np.tile([0.0, 0.25, 0.5, 1.0, -0.25, -0.5, -1.0, -0.0], 4), exponent).astype(np.float32)
        q = quantize(x)
        assert q.scales.tolist() == [exponent + 127]
        assert_same_floats(dequantize(q), x)

    @pytest.mark.parametrize(("convention", "top"), [("endpoint", 2.0**127), ("ocp", 6 * 2.0**125)])
    @pytest.mark.parametrize("value", [3.4e38, np.inf])
    def test_the_largest_numbers_saturate(self, value, convention, top):
        x = np.full((1, 32), value, np.float32)
        x[0, ::2] *= -1
        q = quantize(x, convention=convention)
        assert_same_floats(dequantize(q), np.copysign(top, x))

    @both_conventions
    @all_rules
    def test_the_largest_numbers_stay_finite(self, rule, convention):
        # With a scale of 2**126, OCP's candidate for best_l2, code 4 would be 2**128.
        x = np.full((2, 64), np.finfo(np.float32).max)
        q = quantize(x, rule=rule, convention=convention)
        assert_same_floats(dequantize(q), np.full((2, 64), 2.0**127 if convention == "endpoint" else 1.5 * 2.0**127))

    @both_conventions
    @all_rules
    def test_a_power_of_two_only_moves_the_scales(self, rule, convention):
        # An even one, since the parity of an exponent decides the ties of "rte".
        x = np.stack([gaussian((64, 64)), ties((64, 64))])
        plain = quantize(x, rule=rule, convention=convention)
        small = quantize(x * np.float32(2.0**-20), rule=rule, convention=convention)
        np.testing.assert_array_equal(small.scales, plain.scales - 20)
        np.testing.assert_array_equal(small.codes, plain.codes)

    @pytest.mark.parametrize("rule", ["rte", "best_l2"])
    def test_an_outlier_spoils_its_own_block_only(self, rule):
        x = gaussian((1, 96))
        clean = quantize(x, rule=rule)
        x[0, 40] = 1e4
        q = quantize(x, rule=rule)
        values = np.asarray(dequantize(q))
        assert not np.delete(values[0, 32:64], 8).any()
        assert abs(values[0, 40] / 1e4 - 1) < 0.25
        others = [*range(32), *range(64, 96)]
        np.testing.assert_array_equal(values[0, others], np.asarray(dequantize(clean))[0, others])

    @both_tiles
    @both_conventions
    @pytest.mark.parametrize("rule", ["rte", "best_l2"])
    def test_a_nan_makes_the_scale_nan_in_its_block_only(self, rule, convention, rows_per_scale):
        run = functools.partial(quantize, rule=rule, convention=convention, rows_per_scale=rows_per_scale)
        x = gaussian((2, 64, 64))
        clean = run(x)
        x[1, 40, 50] = np.nan
        q = run(x)
        expected = np.zeros((2, 64, 2), bool)
        expected[1, 40 if rows_per_scale == 1 else slice(32, 64), 1] = True
        np.testing.assert_array_equal(np.asarray(q.scales) == 255, expected)
        values, elements = dequantize(q), np.repeat(expected, 32, axis=-1)
        np.testing.assert_array_equal(np.isnan(values), elements)
        np.testing.assert_array_equal(np.asarray(unpack_codes(q.codes))[elements], 7)
        np.testing.assert_array_equal(values[~elements], dequantize(clean)[~elements])

    @pytest.mark.parametrize("run", [quantize_mxfp4, quantize], ids=["eager", "jit"])
    @pytest.mark.parametrize(("ties", "expected"), [("even", [0, 2, 2, 4, 4, 6, 6]), ("toward_zero", list(range(7)))])
    def test_midpoints_of_every_ocp_scale(self, run, ties, expected):
        units = np.zeros(32, np.float32)
        units[:7], units[7:14], units[14] = E2M1_MIDPOINTS, -E2M1_MIDPOINTS, 6.0
        # From -124: the quarter of a smaller scale is subnormal, which may be flushed.
        exponents = np.arange(-124, 126)[:, None]
        x = np.ldexp(units, exponents)
        q = run(x, rule="floor", convention="ocp", ties=ties)
        np.testing.assert_array_equal(q.scales, exponents + 127)
        codes = np.array([*expected, *(code + 8 for code in expected), 7] + [0] * 17)
        np.testing.assert_array_equal(oracles.unpack(q.codes), np.tile(codes, (250, 1)))

    @pytest.mark.parametrize(("ties", "code"), [("even", 2), ("toward_zero", 1)])
    def test_the_midpoint_that_a_power_of_two_endpoint_has(self, ties, code):
        # 6 x / alpha = 0.75. The other midpoints over 6 are no float32.
        x = np.full(32, 0.125, np.float32)
        x[0] = 1.0
        assert oracles.unpack(quantize(x, ties=ties).codes).tolist() == [7] + [code] * 31

    @both_conventions
    @all_rules
    @given(x=finite_arrays)
    def test_finite_input_never_gives_nan(self, rule, convention, x):
        q = quantize(x, rule=rule, convention=convention)
        assert np.isfinite(dequantize(q)).all()
        assert not (np.asarray(q.scales) == 255).any()

    @given(x=finite_arrays)
    def test_is_idempotent_in_the_ocp_convention(self, x):
        # The largest code of a block is 4 or 6, which keeps the exponent of the maximum.
        x = np.where(np.abs(x) < 2.0**-120, np.float32(0), x)
        q = quantize(x, rule="floor", convention="ocp")
        again = quantize(dequantize(q), rule="floor", convention="ocp")
        np.testing.assert_array_equal(again.scales, q.scales)
        np.testing.assert_array_equal(dequantize(again), dequantize(q))

    @given(x=finite_arrays)
    def test_is_idempotent_where_a_block_reaches_its_endpoint(self, x):
        x = np.where(np.abs(x) < 2.0**-120, np.float32(0), x)
        q = quantize(x)
        codes = oracles.unpack(q.codes).reshape(2, 2, 32)
        reached = np.repeat((codes % 8 == 7).any(axis=-1), 32, axis=-1)
        again = quantize(dequantize(q))
        np.testing.assert_array_equal(dequantize(again)[reached], dequantize(q)[reached])


class TestArguments:
    @pytest.mark.parametrize("shape", [(), (16,), (32, 8)])
    def test_rejects_a_last_dimension_that_blocks_do_not_divide(self, shape):
        with pytest.raises(ValueError, match="x: expected a last dimension that 32 divides"):
            quantize_mxfp4(np.zeros(shape, np.float32))

    @pytest.mark.parametrize("shape", [(32,), (33, 32)])
    def test_rejects_rows_that_tiles_do_not_divide(self, shape):
        with pytest.raises(ValueError, match="x: expected rows that 32 divides, got shape"):
            quantize_mxfp4(np.zeros(shape, np.float32), rows_per_scale=32)

    @pytest.mark.parametrize("rows_per_scale", [0, -1])
    def test_rejects_tiles_without_rows(self, rows_per_scale):
        with pytest.raises(ValueError, match="rows_per_scale: expected a positive number"):
            quantize_mxfp4(np.zeros((32, 32), np.float32), rows_per_scale=rows_per_scale)

    def test_rejects_an_unknown_convention(self):
        with pytest.raises(ValueError, match="convention: expected 'endpoint' or 'ocp', got 'mx'"):
            quantize_mxfp4(np.zeros(32, np.float32), convention="mx")

    @pytest.mark.parametrize("rule", ["round", 2.0, 1])
    def test_rejects_an_unknown_rule(self, rule):
        with pytest.raises(ValueError, match="rule: expected"):
            quantize_mxfp4(np.zeros(32, np.float32), rule=rule)

    def test_rejects_unknown_ties(self):
        with pytest.raises(ValueError, match="ties: expected"):
            quantize_mxfp4(np.zeros(32, np.float32), ties="away")

    def test_accepts_empty_batches(self):
        q = quantize_mxfp4(np.zeros((0, 64, 32), np.float32), rows_per_scale=32)
        assert (q.shape, q.scales.shape) == ((0, 64, 32), (0, 64, 1))
