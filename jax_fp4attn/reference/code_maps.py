"""Evaluation of code maps on a tile of raw scores."""

import jax
import jax.numpy as jnp
import numpy as np

from jax_fp4attn.code_map import Affine, CodeMap, Cubic, Exponential, MapSchedule, MaxAffine, SignedSquare
from jax_fp4attn.reference.tiles import QUARTER, QUERY_TILE


def apply_map(code_map: CodeMap, raw: jax.Array, log2_scale: float, bias: jax.Array) -> jax.Array:
    """The map at ``xc = raw * log2_scale + bias``, each affine part folded into one multiply-add.

    Args:
      code_map: The map.
      raw: Raw scores; -inf where masked (the result is then never positive).
      log2_scale: Factor to base-2 log scores.
      bias: Finite, broadcastable against ``raw``.

    Returns:
      float32 array of the shape of ``raw``.
    """

    def affine(slope: float, intercept: float) -> jax.Array:
        return raw * (slope * log2_scale) + (slope * bias + intercept)

    match code_map:
        case Affine(slope, intercept):
            return affine(slope, intercept)
        case Exponential(offset):
            return jnp.exp2(affine(1.0, offset))
        case SignedSquare(slope, intercept, constant):
            y = affine(slope, intercept)
            return y * jnp.abs(y) + constant
        case MaxAffine(pieces):
            result = affine(*pieces[0])
            for piece in pieces[1:]:
                result = jnp.maximum(result, affine(*piece))
            return result
        case Cubic(c3, c2, c1, c0):
            xc = affine(1.0, 0.0)
            return ((c3 * xc + c2) * xc + c1) * xc + c0
    raise AssertionError(f"no evaluation for {code_map!r}")


def apply_schedule(schedule: MapSchedule, raw: jax.Array, log2_scale: float, bias: jax.Array) -> jax.Array:
    """Every element's map of the schedule.

    Args:
      schedule: Which element takes which map.
      raw: Raw scores [..., T, 4, 32].
      log2_scale: Factor to base-2 log scores.
      bias: [..., T, 4, 1].

    Returns:
      float32 [..., T, 4, 32].
    """
    result = apply_map(schedule.quarters[0], raw, log2_scale, bias)
    for code_map in dict.fromkeys(schedule.quarters[1:]):
        if code_map != schedule.quarters[0]:
            takes = np.array([m == code_map for m in schedule.quarters])[:, None]
            result = jnp.where(takes, apply_map(code_map, raw, log2_scale, bias), result)
    if schedule.alternate is not None:
        takes = _alternate_elements(schedule, raw.shape[-3])
        result = jnp.where(takes, apply_map(schedule.alternate, raw, log2_scale, bias), result)
    return result


def _alternate_elements(schedule: MapSchedule, num_queries: int) -> np.ndarray:
    """Where the alternate map applies, bool [T or 1, 4, 32]."""
    pairs = np.zeros((4, QUARTER // 2), bool)
    for quarter, members in enumerate(schedule.alternate_pairs):
        pairs[quarter, list(members)] = True
    elements = np.repeat(pairs, 2, axis=1)[None]
    if all(schedule.alternate_query_tiles):
        return elements
    parity = (np.arange(num_queries) // QUERY_TILE) % 2
    rows: np.ndarray = np.asarray(schedule.alternate_query_tiles)[parity]
    applies: np.ndarray = rows[:, None, None] & elements
    return applies
