"""Which keys a query sees, tile by tile."""

import jax
import jax.numpy as jnp

from jax_fp4attn.config import OperatorConfig, Visibility
from jax_fp4attn.reference.tiles import group_heads


def valid_queries(visibility: Visibility, num_queries: int) -> jax.Array | None:
    """Rows that may see anything, bool [B, T], or None where nothing restricts them as a whole."""
    terms = []
    if visibility.query_lengths is not None:
        terms.append(jnp.arange(num_queries)[None] < visibility.query_lengths[:, None])
    if visibility.segment_ids is not None:
        terms.append(visibility.segment_ids.query > 0)
    return _all(terms)


def valid_keys(visibility: Visibility, num_keys: int) -> jax.Array | None:
    """Keys that some query may see, bool [B, S] (or [1, S]), or None where nothing restricts them as a whole.

    What lies behind an invalid key (uninitialised memory, NaN) must not reach a shared block scale, so the quantisers
    zero these keys first.
    """
    terms = _keys_in_sequence(visibility, num_keys)
    if visibility.mask is not None:
        seen = jnp.any(visibility.mask, axis=(1, 2))
        terms.append(jnp.broadcast_to(seen, (seen.shape[0], num_keys)))
    return _all(terms)


def _keys_in_sequence(visibility: Visibility, num_keys: int) -> list[jax.Array]:
    terms = []
    if visibility.key_lengths is not None:
        terms.append(jnp.arange(num_keys)[None] < visibility.key_lengths[:, None])
    if visibility.segment_ids is not None:
        terms.append(visibility.segment_ids.key_value > 0)
    return terms


def visible_in_tile(
    config: OperatorConfig,
    visibility: Visibility,
    positions: jax.Array,
    *,
    num_queries: int,
    num_keys: int,
    num_kv_heads: int,
) -> jax.Array:
    """Visibility of one key tile.

    Args:
      config: Static arguments.
      visibility: Run-time restrictions.
      positions: int32 [128], the key in each slot (``num_keys`` for padding).
      num_queries: T.
      num_keys: S.
      num_kv_heads: K.

    Returns:
      bool, broadcastable to [B, K, G, T, 128].
    """
    query = jnp.arange(num_queries)[:, None]
    key = positions[None]
    visible = jnp.broadcast_to(key < num_keys, (num_queries, positions.shape[0]))
    if visibility.key_offset is not None:
        key = key + visibility.key_offset
    if config.is_causal:
        visible &= key <= query
    if config.window is not None:
        left, right = config.window
        visible &= (query - left <= key) & (key <= query + right)
    visible = visible[None, None, None]
    rows = valid_queries(visibility, num_queries)
    # Not valid_keys: it would read the whole dense mask for every tile, of which the tile's part is applied below.
    keys = _all(_keys_in_sequence(visibility, num_keys))
    slots = jnp.minimum(positions, num_keys - 1)
    if rows is not None:
        visible &= rows[:, None, None, :, None]
    if keys is not None:
        visible &= keys[:, slots][:, None, None, None, :]
    if visibility.segment_ids is not None:
        segments = visibility.segment_ids
        same = segments.query[:, :, None] == segments.key_value[:, slots][:, None, :]
        visible &= same[:, None, None]
    if visibility.mask is not None:
        visible &= dense_tile(visibility.mask, slots, num_kv_heads)
    return visible


def dense_tile(x: jax.Array, slots: jax.Array, num_kv_heads: int) -> jax.Array:
    """Columns of a [B|1, N|1, T|1, S|1] array for the keys of one tile, as [B|1, K|1, G|1, T|1, 128|1]."""
    columns = x if x.shape[-1] == 1 else x[..., slots]
    return group_heads(columns, 1 if columns.shape[1] == 1 else num_kv_heads)


def _all(terms: list[jax.Array]) -> jax.Array | None:
    if not terms:
        return None
    result = terms[0]
    for term in terms[1:]:
        result = result & term
    return result
