"""Exact attention: float32 scores, softmax and product, over blocks of query rows."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.accuracy.inputs import SCALE

_ROWS = 128


@functools.partial(jax.jit, static_argnames=("is_causal",))
def exact_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, *, is_causal: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Softmax attention without any rounding of operands or probabilities.

    Args:
      query: [B, T, N, H], T a multiple of 128 or less than that.
      key: [B, S, K, H]; K divides N.
      value: [B, S, K, H'].
      is_causal: Whether key j is visible to query i only if j <= i.

    Returns:
      Output, float32 [B, T, N, H'], and natural-log lse, float32 [B, T, N].
    """
    query, key, value = (x.astype(jnp.float32) for x in (query, key, value))
    batch, num_queries, num_heads, head_size = query.shape
    num_keys, num_kv_heads = key.shape[1:3]
    rows = min(_ROWS, num_queries)
    grouped = (batch, rows, num_kv_heads, num_heads // num_kv_heads, head_size)

    def block(start: jax.Array) -> tuple[jax.Array, jax.Array]:
        q = lax.dynamic_slice_in_dim(query, start, rows, axis=1).reshape(grouped)
        scores = SCALE * jnp.einsum("btkgh,bskh->btkgs", q, key, precision=lax.Precision.HIGHEST)
        if is_causal:
            visible = jnp.arange(num_keys) <= (start + jnp.arange(rows))[:, None]
            scores = jnp.where(visible[:, None, None], scores, -jnp.inf)
        largest = jnp.max(scores, axis=-1, keepdims=True)
        p = jnp.exp(scores - largest)
        total = jnp.sum(p, axis=-1)
        output = jnp.einsum("btkgs,bskh->btkgh", p, value, precision=lax.Precision.HIGHEST) / total[..., None]
        return output, largest[..., 0] + jnp.log(total)

    output, lse = lax.map(block, jnp.arange(0, num_queries, rows))
    return (
        jnp.moveaxis(output, 0, 1).reshape(*query.shape[:3], value.shape[-1]),
        jnp.moveaxis(lse, 0, 1).reshape(query.shape[:3]),
    )
