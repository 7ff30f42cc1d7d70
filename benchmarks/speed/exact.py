"""Exact attention and gradients on a sample, float32 NumPy, and how near a contender comes."""

import math
from collections.abc import Sequence

import jax
import numpy as np
from numpy.typing import NDArray

from benchmarks.accuracy.metrics import Accuracy, compare
from benchmarks.speed.cases import Case
from benchmarks.speed.inputs import Arrays, Sample, take

_Array = NDArray[np.float32]


def expected(case: Case, arrays: Arrays, sample: Sample) -> list[_Array]:
    """Output and, with a backward, gradients of query, key and value; only the sample's queries have a cotangent.

    Args:
      case: What is computed.
      arrays: Arguments of the whole call.
      sample: The part that is computed here.

    Returns:
      Arrays [queries, heads, D] for output and query, [S, heads, D] for key and value.
    """
    (query, d_output), (key, value) = take(sample, (arrays.query, arrays.d_output), (arrays.key, arrays.value))
    scale = np.float32(1 / math.sqrt(query.shape[2]))
    hidden = np.array(sample.rows)[:, None] < np.arange(key.shape[0]) if case.is_causal else np.False_
    output, d_query, d_key, d_value = (np.zeros_like(x) for x in (query, query, key, value))
    group = len(sample.heads) // len(sample.kv_heads)
    for head in range(len(sample.heads)):
        q, k, v, d_out = query[:, head], key[:, head // group], value[:, head // group], d_output[:, head]
        scores = np.where(hidden, np.float32(-np.inf), scale * (q @ k.T))
        p = np.exp(scores - scores.max(axis=1, keepdims=True))
        p /= p.sum(axis=1, keepdims=True)
        output[:, head] = p @ v
        if case.has_gradients:
            d_p = d_out @ v.T
            d_scores = scale * p * (d_p - (p * d_p).sum(axis=1, keepdims=True))
            d_query[:, head] = d_scores @ k
            d_key[:, head // group] += d_scores.T @ q
            d_value[:, head // group] += p.T @ d_out
    return [output, d_query, d_key, d_value] if case.has_gradients else [output]


def agreement(results: Sequence[jax.Array], wanted: Sequence[_Array], sample: Sample) -> Accuracy:
    """The least cosine and the greatest relative L2 error among output and gradients.

    Args:
      results: Output, or output and gradients, of the whole call.
      wanted: Their exact values on the sample.
      sample: The sample.

    Returns:
      Not a number if a result has one.
    """
    by_query, by_key = take(sample, list(results[:2]), list(results[2:]))
    each = [compare(actual, exact) for actual, exact in zip([*by_query, *by_key], wanted, strict=True)]
    return Accuracy(
        cosine=float(np.min([x.cosine for x in each])),
        rel_l2=float(np.max([x.rel_l2 for x in each])),
    )
