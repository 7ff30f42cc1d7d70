"""The operator again, dense and in float64 NumPy: every score of every row at once.

Written from docs/numerics.md. Nothing here calls the package; a `Recipe` and its code maps are read as data. Arrays are
laid out as `attention` takes them: query [B, T, N, H], key and value [B, S, K, H], lse [B, T, N]. The quantisers of
operands are those of tests/formats/oracles.py.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jax_fp4attn import Recipe
from tests.formats import oracles as formats

TILE = 128
QUARTER = 32
LOG2_E = math.log2(math.e)
E2M1_GRID = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
E2M1_MIDPOINTS = (E2M1_GRID[1:] + E2M1_GRID[:-1]) / 2


class Forward(NamedTuple):
    """Output [B, T, N, H] and natural-log lse [B, T, N], float64."""

    output: np.ndarray
    lse: np.ndarray


class Gradients(NamedTuple):
    """Gradients of the inputs, float64; the bias's is dense, [B, N, T, S]."""

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    bias: np.ndarray


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of the operator, with all restrictions spelled out.

    Attributes:
      query: [B, T, N, H].
      key: [B, S, K, H].
      value: [B, S, K, H].
      scale: Softmax scale.
      visible: bool [B, N, T, S].
      bias: [B, N, T, S] in natural-log units, or None.
    """

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    scale: float
    visible: np.ndarray
    bias: np.ndarray | None = None


def visible_keys(
    shape: tuple[int, int, int, int],
    *,
    is_causal: bool = False,
    window: tuple[int, int] | None = None,
    query_lengths: Any = None,
    key_lengths: Any = None,
    query_segments: Any = None,
    key_segments: Any = None,
    mask: Any = None,
) -> np.ndarray:
    """Which key each query sees, bool [B, N, T, S] for `shape` = (B, N, T, S)."""
    visible = np.ones(shape, bool)
    b, _, i, j = np.indices(shape, sparse=True)
    if is_causal:
        visible &= j <= i
    if window is not None:
        visible &= (j >= i - window[0]) & (j <= i + window[1])
    if query_lengths is not None:
        visible &= i < np.asarray(query_lengths)[b]
    if key_lengths is not None:
        visible &= j < np.asarray(key_lengths)[b]
    if query_segments is not None:
        query_id, key_id = np.asarray(query_segments)[b, i], np.asarray(key_segments)[b, j]
        visible &= (query_id == key_id) & (query_id > 0)
    if mask is not None:
        visible &= np.asarray(mask)
    return visible


def float64(x: Any) -> np.ndarray:
    """Any array to float64."""
    return np.asarray(x).astype(np.float64)


def bfloat16(x: np.ndarray) -> np.ndarray:
    """Nearest bfloat16 values."""
    return float64(np.asarray(x, np.float32).astype(ml_dtypes.bfloat16))


def minifloat(x: np.ndarray, mantissa_bits: int, min_exponent: int, max_value: float) -> np.ndarray:
    """Nearest value with so many mantissa bits, ties to even, saturating; subnormal below 2**min_exponent."""
    _, exponent = np.frexp(x)
    step = np.ldexp(1.0, np.maximum(exponent - 1, min_exponent) - mantissa_bits)
    return np.clip(np.rint(x / step) * step, -max_value, max_value)


def e4m3(x: np.ndarray) -> np.ndarray:
    """Nearest E4M3 values."""
    return minifloat(x, 3, -6, 448.0)


def e5m2(x: np.ndarray) -> np.ndarray:
    """Nearest E5M2 values."""
    return minifloat(x, 2, -14, 57344.0)


def e2m1(x: np.ndarray) -> np.ndarray:
    """Nearest E2M1 values."""
    return minifloat(x, 1, 0, 6.0)


def head_major(x: np.ndarray) -> np.ndarray:
    """[B, T, N, ...] to float64 [B, N, T, ...]."""
    return np.swapaxes(float64(x), 1, 2)


def repeat_heads(x: np.ndarray, heads: int) -> np.ndarray:
    """Head-major keys or values for every query head: head n uses n // (N / K)."""
    owner = np.arange(heads) // (heads // x.shape[1])
    return x[:, owner]


