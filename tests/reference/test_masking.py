"""What is hidden has no influence: on outputs, on gradients, not even when it is NaN."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest

from jax_fp4attn import SegmentIds, recipes
from tests import oracles, shapes
from tests.shapes import Shape

# Both walks over the keys, with and without V blocks that neighbouring keys share.
WALKS = pytest.mark.parametrize("name", ["train", "accurate"])
POISONS = (np.nan, np.inf, -np.inf)

SHAPE = Shape((2,), 128, 128, 2, 1, 64)


def poison(x: np.ndarray, where: np.ndarray) -> np.ndarray:
    """Replaces positions (a mask over leading axes) by NaN and infinities in turn."""
    x = x.copy()
    count = x[where].size
    x[where] = np.resize(np.array(POISONS, np.float32), count).reshape(x[where].shape).astype(x.dtype)
    return x


def assert_hidden(
    inputs: shapes.Inputs, name: str, hidden_rows: np.ndarray, hidden_keys: np.ndarray, bias=None, **options
) -> None:
    """Asserts that NaN and infinities in hidden rows and keys move no bit of what is left, and that they get zeros.

    Args:
      inputs: Clean inputs.
      name: Name of the recipe.
      hidden_rows: bool [B, T], rows that see nothing.
      hidden_keys: bool [B, S], keys that nobody sees.
      bias: As for `attention`.
      **options: As for `attention`.
    """
    recipe = recipes.named()[name]
    poisoned = shapes.Inputs(
        poison(inputs.query, hidden_rows),
        poison(inputs.key, hidden_keys),
        poison(inputs.value, hidden_keys),
        poison(inputs.d_output, hidden_rows),
        poison(inputs.d_lse, hidden_rows),
    )
    clean, dirty = (shapes.evaluate(x, bias, recipe=recipe, **options) for x in (inputs, poisoned))
    for result in (clean, dirty):
        np.testing.assert_array_equal(result.output[hidden_rows], 0)
        np.testing.assert_array_equal(result.lse[hidden_rows], -np.inf)
        np.testing.assert_array_equal(result.d_query[hidden_rows], 0)
        np.testing.assert_array_equal(result.d_key[hidden_keys], 0)
        np.testing.assert_array_equal(result.d_value[hidden_keys], 0)
        assert np.isfinite(result.lse[~hidden_rows]).all()
    for x, y in zip(clean[:5], dirty[:5], strict=True):
        assert not np.isnan(oracles.float64(y)).any()
        np.testing.assert_array_equal(x, y)


def beyond(lengths: list[int], size: int) -> np.ndarray:
    """bool [B, size], positions at and beyond each length."""
    return np.arange(size) >= np.array(lengths)[:, None]


NOTHING = np.zeros((2, 128), bool)


class TestHidden:
    @WALKS
    def test_keys_beyond_lengths_that_only_the_keys_have(self, name):
        assert_hidden(
            shapes.normal(SHAPE), name, NOTHING, beyond([24, 125], 128), key_value_seq_lengths=np.array([24, 125])
        )

    @pytest.mark.parametrize("name", ["train"])
    def test_a_sequence_without_keys(self, name):
        rows = np.array([[True], [False]]) | NOTHING
        assert_hidden(shapes.normal(SHAPE), name, rows, beyond([0, 64], 128), key_value_seq_lengths=np.array([0, 64]))

    @pytest.mark.parametrize("name", ["train"])
    def test_rows_beyond_query_lengths(self, name):
        assert_hidden(shapes.normal(SHAPE), name, beyond([5, 128], 128), NOTHING, query_seq_lengths=np.array([5, 128]))

    @pytest.mark.parametrize("name", ["train"])
    def test_both_lengths_under_causality(self, name):
        assert_hidden(
            shapes.normal(SHAPE),
            name,
            beyond([100, 1], 128),
            beyond([70, 128], 128) | beyond([100, 1], 128),
            is_causal=True,
            query_seq_lengths=np.array([100, 1]),
            key_value_seq_lengths=np.array([70, 1]),
        )

    @WALKS
    def test_padding_segments_zero_and_negative(self, name):
        # Equal padding ids must not attend to one another.
        ids = np.ones((2, 128), np.int32)
        ids[0, 40:60] = 2
        ids[0, 100:], ids[1, :3], ids[1, 90:] = 0, -1, -7
        assert_hidden(shapes.normal(SHAPE), name, ids <= 0, ids <= 0, segment_ids=SegmentIds(ids, ids), is_causal=True)

    @WALKS
    def test_keys_that_a_dense_mask_hides_from_everybody(self, name):
        rng = np.random.default_rng(1)
        mask = rng.random((2, 1, 128, 128)) < 0.5
        hidden_keys, hidden_rows = rng.random((2, 128)) < 0.2, rng.random((2, 128)) < 0.1
        mask &= ~hidden_keys[:, None, None, :] & ~hidden_rows[:, None, :, None]
        assert_hidden(shapes.normal(SHAPE), name, hidden_rows, hidden_keys, mask=mask)

    @WALKS
    def test_rows_whose_window_excludes_every_key(self, name):
        shape = Shape((2,), 40, 8, 2, 1, 64)
        rows = np.arange(40) > 7 + 3
        # The keys are all visible to some row.
        assert_hidden(
            shapes.normal(shape), name, np.tile(rows, (2, 1)), np.zeros((2, 8), bool), local_window_size=(3, 0)
        )

    @WALKS
    def test_rows_that_a_bias_of_minus_infinity_hides(self, name):
        rows = np.random.default_rng(2).random((2, 128)) < 0.3
        bias = np.where(rows, -np.inf, 0).astype(np.float32)[:, None, :, None]
        recipe, inputs = recipes.named()[name], shapes.normal(SHAPE)
        result = shapes.evaluate(inputs, bias, recipe=recipe)
        np.testing.assert_array_equal(result.output[rows], 0)
        np.testing.assert_array_equal(result.lse[rows], -np.inf)
        assert all(np.isfinite(oracles.float64(x)).all() for x in result[2:])

    @pytest.mark.parametrize("scale", [0.125, 1.0, 2.0])
    @WALKS
    def test_the_lowest_number_as_a_bias_hides(self, name, scale):
        """Whole rows, and the first key tile of others: neither is NaN, nor the gradients."""
        inputs = shapes.normal(Shape((2,), 40, 160, 2, 1, 64))
        rows, keys = np.arange(40) >= 30, np.arange(160) < 130
        hidden = rows[:, None] | keys
        bias = np.where(hidden, np.finfo(np.float32).min, 0).astype(np.float32)[None, None]
        recipe = recipes.named()[name]
        lowest, infinite = (
            shapes.evaluate(inputs, x, recipe=recipe, scale=scale) for x in (bias, np.where(hidden, -np.inf, bias))
        )
        for x, y in zip(lowest, infinite, strict=True):
            np.testing.assert_array_equal(x, y)
        np.testing.assert_array_equal(lowest.output[:, rows], 0)
        np.testing.assert_array_equal(lowest.lse[:, rows], -np.inf)
        assert all(np.isfinite(oracles.float64(x)).all() for x in lowest[2:])

    @pytest.mark.parametrize("scale", [0.125, 1.0, 2.0])
    @pytest.mark.parametrize("bias", [1e38, np.inf])
    def test_the_largest_bias_saturates(self, bias, scale):
        inputs = shapes.normal(SHAPE)
        only = (np.arange(128) == 7).astype(np.float32)[None, None, None]
        with np.errstate(invalid="ignore"):
            biased = np.where(only, bias, 0).astype(np.float32)
        result = shapes.evaluate(inputs, np.broadcast_to(biased, (1, 1, 1, 128)), recipe=recipes.bf16, scale=scale)
        np.testing.assert_array_equal(result.output, np.broadcast_to(inputs.value[:, 7:8, :1], result.output.shape))

    def test_hidden_keys_do_not_reach_shared_scales(self):
        # One scale for 32 keys of a channel, or for a whole head: huge values beyond the length must not set them.
        recipe = dataclasses.replace(
            recipes.square, qk_scale_fold="none", qk_tensor_scale="amax", v_channels_per_scale=32
        )
        inputs = shapes.normal(SHAPE)
        lengths = np.array([50, 100])
        hidden = beyond([50, 100], 128)
        huge = inputs._replace(
            key=np.where(hidden[..., None, None], ml_dtypes.bfloat16(1e30), inputs.key),
            value=np.where(hidden[..., None, None], ml_dtypes.bfloat16(1e30), inputs.value),
        )
        clean, dirty = (shapes.evaluate(x, recipe=recipe, key_value_seq_lengths=lengths) for x in (inputs, huge))
        for x, y in zip(clean[:5], dirty[:5], strict=True):
            np.testing.assert_array_equal(x, y)


class TestCausality:
    """Later keys and values do not change earlier rows."""

    CUT = 70

    def _pair(self, name: str, change_value: bool, poison_with: float) -> tuple[shapes.Result, shapes.Result]:
        inputs = shapes.normal(SHAPE, seed=3)
        key, value = inputs.key.copy(), inputs.value.copy()
        key[:, self.CUT :] = poison_with
        if change_value:
            value[:, self.CUT :] = -poison_with
        changed = inputs._replace(key=key, value=value)
        recipe = recipes.named()[name]
        first, second = (shapes.evaluate(x, recipe=recipe, is_causal=True) for x in (inputs, changed))
        return first, second

    @pytest.mark.parametrize("value", [1e4, 3e38])
    def test_earlier_rows_of_the_training_recipe_keep_every_bit(self, value):
        first, second = self._pair("train", change_value=True, poison_with=value)
        np.testing.assert_array_equal(first.output[:, : self.CUT], second.output[:, : self.CUT])
        np.testing.assert_array_equal(first.lse[:, : self.CUT], second.lse[:, : self.CUT])
        np.testing.assert_array_equal(first.d_query[:, : self.CUT], second.d_query[:, : self.CUT])
        assert (first.output[:, self.CUT :] != second.output[:, self.CUT :]).any()

    @pytest.mark.parametrize("name", ["train", "square", "causal_mxfp4"])
    def test_nan_in_a_later_key_reaches_exactly_the_rows_that_see_it(self, name):
        first, second = self._pair(name, change_value=False, poison_with=np.nan)
        np.testing.assert_array_equal(first.output[:, : self.CUT], second.output[:, : self.CUT])
        np.testing.assert_array_equal(first.lse[:, : self.CUT], second.lse[:, : self.CUT])
        assert np.isnan(oracles.float64(second.output[:, self.CUT :])).all()
        assert np.isnan(second.lse[:, self.CUT :]).all()

    @pytest.mark.parametrize("name", ["square", "causal_mxfp4"])
    def test_mxfp4_values_share_scales_with_at_most_31_later_keys(self, name):
        # Blocks of 32 keys have one scale, so a later value in the block of a row's own key may change its codes.
        first, second = self._pair(name, change_value=True, poison_with=8.0)
        whole_blocks = self.CUT // 32 * 32
        np.testing.assert_array_equal(first.output[:, :whole_blocks], second.output[:, :whole_blocks])
        np.testing.assert_array_equal(first.lse[:, : self.CUT], second.lse[:, : self.CUT])
        assert (first.output[:, whole_blocks : self.CUT] != second.output[:, whole_blocks : self.CUT]).any()

    def test_a_single_query_sees_key_zero_only(self):
        # Top-left alignment: a trap when decoding against a cache, but the documented one.
        inputs = shapes.normal(Shape((1,), 1, 16, 2, 1, 64))
        result = shapes.forward(inputs, recipe=recipes.train, is_causal=True)
        np.testing.assert_allclose(
            oracles.float64(result.output[0, 0, 0]), oracles.e4m3(4 * oracles.float64(inputs.value[0, 0, 0])) / 4
        )


def test_nan_in_a_query_stays_in_its_row():
    inputs = shapes.normal(SHAPE, seed=4)
    inputs.query[1, 17, 1] = np.nan
    for name in ("train", "square"):
        result = shapes.evaluate(inputs, recipe=recipes.named()[name], is_causal=True)
        bad = np.isnan(oracles.float64(result.output)).all(-1)
        assert bad[1, 17, 1]
        assert bad.sum() == 1
        assert np.isnan(result.lse[1, 17, 1])


def test_nan_in_a_visible_value_is_not_turned_into_a_number():
    inputs = shapes.normal(SHAPE, seed=5)
    inputs.value[0, 40, 0, 3] = np.nan
    for name in ("train", "square", "nvfp4_pv"):
        result = shapes.forward(inputs, recipe=recipes.named()[name], is_causal=True)
        assert np.isnan(oracles.float64(result.output[0, 40:, :, 3])).all()
        assert np.isfinite(oracles.float64(result.output[1])).all()
        assert np.isfinite(oracles.float64(result.output[..., [0, 1, 2, *range(4, 64)]])).all()
