"""Scores and P of every tile, as the forward for Blackwell has them in tensor memory, and as the reference has them."""

import dataclasses
import functools
import math
from collections import defaultdict

import jax
import jax.numpy as jnp
import numpy as np

from cuda.emulator import Product
from jax_fp4attn.config import OperatorConfig, Visibility
from jax_fp4attn.formats import decode_e8m0
from jax_fp4attn.reference import direct_p, online_softmax
from jax_fp4attn.reference.code_maps import apply_schedule
from jax_fp4attn.reference.operands import score_operand_values
from jax_fp4attn.reference.scores import ScoreTile
from jax_fp4attn.reference.tiles import group_heads, key_order, key_positions, split_keys, ungroup_heads
from tests.emulator.kernels.forward import TILE, Problem
from tests.shapes import COMPILER_OPTIONS

_STAGE_COLUMNS = 128
_OUTPUT_COLUMN = 256
_STEPS = {"mxf4": 2, "f8f6f4": 4}  # that make up a tile's P V


class Recorder:
    """Pass it to the emulator as `products`, with one seed.

    Attributes:
      scores: float32 [128 rows, 128 keys] of the tiles of each thread block and stage, in order.
      p: float64 [128 rows, 128 keys] of the same tiles: values of codes, or of E4M3.
      scales: float64 [128 rows, 4] of the same tiles; none of E4M3.
    """

    def __init__(self, head_size: int) -> None:
        self.scores: defaultdict[tuple[int, int], list[np.ndarray]] = defaultdict(list)
        self.p: defaultdict[tuple[int, int], list[np.ndarray]] = defaultdict(list)
        self.scales: defaultdict[tuple[int, int], list[np.ndarray]] = defaultdict(list)
        self._steps: defaultdict[tuple[int, int], list[Product]] = defaultdict(list)
        self._score_steps = head_size // 64

    def __call__(self, product: Product) -> None:
        place = (product.cta[0], product.column % _OUTPUT_COLUMN // _STAGE_COLUMNS)
        is_scores = product.kind == "mxf4nvf4"
        steps = self._steps[product.cta[0], product.column]
        steps.append(product)
        if len(steps) < (self._score_steps if is_scores else _STEPS[product.kind]):
            return
        if is_scores:
            self.scores[place].append(product.d.T.view(np.float32).copy())
        else:
            self.p[place].append(np.concatenate([step.a for step in steps], axis=1))
            scales = [step.a_scales for step in steps if step.a_scales is not None]
            if scales:
                self.scales[place].append(np.concatenate(scales, axis=1))
        steps.clear()


@dataclasses.dataclass(frozen=True)
class Tiles:
    """All rows against all keys, padded to whole tiles.

    Attributes:
      scores: [B, N, T', S'], where computed; NaN elsewhere, in tiles that were left out.
      p: Likewise.
      scales: [B, N, T', S' / 32], likewise; NaN of E4M3.
    """

    scores: np.ndarray
    p: np.ndarray
    scales: np.ndarray


def gathered(problem: Problem, recorder: Recorder, section: int) -> Tiles:
    """What was recorded of a run with a thread block for each item, none of which leaves the first key tile out."""
    B, N, T, _ = problem.operands.query.shape
    slots = problem.operands.key.shape[2]
    items = math.ceil(T / (2 * TILE))
    rows = items * 2 * TILE
    tiles = Tiles(*(np.full((B, N, rows, slots // width), np.nan) for width in (1, 1, 32)))
    for (cta, stage), scores in recorder.scores.items():
        which, within = divmod(cta, section * items)
        first_head = which * section
        heads = min(section, N * B - first_head)
        if (math.ceil(N * B / section) - which) % 2 == 0:
            within = heads * items - 1 - within
        batch, head = divmod(first_head + within % heads, N)
        first_row = (items - 1 - within // heads) * 2 * TILE + stage * TILE
        where = (batch, head, slice(first_row, first_row + TILE))
        p, scales = recorder.p[cta, stage], recorder.scales[cta, stage]
        assert len(p) == len(scores) and len(scales) in (0, len(p))
        for key_tile in range(len(scores)):
            keys = slice(key_tile * TILE, (key_tile + 1) * TILE)
            tiles.scores[(*where, keys)] = scores[key_tile]
            tiles.p[(*where, keys)] = p[key_tile]
            if scales:
                tiles.scales[(*where, slice(4 * key_tile, 4 * key_tile + 4))] = scales[key_tile]
    return tiles


@dataclasses.dataclass(frozen=True)
class Expected:
    """What the reference makes of the scores that the tensor core gave.

    Attributes:
      raw: Scores by the reference's own product, [B, N, T, S'], -inf where masked.
      p: Values of codes, or of E4M3, [B, N, T, S'].
      scales: [B, N, T, S' / 32]; NaN of E4M3.
      unrounded: What was rounded to P; of E2M1 codes negative ones count as zero.
    """

    raw: np.ndarray
    p: np.ndarray
    scales: np.ndarray
    unrounded: np.ndarray


def expected(problem: Problem, scores: np.ndarray) -> Expected:
    """P by the reference from scores [B, N, T, S']."""
    config, num_keys = problem.config, problem.num_keys
    key = np.array(score_operand_values(problem.operands.key))
    order = key_order(problem.recipe, num_keys)
    if order is not None:
        key[:, :, :num_keys] = key[:, :, order]
    num_kv_heads = key.shape[1]
    query = group_heads(score_operand_values(problem.operands.query), num_kv_heads)
    given = group_heads(jnp.asarray(scores, jnp.float32), num_kv_heads)
    tiles = zip(split_keys(jnp.asarray(key), axis=2), key_positions(num_keys, order), strict=True)
    row_state, parts = None, []
    for key_tile, (keys, positions) in enumerate(tiles):
        mine = given[..., key_tile * TILE : (key_tile + 1) * TILE]
        part, row_state = _tile(config, num_keys, query, problem.visibility, keys, positions, mine, row_state)
        parts.append(part)
    return Expected(
        *(np.concatenate([np.asarray(ungroup_heads(x)) for x in xs], axis=-1) for xs in zip(*parts, strict=True))
    )


@functools.partial(jax.jit, static_argnums=(0, 1), compiler_options=COMPILER_OPTIONS)
def _tile(
    config: OperatorConfig,
    num_keys: int,
    query: jax.Array,
    visibility: Visibility,
    keys: jax.Array,
    positions: jax.Array,
    scores: jax.Array,
    row_state: jax.Array | None,
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """Scores, P, scales and what was rounded to P of a tile, and what the next one has to know of the rows."""
    raw, visible = ScoreTile(config, query, None, visibility, num_keys)(keys, positions)
    masked = jnp.where(visible, scores, -jnp.inf)
    p_of = _direct_p if config.recipe.p_format == "mxfp4" else _online
    part, row_state = p_of(config, masked, row_state)
    return (raw, *part), row_state


def _direct_p(
    config: OperatorConfig, raw: jax.Array, reference: jax.Array | None
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    recipe = config.recipe
    if reference is None:
        anchored = recipe.row_reference == "anchor"
        leading = raw[..., : recipe.anchor_keys]
        reference = direct_p.anchor_reference(config, leading) if anchored else jnp.zeros(raw.shape[:-1])
    tile = direct_p.encode_tile(config, raw, reference)
    exponents = tile.scales + (recipe.p_scale_shift - 127.0)
    bias = np.log2(6) - exponents - (reference * config.log2_scale)[..., None]
    quarters = raw.reshape(*raw.shape[:-1], 4, 32)
    payloads = apply_schedule(recipe.code_map, quarters, config.log2_scale, bias[..., None])
    codes, payloads = (x.reshape(raw.shape) for x in (tile.codes, jnp.maximum(payloads, 0.0)))
    return (codes, decode_e8m0(tile.scales), payloads), reference


def _online(
    config: OperatorConfig, raw: jax.Array, row_max: jax.Array | None
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    if row_max is None:
        row_max = jnp.full(raw.shape[:-1], -jnp.inf)
    p = online_softmax.probability_tile(config, raw, row_max)
    shift = jnp.where(p.row_max == -jnp.inf, 0.0, p.row_max) * config.log2_scale
    exponentials = jnp.exp2(raw * config.log2_scale - shift[..., None])
    return (p.values, jnp.full((*raw.shape[:-1], 4), jnp.nan), exponentials), p.row_max
