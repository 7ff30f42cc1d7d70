"""Random arrays of a shape, and the part of them on which outputs are checked."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.speed.cases import Shape

ROWS = 64
"""Queries whose outputs and cotangents are checked, at most."""


class Arrays(NamedTuple):
    """Arguments of a call with its cotangent, bfloat16 [B, S, heads, D]."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    d_output: jax.Array


def draw(shape: Shape, seed: int = 0) -> Arrays:
    """Normally distributed arrays.

    Args:
      shape: Their lengths and heads.
      seed: Of the draw.

    Returns:
      The arrays, on the default device.
    """
    return _draw(shape, jax.random.split(jax.random.key(seed), 4))


@functools.partial(jax.jit, static_argnames="shape")
def _draw(shape: Shape, keys: jax.Array) -> Arrays:
    heads = (shape.heads, shape.kv_heads, shape.kv_heads, shape.heads)
    return Arrays(
        *(
            jax.random.normal(key, (shape.batch, shape.length, count, shape.head_size), jnp.bfloat16)
            for key, count in zip(keys, heads, strict=True)
        )
    )


@dataclasses.dataclass(frozen=True)
class Sample:
    """A part of a call whose exact values are cheap: some queries of some heads of one batch element.

    Attributes:
      batch: Batch element.
      rows: Queries.
      kv_heads: Heads of key and value.
      heads: Heads of the query that belong to them, equally many for each, in order.
    """

    batch: int
    rows: tuple[int, ...]
    kv_heads: tuple[int, ...]
    heads: tuple[int, ...]


def sample_of(shape: Shape) -> Sample:
    """The sample of a shape: the last batch element, the first and the last head, queries over the whole length.

    Args:
      shape: The shape.

    Returns:
      The sample.
    """
    kv_heads = tuple(sorted({0, shape.kv_heads - 1}))
    group = shape.heads // shape.kv_heads
    return Sample(
        batch=shape.batch - 1,
        rows=tuple(sorted({round(x) for x in np.linspace(0, shape.length - 1, ROWS)})),
        kv_heads=kv_heads,
        heads=tuple(group * kv_head + i for kv_head in kv_heads for i in range(group)),
    )


@functools.partial(jax.jit, static_argnames="sample")
def cotangent_of_rows(sample: Sample, d_output: jax.Array) -> jax.Array:
    """The cotangent with zeros in all other queries, so that gradients depend on those of the sample alone.

    Args:
      sample: The sample.
      d_output: [B, S, heads, D].

    Returns:
      The same shape.
    """
    kept = np.zeros((d_output.shape[1], 1, 1), bool)
    kept[list(sample.rows)] = True
    return jnp.where(kept, d_output, 0)


def take(sample: Sample, by_query: Any, by_key: Any) -> tuple[Any, Any]:
    """The sample's part of arrays, float32 on the host.

    Args:
      sample: The sample.
      by_query: Pytree of arrays [B, S, heads of the query, D].
      by_key: Pytree of arrays [B, S, heads of the key, D], of which all positions are taken.

    Returns:
      Both trees, with arrays [queries or S, heads of the sample, D].
    """
    taken = jax.device_get(_take(sample, by_query, by_key))
    by_query, by_key = jax.tree.map(lambda x: x.astype(np.float32), taken)
    return by_query, by_key


@functools.partial(jax.jit, static_argnames="sample")
def _take(sample: Sample, by_query: Any, by_key: Any) -> tuple[Any, Any]:
    rows, heads, kv_heads = (np.array(x) for x in (sample.rows, sample.heads, sample.kv_heads))
    return (
        jax.tree.map(lambda x: x[sample.batch, rows][:, heads], by_query),
        jax.tree.map(lambda x: x[sample.batch][:, kv_heads], by_key),
    )
