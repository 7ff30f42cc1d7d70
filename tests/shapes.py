"""Named shapes of attention calls, random inputs for them, and one compiled program that answers everything about one.

Every test that compiles pays about a second a program, so tests share `evaluate`, which returns output, lse and all
gradients at once.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import jax_fp4attn
from jax_fp4attn import Recipe, SegmentIds
from tests import oracles

# The code that LLVM makes is used once, on tiny arrays: compiling less well takes half the time.
COMPILER_OPTIONS = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of one call: batch dimensions, T, S, N, K and H."""

    batch: tuple[int, ...]
    queries: int
    keys: int
    heads: int
    kv_heads: int
    head_size: int

    @property
    def scores(self) -> tuple[int, ...]:
        """[*B, N, T, S], the shape of masks and biases."""
        return (*self.batch, self.heads, self.queries, self.keys)


SHAPES = {
    "mha": Shape((2,), 128, 128, 2, 2, 64),
    "gqa_4_to_1": Shape((1,), 130, 130, 8, 2, 128),
    "mqa": Shape((1,), 96, 96, 4, 1, 64),
    "fewer_queries": Shape((1,), 5, 200, 2, 1, 64),
    "more_queries": Shape((1,), 200, 5, 2, 1, 64),
    "keys_not_whole_tiles": Shape((1,), 64, 300, 2, 2, 64),
    "one_key": Shape((1,), 3, 1, 2, 1, 64),
    "one_query": Shape((1,), 1, 150, 4, 2, 64),
    "head_size_18": Shape((1,), 16, 17, 5, 5, 18),
    "head_size_80": Shape((1,), 40, 70, 2, 1, 80),
    "head_size_256": Shape((1,), 33, 65, 2, 1, 256),
    "no_batch": Shape((), 20, 40, 2, 1, 64),
    "two_batch_dims": Shape((2, 3), 12, 20, 2, 1, 64),
}


class Inputs(NamedTuple):
    """Arrays of one call and the cotangents of its results."""

    query: Any
    key: Any
    value: Any
    d_output: Any
    d_lse: Any

    def astype(self, dtype: Any) -> "Inputs":
        """The same with another dtype of query, key, value and dO."""
        return Inputs(*(x.astype(dtype) for x in self[:4]), self.d_lse)

    def jax(self) -> "Inputs":
        """The same as JAX arrays."""
        return Inputs(*map(jnp.asarray, self))


class Result(NamedTuple):
    """What `evaluate` returns: the results of a call and the gradients of its inputs."""

    output: Any
    lse: Any
    d_query: Any
    d_key: Any
    d_value: Any
    d_bias: Any


def normal(shape: Shape, seed: int = 0, *, std: float = 1.0, dtype: Any = ml_dtypes.bfloat16) -> Inputs:
    """Normally distributed inputs; query and key have standard deviation `std`, the rest 1."""
    rng = np.random.default_rng(seed)

    def draw(*size: int, std: float = 1.0) -> np.ndarray:
        return (std * rng.standard_normal((*shape.batch, *size))).astype(ml_dtypes.bfloat16).astype(dtype)

    return Inputs(
        draw(shape.queries, shape.heads, shape.head_size, std=std),
        draw(shape.keys, shape.kv_heads, shape.head_size, std=std),
        draw(shape.keys, shape.kv_heads, shape.head_size),
        draw(shape.queries, shape.heads, shape.head_size),
        rng.standard_normal((*shape.batch, shape.queries, shape.heads)).astype(np.float32),
    )


@functools.partial(
    jax.jit,
    static_argnames=("scale", "is_causal", "local_window_size", "recipe"),
    compiler_options=COMPILER_OPTIONS,
)
def _evaluate(inputs: Inputs, bias: jax.Array | None, **options: Any) -> Result:
    def call(query: Any, key: Any, value: Any, bias: Any) -> Any:
        return jax_fp4attn.attention(query, key, value, bias, return_residual=True, **options)

    (output, lse), vjp = jax.vjp(call, *inputs[:3], bias)
    return Result(output, lse, *vjp((inputs.d_output, inputs.d_lse)))


@functools.partial(
    jax.jit,
    static_argnames=("scale", "is_causal", "local_window_size", "recipe"),
    compiler_options=COMPILER_OPTIONS,
)
def _forward(inputs: Inputs, bias: jax.Array | None, **options: Any) -> Any:
    return jax_fp4attn.attention(*inputs[:3], bias, return_residual=True, **options)


def evaluate(inputs: Inputs, bias: Any = None, **options: Any) -> Result:
    """Output, lse and gradients of `attention`, as NumPy arrays; options as `attention` takes them."""
    return Result(*jax.tree.map(np.asarray, _evaluate(inputs.jax(), bias, **options)))


def forward(inputs: Inputs, bias: Any = None, **options: Any) -> oracles.Forward:
    """Output and lse of `attention`, as NumPy arrays."""
    return oracles.Forward(*jax.tree.map(np.asarray, _forward(inputs.jax(), bias, **options)))


def oracle_call(
    inputs: Inputs,
    bias: Any = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    local_window_size: tuple[int, int] | None = None,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    segment_ids: SegmentIds | None = None,
    mask: Any = None,
    recipe: Recipe | None = None,
) -> oracles.Call:
    """The same call for the oracles, with batch dimensions flattened to one; `recipe` is ignored."""
    del recipe
    query, key, value = (x.reshape(-1, *x.shape[-3:]) for x in inputs[:3])
    shape = (query.shape[0], query.shape[2], query.shape[1], key.shape[1])

    def flat(x: Any, rank: int) -> Any:
        return None if x is None else np.asarray(x).reshape(-1, *np.shape(x)[np.ndim(x) - rank :])

    visible = oracles.visible_keys(
        shape,
        is_causal=is_causal,
        window=local_window_size,
        query_lengths=flat(query_seq_lengths, 0),
        key_lengths=flat(key_value_seq_lengths, 0),
        query_segments=None if segment_ids is None else flat(segment_ids.query, 1),
        key_segments=None if segment_ids is None else flat(segment_ids.key_value, 1),
        mask=flat(mask, 3),
    )
    dense_bias = None if bias is None else np.broadcast_to(flat(bias, 3).astype(np.float64), shape)
    return oracles.Call(query, key, value, scale or 1 / math.sqrt(query.shape[3]), visible, dense_bias)
