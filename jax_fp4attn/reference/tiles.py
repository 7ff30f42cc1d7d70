"""Key tiles: their size, the order of keys in them, and views of arrays by tile."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_fp4attn.recipe import Recipe

KEY_TILE = 128
QUARTER = 32
QUERY_TILE = 128


def padded_keys(num_keys: int) -> int:
    """Number of key slots: the keys padded to whole tiles."""
    return -(-num_keys // KEY_TILE) * KEY_TILE


def padded_queries(num_queries: int) -> int:
    """Number of rows of arrays whose query rows are padded to whole tiles."""
    return -(-num_queries // QUERY_TILE) * QUERY_TILE


def key_order(recipe: Recipe, num_keys: int) -> np.ndarray | None:
    """The key in each slot when the recipe moves anchor keys to the front, else None.

    A strided anchor looks at the keys ``round(linspace(0, S - 1, anchor_keys))``; the others keep their order.

    Args:
      recipe: The recipe.
      num_keys: S.

    Returns:
      int64 [S], a permutation, or None for the identity.
    """
    if recipe.row_reference != "anchor" or recipe.anchor_order == "leading":
        return None
    anchors = np.unique(np.round(np.linspace(0, num_keys - 1, recipe.anchor_keys)).astype(np.int64))
    return np.concatenate([anchors, np.setdiff1d(np.arange(num_keys), anchors)])


def key_positions(num_keys: int, order: np.ndarray | None = None) -> jax.Array:
    """Position of the key in each slot, int32 [tiles, 128]; slots of padding hold ``num_keys``."""
    slots = np.full(padded_keys(num_keys), num_keys, np.int32)
    slots[:num_keys] = np.arange(num_keys) if order is None else order
    return jnp.asarray(slots.reshape(-1, KEY_TILE))


def split_keys(x: jax.Array, axis: int) -> jax.Array:
    """Moves key tiles of ``x`` (padded along ``axis``) to a new leading axis, for ``lax.scan``."""
    axis %= x.ndim
    tiled = x.reshape(*x.shape[:axis], -1, KEY_TILE, *x.shape[axis + 1 :])
    return jnp.moveaxis(tiled, axis, 0)


def pad_axis(x: jax.Array, axis: int, size: int) -> jax.Array:
    """Pads ``axis`` with zeros up to ``size``."""
    if x.shape[axis] == size:
        return x
    pad = [(0, 0)] * x.ndim
    pad[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, pad)


def group_heads(x: jax.Array, num_kv_heads: int) -> jax.Array:
    """Views [B, N, ...] as [B, K, G, ...]: query head n uses key/value head n // G."""
    return x.reshape(x.shape[0], num_kv_heads, -1, *x.shape[2:])


def ungroup_heads(x: jax.Array) -> jax.Array:
    """Undoes :func:`group_heads`."""
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def zeros_for_carry(shape: tuple[int, ...], *arrays: Any) -> jax.Array:
    """Float32 zeros to start a scan whose body combines all of ``arrays`` (pytrees).

    Inside ``shard_map`` the type of an array says over which mesh axes it varies, and a carry must enter with the type
    that it leaves with.
    """
    zero = jnp.zeros((), jnp.float32)
    for x in jax.tree.leaves(arrays):
        zero = zero + jnp.zeros_like(x, jnp.float32, shape=())
    return jnp.broadcast_to(zero, shape)
