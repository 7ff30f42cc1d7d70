"""What the order of additions alone may change in a Direct-P result.

Codes and scales are roundings of scores. Two implementations whose scores differ in the last bits have the same codes
and scales but where a score lies within that difference of a threshold. `code_bounds` finds these places in float64
and says how much they may move each row; a row without any has no excuse.
"""

import dataclasses
import math

import jax
import numpy as np

from jax_fp4attn import reference
from jax_fp4attn.config import LN_2, OperatorConfig, Visibility
from jax_fp4attn.recipe import Recipe
from jax_fp4attn.reference.code_maps import apply_schedule
from jax_fp4attn.reference.masking import visible_in_tile
from jax_fp4attn.reference.operands import score_operand_values, value_operand_values
from jax_fp4attn.reference.tiles import KEY_TILE, QUARTER, key_order, key_positions
from tests.assertions import relative_l2

_LOG2_SIX = math.log2(6)
_MIDPOINTS = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
_CODES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
_MAX_EXPONENT = 127

# Of a sum of products in float32, in any order and with truncation, relative to the sum of their magnitudes.
_SUM = 2.0**-21
# Of each rounding on the way to the argument of the map, and of the map, which may be an approximate exponential.
_STEP, _MAP = 2.0**-22, 2.0**-20
# Of an lse, and relative in the L2 norm of outputs, where all codes are the same.
LSE, OUTPUT = 1e-4, 2e-3
# Of a single row: bfloat16 roundings of its largest elements.
ROW = 2.0**-7
# Of the output's elements: Hopper adds products of E4M3 with fewer bits than float32 has.
E4M3_ELEMENTS_THAT_DIFFER = 0.1


@dataclasses.dataclass(frozen=True)
class CodeBounds:
    """What rounding allows.

    Attributes:
      low: Six times the lowest probability of each key, in the order of the reference and relative to the offset,
        [B, N, T, slots]: a code times a scale.
      high: The highest.
      log2_offset: Of each row, [B, N, T].
      value_norms: Norm of each key's value, in the same order, [B, N, 1, slots].
    """

    low: np.ndarray
    high: np.ndarray
    log2_offset: np.ndarray
    value_norms: np.ndarray

    @property
    def certain(self) -> np.ndarray:
        """Rows that have their codes whatever the order of additions, bool [B, N, T]."""
        return (self.low == self.high).all(-1)

    def output_slack(self, norms: np.ndarray) -> np.ndarray:
        """How far each row's output may move with its codes, [B, N, T]: weight leaves the output for a key's value.

        Args:
          norms: Of each row's output, [B, N, T].
        """
        total, uncertain = self.low.sum(-1), self.high - self.low
        moved = (uncertain * self.value_norms).sum(-1) + uncertain.sum(-1) * norms
        return moved / np.where(total > 0, total, 1.0)

    @property
    def lse(self) -> tuple[np.ndarray, np.ndarray]:
        """The lowest and the highest, [B, N, T]; -inf where nothing is seen."""
        with np.errstate(divide="ignore"):
            logs = [np.log2(x.sum(-1) / 6) for x in (self.low, self.high)]
        return LN_2 * (logs[0] + self.log2_offset), LN_2 * (logs[1] + self.log2_offset)

    def probabilities(self, output: np.ndarray, lse: np.ndarray) -> np.ndarray:
        """Six times the probabilities of a tile's keys, from the result with :func:`one_hot_values`.

        Args:
          output: [B, N, T, 128].
          lse: [B, N, T].

        Returns:
          [B, N, T, 128], of the precision of the output, in units of `low` and `high`.
        """
        return 6 * output * np.exp2(lse / LN_2 - self.log2_offset)[..., None]


