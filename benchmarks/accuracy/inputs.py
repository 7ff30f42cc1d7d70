"""Gaussian inputs of the published tables: N(0, 1) in float32, rounded to bfloat16."""

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

HEAD_SIZE = 128
SCALE = HEAD_SIZE**-0.5

# The seed of the published runs. Their generator is another one, so that the draws are not the same.
_SEED = 20260814


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sample:
    """Attention inputs, bfloat16 when drawn; a pytree.

    Attributes:
      query: [1, T, N, 128]; without a causal mask rows are independent, so T may be less than S.
      key: [1, S, K, 128].
      value: [1, S, K, 128].
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array


def gaussian(shape: tuple[int, ...], *stream: int, std: float = 1.0) -> jax.Array:
    """Draws N(0, std^2) in float32 and rounds to bfloat16; a bfloat16 draw would have its tails cut.

    Args:
      shape: Shape of the array.
      *stream: Non-negative integers that tell independent draws apart.
      std: Standard deviation.

    Returns:
      bfloat16 array.
    """
    rng = np.random.default_rng([_SEED, *stream])
    return jnp.asarray(rng.standard_normal(shape, dtype=np.float32) * np.float32(std)).astype(jnp.bfloat16)


def draw(num_keys: int, *, rows: int, heads: int, kv_heads: int, stream: int = 0, query_std: float = 1.0) -> Sample:
    """Draws one sample.

    Args:
      num_keys: S.
      rows: T, the query rows of each head.
      heads: N.
      kv_heads: K.
      stream: Tells independent samples of one S apart.
      query_std: Standard deviation of the queries, and so of the scores.

    Returns:
      The sample.
    """
    return Sample(
        query=gaussian((1, rows, heads, HEAD_SIZE), num_keys, stream, 0, std=query_std),
        key=gaussian((1, num_keys, kv_heads, HEAD_SIZE), num_keys, stream, 1),
        value=gaussian((1, num_keys, kv_heads, HEAD_SIZE), num_keys, stream, 2),
    )


def draw_groups(num_keys: int, *, rows: int, heads: int, group: int) -> Iterator[Sample]:
    """Draws ``heads`` heads, each with its own key and value, ``group`` at a time to bound memory.

    Args:
      num_keys: S.
      rows: T, the query rows of each head.
      heads: Number of heads in all, a multiple of ``group``.
      group: Heads of one sample.

    Yields:
      ``heads / group`` samples.
    """
    for stream in range(heads // group):
        yield draw(num_keys, rows=rows, heads=group, kv_heads=group, stream=stream)