def sum_heads(x: np.ndarray, kv_heads: int) -> np.ndarray:
    """Adds what `repeat_heads` copied, [B, N, S, H] to [B, K, S, H]."""
    result = np.zeros((x.shape[0], kv_heads, *x.shape[2:]))
    for head in range(x.shape[1]):
        result[:, head // (x.shape[1] // kv_heads)] += x[:, head]
    return result


# --- exact attention -------------------------------------------------------------------------------------------------


def exact_forward(call: Call) -> Forward:
    """Unquantised attention."""
    probabilities, lse = _softmax(_natural_scores(call, head_major(call.query), head_major(call.key)))
    value = repeat_heads(head_major(call.value), call.query.shape[2])
    return Forward(np.swapaxes(probabilities @ value, 1, 2), np.swapaxes(lse, 1, 2))


def exact_gradients(call: Call, d_output: np.ndarray, d_lse: np.ndarray | None = None) -> Gradients:
    """Gradients of unquantised attention."""
    query, key, value = head_major(call.query), head_major(call.key), head_major(call.value)
    probabilities, _ = _softmax(_natural_scores(call, query, key))
    output = probabilities @ repeat_heads(value, query.shape[1])
    return _gradients(call, probabilities, query, key, value, output, head_major(d_output), d_lse)


def _natural_scores(call: Call, query: np.ndarray, key: np.ndarray) -> np.ndarray:
    """[B, N, T, S], -inf where not visible."""
    scores = call.scale * (query @ np.swapaxes(repeat_heads(key, query.shape[1]), 2, 3))
    if call.bias is not None:
        scores = scores + call.bias
    return np.where(call.visible, scores, -np.inf)


def _softmax(scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities and lse; a row without keys has probabilities 0 and lse -inf."""
    top = scores.max(-1, keepdims=True)
    top = np.where(np.isneginf(top), 0.0, top)
    total = np.exp(scores - top).sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (top + np.log(total))[..., 0]
    return np.exp(scores - top) / np.where(total == 0, 1.0, total), lse


def _gradients(
    call: Call,
    probabilities: np.ndarray,
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    output: np.ndarray,
    d_output: np.ndarray,
    d_lse: np.ndarray | None,
) -> Gradients:
    """The chain rule of softmax attention; all arrays head-major."""
    heads, kv_heads = query.shape[1], key.shape[1]
    d_probabilities = d_output @ np.swapaxes(repeat_heads(value, heads), 2, 3)
    centre = (output * d_output).sum(-1)
    if d_lse is not None:
        centre = centre - head_major(d_lse)
    d_scores = probabilities * (d_probabilities - centre[..., None])
    d_query = call.scale * (d_scores @ repeat_heads(key, heads))
    d_key = call.scale * (np.swapaxes(d_scores, 2, 3) @ query)
    d_value = np.swapaxes(probabilities, 2, 3) @ d_output
    return Gradients(
        np.swapaxes(d_query, 1, 2),
        np.swapaxes(sum_heads(d_key, kv_heads), 1, 2),
        np.swapaxes(sum_heads(d_value, kv_heads), 1, 2),
        d_scores,
    )


# --- operands --------------------------------------------------------------------------------------------------------


def padded_head_size(head_size: int) -> int:
    """Head size of the tiles, to which rows are padded with zeros."""
    return min(size for size in (64, 128, 256) if size >= head_size)


def score_operand(recipe: Recipe, x: np.ndarray) -> np.ndarray:
    """Values of a query or key that the score product multiplies, head-major with H padded."""
    x = _pad(head_major(bfloat16(x)), 3, padded_head_size(x.shape[3]))
    if recipe.qk_format == "bf16":
        return x
    tensor_scale = None
    if recipe.qk_tensor_scale == "amax":
        amax = np.abs(x).max((2, 3), keepdims=True)
        tensor_scale = np.where(amax == 0, 1.0, amax / (6 * 448)).astype(np.float32)
        x = x.astype(np.float32) * (np.float32(1) / tensor_scale)
    fold = recipe.qk_scale_fold if x.shape[3] % 128 == 0 else "none"
    values = _nvfp4_values(x.astype(np.float32).tobytes(), x.shape, fold, recipe.qk_ties)
    return values if tensor_scale is None else values * float64(tensor_scale)


@functools.lru_cache(maxsize=16)
def _nvfp4_values(data: bytes, shape: tuple[int, ...], fold: str, ties: str) -> np.ndarray:
    """Values of NVFP4 rows; the search of a folded scale is slow in Python and many recipes share it."""
    codes, scales = formats.nvfp4(np.frombuffer(data, np.float32).reshape(shape), fold=fold, ties=ties)
    return float64(formats.decode_e2m1(codes)) * np.repeat(float64(formats.decode_e4m3(scales)), 16, -1)


def value_operand(recipe: Recipe, x: np.ndarray) -> np.ndarray:
    """Values of V that the PV product stands for, head-major [B, K, S', H'], keys in slot order and padded."""
    x = _pad(head_major(bfloat16(x)), 3, padded_head_size(x.shape[3]))
    x = _pad(x[:, :, slot_order(recipe, x.shape[2])], 2, -(-x.shape[2] // TILE) * TILE)
    if recipe.v_format == "bf16":
        return x
    if recipe.v_format == "e4m3":
        return e4m3(x * recipe.v_multiplier) / recipe.v_multiplier
    along_keys = np.swapaxes(x, 2, 3)
    if recipe.v_format == "nvfp4":
        codes, scales = formats.nvfp4(along_keys)
        scale_values, unit = float64(formats.decode_e4m3(scales)), 1.0
    else:
        codes, scales = formats.mxfp4(
            along_keys, rule=recipe.v_exponent_rule, rows_per_scale=recipe.v_channels_per_scale
        )
        scale_values, unit = np.ldexp(1.0, scales.astype(int) - 127), 1 / 6
    block = along_keys.shape[3] // scale_values.shape[3]
    return np.swapaxes(float64(formats.decode_e2m1(codes)) * np.repeat(scale_values, block, -1) * unit, 2, 3)


def slot_order(recipe: Recipe, num_keys: int) -> np.ndarray:
    """The key in each slot: spread anchors first, where the recipe says so."""
    if recipe.row_reference != "anchor" or recipe.anchor_order == "leading":
        return np.arange(num_keys)
    anchors: list[int] = []
    for slot in range(recipe.anchor_keys):
        key = round(slot * (num_keys - 1) / (recipe.anchor_keys - 1))
        if key not in anchors:
            anchors.append(key)
    return np.array(anchors + [key for key in range(num_keys) if key not in anchors])


def _pad(x: np.ndarray, axis: int, size: int) -> np.ndarray:
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, size - x.shape[axis])
    return np.pad(x, widths)


# --- the forward of any recipe ---------------------------------------------------------------------------------------


def raw_scores(recipe: Recipe, call: Call, order: np.ndarray | None = None) -> np.ndarray:
    """Scores before the softmax scale [B, N, T, S'], -inf where not visible; keys in slot order, padded to tiles."""
    query, key = score_operand(recipe, call.query), score_operand(recipe, call.key)
    raw = query @ np.swapaxes(repeat_heads(key, query.shape[1]), 2, 3)
    if call.bias is not None:
        raw = raw + call.bias / call.scale
    raw = np.where(call.visible, raw, -np.inf)
    if order is not None:
        raw = raw[..., order]
    padding = -raw.shape[3] % TILE
    return np.concatenate([raw, np.full((*raw.shape[:3], padding), -np.inf)], -1)


def forward(recipe: Recipe, call: Call) -> Forward:
    """Output and lse of a recipe."""
    raw = raw_scores(recipe, call, slot_order(recipe, call.key.shape[1]))
    value = repeat_heads(value_operand(recipe, call.value), raw.shape[1])
    log2_scale = call.scale * LOG2_E
    if recipe.p_format == "mxfp4":
        ref = row_reference(recipe, raw, log2_scale)
        probabilities, denominator = direct_p(recipe, raw, ref, log2_scale)
        accumulator = probabilities @ value
        offset = ref * log2_scale + recipe.p_scale_shift
    else:
        accumulator, denominator, offset = online_softmax(recipe, raw, value, log2_scale)
    empty = denominator == 0
    output = accumulator / np.where(empty, 1.0, denominator)[..., None]
    with np.errstate(divide="ignore"):
        lse = np.where(empty, -np.inf, math.log(2) * (offset + np.log2(denominator)))
    return Forward(np.swapaxes(output, 1, 2)[..., : call.query.shape[3]], np.swapaxes(lse, 1, 2))


def row_reference(recipe: Recipe, raw: np.ndarray, log2_scale: float) -> np.ndarray:
    """Direct-P's fixed reference of each row, raw-score units."""
    if recipe.row_reference == "zero":
        return np.zeros(raw.shape[:-1])
    top = raw[..., : recipe.anchor_keys].max(-1)
    # Bits are powers of two of the probability; the published margin is added to the raw score.
    margin = recipe.margin / log2_scale if recipe.margin_unit == "bits" else recipe.margin * math.log(2)
    return np.where(np.isneginf(top), 0.0, top + margin)


def direct_p(recipe: Recipe, raw: np.ndarray, ref: np.ndarray, log2_scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Represented probabilities [..., T, S'] and the denominator [..., T], both lowered by 2**L."""
    x = (raw - ref[..., None]) * log2_scale
    blocks = x.reshape(*x.shape[:-1], -1, QUARTER)
    byte = scale_byte(recipe, blocks.max(-1))
    shift = recipe.p_scale_shift
    working, stored = np.maximum(byte, shift + 1), np.where(byte > shift, byte - shift, 1)
    wanted = blocks + math.log2(6) - (working[..., None] - 127)
    codes = e2m1(np.maximum(map_values(recipe.code_map, wanted), 0.0))
    alpha = np.ldexp(1.0, stored - 127)
    probabilities = (alpha[..., None] * codes / 6).reshape(raw.shape)
    lowered = np.exp2(x - shift)
    if recipe.denominator == "represented":
        return probabilities, probabilities.sum(-1)
    if recipe.denominator == "unquantized":
        return probabilities, lowered.sum(-1)
    slot = np.arange(raw.shape[-1]) % TILE
    quarter, pair = slot // QUARTER, slot % QUARTER // 2
    return probabilities, 8 * lowered[..., (pair == quarter) | (pair == quarter + 8)].sum(-1)


def scale_byte(recipe: Recipe, block_max: np.ndarray) -> np.ndarray:
    """E8M0 byte of each block from its largest base-2 log score: 0 where nothing is visible."""
    if recipe.p_exponent_rule == "ceil":
        exponent = np.ceil(block_max)
    else:  # up if and only if the maximum reaches the threshold times the power of two below
        exponent = np.floor(block_max - math.log2(recipe.p_exponent_rule)) + 1
    return np.clip(exponent + 127, 0, 254).astype(int)


def map_values(schedule: Any, wanted: np.ndarray) -> np.ndarray:
    """The schedule's map at log2 of the wanted code, [..., T, blocks, 32]."""
    result = np.empty_like(wanted)
    for block in range(wanted.shape[-2]):
        result[..., block, :] = map_value(schedule.quarters[block % 4], wanted[..., block, :])
        for pair in schedule.alternate_pairs[block % 4]:
            for parity in (0, 1):
                if not schedule.alternate_query_tiles[parity]:
                    continue
                rows = np.arange(wanted.shape[-3]) // TILE % 2 == parity
                columns = slice(2 * pair, 2 * pair + 2)
                values = map_value(schedule.alternate, wanted[..., block, columns])
                result[..., rows, block, columns] = values[..., rows, :]
    return result


def map_value(code_map: Any, x: np.ndarray) -> np.ndarray:
    """One code map; a masked score, -inf, gives nothing positive."""
    fields = dataclasses.astuple(code_map)
    with np.errstate(invalid="ignore"):
        match type(code_map).__name__:
            case "Affine":
                result = fields[0] * x + fields[1]
            case "Exponential":
                result = 2.0 ** (x + fields[0])
            case "SignedSquare":
                y = fields[0] * x + fields[1]
                result = np.sign(y) * y**2 + fields[2]
            case "MaxAffine":
                result = np.max([slope * x + intercept for slope, intercept in fields[0]], axis=0)
            case "Cubic":
                result = fields[0] * x**3 + fields[1] * x**2 + fields[2] * x + fields[3]
            case other:
                raise AssertionError(f"no oracle for {other}")
    return np.where(np.isneginf(x), 0.0, result)


def online_softmax(
    recipe: Recipe, raw: np.ndarray, value: np.ndarray, log2_scale: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Accumulator, denominator and the row maximum as a base-2 log, tile after tile."""
    top = np.full(raw.shape[:-1], -np.inf)
    denominator = np.zeros(raw.shape[:-1])
    accumulator = np.zeros((*raw.shape[:-1], value.shape[-1]))
    for start in range(0, raw.shape[-1], TILE):
        x = raw[..., start : start + TILE] * log2_scale
        candidate = np.maximum(top, x.max(-1))
        with np.errstate(invalid="ignore"):
            grows = ~(top >= candidate - recipe.rescale_threshold_bits) & (candidate > -np.inf)
        updated = np.where(grows, candidate, top)
        finite = np.where(np.isneginf(updated), 0.0, updated)
        shrink = np.exp2(top - finite)
        exponentials = np.exp2(x - finite[..., None])
        probabilities = round_probabilities(recipe, exponentials)
        summed = probabilities if recipe.denominator == "represented" else exponentials
        denominator = denominator * shrink + summed.sum(-1)
        accumulator = accumulator * shrink[..., None] + probabilities @ value[:, :, start : start + TILE]
        top = updated
    return accumulator, denominator, np.where(np.isneginf(top), 0.0, top)


def round_probabilities(recipe: Recipe, p: np.ndarray) -> np.ndarray:
    """Probabilities in the recipe's format."""
    if recipe.p_format == "e4m3":
        return e4m3(p)
    if recipe.p_format == "bf16":
        return bfloat16(p)
    blocks = p.reshape(*p.shape[:-1], -1, 16) / recipe.p_tensor_scale
    scale = e4m3(blocks.max(-1, keepdims=True) / 6)
    codes = np.where(scale == 0, 0.0, e2m1(blocks / np.where(scale == 0, 1.0, scale)))
    return (codes * scale * recipe.p_tensor_scale).reshape(p.shape)


# --- the straight-through backward of any recipe ---------------------------------------------------------------------


def straight_through(
    recipe: Recipe,
    call: Call,
    output: np.ndarray,
    lse: np.ndarray,
    d_output: np.ndarray,
    d_lse: np.ndarray | None = None,
    *,
    rounded: bool,
) -> Gradients:
    """Gradients straight through every quantiser, from the operands that the backward holds.

    Args:
      recipe: The recipe.
      call: The call.
      output: The forward's output.
      lse: The forward's lse; P is rebuilt from it and the forward's own scores.
      d_output: Cotangent of the output.
      d_lse: Cotangent of the lse.
      rounded: Whether P and dS are rounded too, as the recipe says. Without, this is what the recipe approximates.
    """
    heads, size = call.query.shape[2], call.query.shape[3]
    order = slot_order(recipe, call.key.shape[1])
    raw = raw_scores(recipe, call)[..., : len(order)]
    fp8 = recipe.backward == "fp8"
    lse, d_output = head_major(lse), bfloat16(head_major(d_output))
    contributes = np.isfinite(lse)
    d_output = np.where(contributes[..., None], d_output, 0.0)
    d_lse = np.zeros_like(lse) if d_lse is None else np.where(contributes, head_major(d_lse), 0.0)
    log_p = raw * call.scale - (np.where(contributes, lse, 0.0) + recipe.backward_lse_correction)[..., None]
    p = np.where(contributes[..., None], np.exp(np.minimum(log_p, 0.0 if fp8 and rounded else np.inf)), 0.0)

    multiplier = recipe.backward_multiplier
    gain = _gradient_gain(recipe, d_output, d_lse, call.key.shape[2])
    lift = 2.0**recipe.backward_p_lift_bits
    query, key, value = (head_major(bfloat16(x)) for x in (call.query, call.key, call.value))
    if recipe.backward_qk == "represented":
        query, key = (score_operand(recipe, x)[..., :size] for x in (call.query, call.key))
    if fp8:
        query, key, value = (e4m3(multiplier * x) / multiplier for x in (query, key, value))
        d_output = e5m2(multiplier * gain * d_output) / (multiplier * gain)
    if rounded:
        p = e4m3(lift * p) / lift if fp8 else bfloat16(p)
    d_p = d_output @ np.swapaxes(repeat_heads(value, heads), 2, 3)
    d_scores = p * (d_p - ((head_major(output) * d_output).sum(-1) - d_lse)[..., None])
    scaled = call.scale * d_scores
    if rounded:
        scaled = e4m3(lift * gain * scaled) / (lift * gain) if fp8 else bfloat16(scaled)
    kv_heads = key.shape[1]
    gradients = (
        scaled @ repeat_heads(key, heads),
        sum_heads(np.swapaxes(scaled, 2, 3) @ query, kv_heads),
        sum_heads(np.swapaxes(p, 2, 3) @ d_output, kv_heads),
    )
    return Gradients(*(np.swapaxes(x, 1, 2) for x in gradients), d_scores)


def _gradient_gain(recipe: Recipe, d_output: np.ndarray, d_lse: np.ndarray, kv_heads: int) -> np.ndarray:
    """Powers of two that bring the largest cotangent of each batch entry and kv head into [1, 2), by query head."""
    batch, heads = d_output.shape[:2]
    gain = np.ones((batch, heads, 1, 1))
    if recipe.backward == "fp8" and recipe.output_gradient_scale == "amax":
        group = heads // kv_heads
        for b in range(batch):
            for head in range(heads):
                members = slice(head // group * group, head // group * group + group)
                amax = max(np.abs(d_output[b, members]).max(), np.abs(d_lse[b, members]).max())
                if amax > 0:
                    gain[b, head] = 2.0 ** -math.floor(math.log2(amax))
    return gain