def code_bounds(
    config: OperatorConfig, operands: reference.Operands, visibility: Visibility, num_keys: int
) -> CodeBounds:
    """Finds the codes and scales that rounding decides.

    Args:
      config: Static arguments, of a recipe whose ``p_format`` is ``"mxfp4"`` and denominator ``"represented"``.
      operands: Quantised query, key and value; no NaN may be visible.
      visibility: Run-time restrictions.
      num_keys: S.

    Returns:
      The bounds.
    """
    recipe, log2_scale = config.recipe, config.log2_scale
    raw, error = _raw_scores(config, operands, visibility, num_keys)
    reference_, reference_error = np.zeros(raw.shape[:-1]), np.zeros(raw.shape[:-1])
    if recipe.row_reference == "anchor":
        leading = raw[..., : recipe.anchor_keys]
        margin = recipe.margin / log2_scale if recipe.margin_unit == "bits" else recipe.margin * LN_2
        sees = np.isfinite(leading).any(-1)
        reference_ = np.where(sees, leading.max(-1) + margin, 0.0)
        reference_error = error[..., : recipe.anchor_keys].max(-1) + _STEP * np.abs(reference_)
    blocks = (*raw.shape[:-1], -1, QUARTER)
    raw, error = raw.reshape(blocks), error.reshape(blocks)
    reference_, reference_error = reference_[..., None], reference_error[..., None]
    candidates = [
        _probabilities(config, raw, error, reference_, reference_error, exponent)
        for exponent in _exponents(config, raw, error, reference_, reference_error)
    ]
    keys = (*raw.shape[:3], -1)
    value = np.asarray(value_operand_values(recipe, operands.value), np.float64)
    order = key_order(recipe, num_keys)
    if order is not None:
        value[:, :, :num_keys] = value[:, :, order]
    value_norms = np.linalg.norm(value, axis=-1).repeat(raw.shape[1] // value.shape[1], axis=1) / 6
    return CodeBounds(
        low=np.minimum(*(low for low, _ in candidates)).reshape(keys),
        high=np.maximum(*(high for _, high in candidates)).reshape(keys),
        log2_offset=reference_[..., 0] * log2_scale + recipe.p_scale_shift,
        value_norms=value_norms[:, :, None],
    )


def one_hot_values(recipe: Recipe, num_keys: int, tile: int) -> np.ndarray:
    """Values of one batch and one head that show the probabilities of a tile's keys: float32 [1, S, 1, 128].

    Args:
      recipe: The recipe, which may move keys.
      num_keys: S.
      tile: Which 128 keys in the order of the reference; channel h shows the one with index h.
    """
    order = key_order(recipe, num_keys)
    keys = (np.arange(num_keys) if order is None else order)[tile * KEY_TILE : (tile + 1) * KEY_TILE]
    values = np.zeros((1, num_keys, 1, KEY_TILE), np.float32)
    values[0, keys, 0, np.arange(len(keys))] = 1
    return values


def assert_same_attention(
    config: OperatorConfig,
    operands: reference.Operands,
    visibility: Visibility,
    num_keys: int,
    actual: tuple[np.ndarray, np.ndarray],
    expected: tuple[np.ndarray, np.ndarray],
) -> None:
    """Asserts that a kernel's result is the reference's, but for the order of additions.

    Args:
      config: Static arguments.
      operands: Quantised query, key and value.
      visibility: Run-time restrictions.
      num_keys: S.
      actual: Output [B, N, T, H] and lse [B, N, T] under test, float32.
      expected: Those of the reference.

    Raises:
      AssertionError: If they differ by more.
    """
    if config.recipe.p_format == "mxfp4":
        assert_same_but_for_rounding(actual, expected, code_bounds(config, operands, visibility, num_keys))
        return
    (output, lse), (expected_output, expected_lse) = actual, expected
    finite = np.isfinite(expected_lse)
    np.testing.assert_array_equal(lse[~finite], expected_lse[~finite])
    slack = LSE + 4 * np.spacing(np.abs(expected_lse[finite]))
    assert (np.abs(lse[finite] - expected_lse[finite]) <= slack).all()
    assert np.isfinite(output).all()
    assert relative_l2(output, expected_output) < OUTPUT
    assert np.mean(output != expected_output) < E4M3_ELEMENTS_THAT_DIFFER


def assert_same_but_for_rounding(
    actual: tuple[np.ndarray, np.ndarray], expected: tuple[np.ndarray, np.ndarray], bounds: CodeBounds
) -> None:
    """Asserts that two Direct-P results differ by nothing but codes that rounding decides.

    Args:
      actual: Output [B, N, T, H] and lse [B, N, T] under test.
      expected: Those of the reference.
      bounds: Of the problem.

    Raises:
      AssertionError: If a row is out of its bounds, or one that is certain of its codes has another result.
    """
    (output, lse), (expected_output, expected_lse) = actual, expected
    assert np.isfinite(output).all()
    finite, certain = np.isfinite(expected_lse), bounds.certain
    for found, wanted in ((lse, expected_lse), (output, expected_output)):
        np.testing.assert_array_equal(found[~finite], wanted[~finite])
    slack_of_rows = bounds.output_slack(np.linalg.norm(expected_output, axis=-1))[finite]
    lowest, highest = (x[finite] for x in bounds.lse)
    output, lse, expected_output, expected_lse = (x[finite] for x in (output, lse, expected_output, expected_lse))
    certain, slack = certain[finite], LSE + 4 * np.spacing(np.abs(expected_lse))
    for found in (lse, expected_lse):
        assert ((found >= lowest - slack) & (found <= highest + slack)).all()
    assert (np.abs(lse - expected_lse) <= slack)[certain].all()
    assert relative_l2(output[certain], expected_output[certain]) < OUTPUT
    errors = np.linalg.norm(output - expected_output, axis=-1)
    assert (errors <= ROW * np.linalg.norm(expected_output, axis=-1) + slack_of_rows).all()


def _raw_scores(
    config: OperatorConfig, operands: reference.Operands, visibility: Visibility, num_keys: int
) -> tuple[np.ndarray, np.ndarray]:
    """Masked scores in the order of the reference, and how far any order of additions may move them."""
    query, key = (np.asarray(score_operand_values(x), np.float64) for x in (operands.query, operands.key))
    order = key_order(config.recipe, num_keys)
    if order is not None:
        key[:, :, :num_keys] = key[:, :, order]
    heads = query.shape[1] // key.shape[1]
    key = np.repeat(key, heads, axis=1).swapaxes(2, 3)
    visible = [
        visible_in_tile(
            config, visibility, tile, num_queries=query.shape[2], num_keys=num_keys, num_kv_heads=operands.key.shape[1]
        )
        for tile in key_positions(num_keys, order)
    ]
    shape = (query.shape[0], operands.key.shape[1], heads, query.shape[2], KEY_TILE)
    seen = np.concatenate([np.broadcast_to(x, shape) for x in visible], axis=-1)
    seen = seen.reshape(*query.shape[:3], -1)
    # Scores of rows and keys that nobody sees may be NaN.
    with np.errstate(invalid="ignore"):
        raw = np.where(seen, query @ key, -np.inf)
        error = np.where(seen, _SUM * (np.abs(query) @ np.abs(key)), 0.0)
    return raw, error


def _exponents(
    config: OperatorConfig, raw: np.ndarray, error: np.ndarray, ref: np.ndarray, ref_error: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The lowest and the highest exponent that each block may have, [B, N, T, blocks]."""
    rule, log2_scale = config.recipe.p_exponent_rule, config.log2_scale
    highest = raw.max(-1)
    size = np.abs(np.where(np.isfinite(highest), highest, 0.0)) + np.abs(ref)
    slack = log2_scale * (error.max(-1) + ref_error + _STEP * size) + _STEP
    log_max = (highest - ref) * log2_scale
    found = []
    for offset in (-slack, slack):
        exponent = np.ceil(log_max + offset) if rule == "ceil" else np.floor(log_max + offset + 1 - math.log2(rule))
        found.append(np.clip(exponent, -_MAX_EXPONENT, _MAX_EXPONENT))
    return found[0], found[1]


def _probabilities(
    config: OperatorConfig,
    raw: np.ndarray,
    error: np.ndarray,
    ref: np.ndarray,
    ref_error: np.ndarray,
    exponent: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """The lowest and the highest code of each key times the scale of its block, which has the exponent given."""
    recipe, log2_scale = config.recipe, config.log2_scale
    assert recipe.code_map is not None
    shift = recipe.p_scale_shift
    stored = np.maximum(exponent - shift, 1 - _MAX_EXPONENT)
    bias = _LOG2_SIX - np.maximum(exponent, shift + 1 - _MAX_EXPONENT) - ref * log2_scale
    magnitudes = np.abs(np.where(np.isfinite(raw), raw, 0.0)) + np.abs(ref)[..., None]
    slack = error + ref_error[..., None] + _STEP * (magnitudes + (np.abs(bias) + 8)[..., None] / log2_scale)
    found = []
    with jax.enable_x64(True):
        for sign in (-1, 1):
            arguments = _by_tile(raw + sign * slack), log2_scale, _by_tile(bias[..., None])
            payload = np.asarray(apply_schedule(recipe.code_map, *arguments))
            assert payload.dtype == np.float64
            payload = np.moveaxis(payload, 2, 3).reshape(raw.shape)
            with np.errstate(invalid="ignore"):  # of the map at -inf
                payload = payload + sign * _MAP * (1 + np.abs(payload))
            payload = np.where(np.isfinite(raw), payload, 0.0)
            found.append(_CODES[np.searchsorted(_MIDPOINTS, payload)] * np.exp2(stored)[..., None])
    return found[0], found[1]


def _by_tile(x: np.ndarray) -> np.ndarray:
    """[B, N, T, blocks, n] as [B, N, tiles, T, 4, n]."""
    return np.moveaxis(x.reshape(*x.shape[:3], -1, KEY_TILE // QUARTER, x.shape[-1]), 3, 2)
