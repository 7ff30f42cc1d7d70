"""`attention`: the public function."""

import math
from collections.abc import Sequence
from typing import Literal, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_fp4attn import batch_dimensions, context_arguments, implementations, recipes
from jax_fp4attn.config import ContextOrder, OperatorConfig, SegmentIds, Visibility
from jax_fp4attn.recipe import Recipe

MAX_HEAD_SIZE = 256

_DTYPES = (jnp.bfloat16, jnp.float32)
_LONGEST_SEQUENCE = 2**30
_SCALES = (2.0**-126, 2.0**126)  # log2(e) times that is a normal float32


@overload
def attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = ...,
    mask: ArrayLike | None = ...,
    *,
    scale: float | None = ...,
    is_causal: bool = ...,
    query_seq_lengths: ArrayLike | None = ...,
    key_value_seq_lengths: ArrayLike | None = ...,
    local_window_size: int | tuple[int, int] | None = ...,
    segment_ids: SegmentIds | None = ...,
    recipe: Recipe | None = ...,
    implementation: str | Sequence[str] | None = ...,
    context_axis: str | None = ...,
    context_order: ContextOrder = ...,
    return_residual: Literal[False] = ...,
) -> jax.Array: ...


@overload
def attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = ...,
    mask: ArrayLike | None = ...,
    *,
    scale: float | None = ...,
    is_causal: bool = ...,
    query_seq_lengths: ArrayLike | None = ...,
    key_value_seq_lengths: ArrayLike | None = ...,
    local_window_size: int | tuple[int, int] | None = ...,
    segment_ids: SegmentIds | None = ...,
    recipe: Recipe | None = ...,
    implementation: str | Sequence[str] | None = ...,
    context_axis: str | None = ...,
    context_order: ContextOrder = ...,
    return_residual: Literal[True],
) -> tuple[jax.Array, jax.Array]: ...


def attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    segment_ids: SegmentIds | None = None,
    recipe: Recipe | None = None,
    implementation: str | Sequence[str] | None = None,
    context_axis: str | None = None,
    context_order: ContextOrder = "contiguous",
    return_residual: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Scaled dot-product attention with 4-bit matrix products.

    Computes ``softmax(scale * Q K^T + bias) V`` on block-scaled operands; the recipe fixes every rounding (Direct-P, R.
    Hu 2026; docs/numerics.md). Differentiable in reverse mode: the gradient goes straight through every quantiser, as
    in the published FP8 backward. Query head n uses key/value head ``n // (N / K)``.

    Args:
      query: [*B, T, N, H] or [T, N, H], bfloat16 or float32. Values are rounded to bfloat16 first, and output and
        gradients hold bfloat16 values. H is even and at most 256.
      key: [*B, S, K, H], of the query's dtype; K divides N.
      value: [*B, S, K, H], of the query's dtype.
      bias: Floating, broadcastable to [*B, N, T, S] with all its dimensions present; added after the scale, natural-log
        units. Reference implementation only. Differentiable.
      mask: bool, broadcastable to [*B, N, T, S] with all its dimensions present; True keeps. Reference implementation
        only. A key that it hides from every query has no influence at all; one that some query sees shares its block
        scales with its neighbours.
      scale: Softmax scale, a positive Python number; None for ``1 / sqrt(H)``.
      is_causal: Query i sees keys j <= i. Aligned at the top left, as in ``jax.nn``: with T = 1 it sees key 0 only, so
        leave it off when decoding against a cache.
      query_seq_lengths: int [*B]; rows beyond give 0.
      key_value_seq_lengths: int [*B]; what lies in keys and values beyond, NaN included, has no influence.
      local_window_size: (left, right) or one int for both: query i sees keys i - left <= j <= i + right.
      segment_ids: A query sees keys of its own segment; segment 0 or less is padding and attends to nothing.
      recipe: Numerical choices; None for ``recipes.train`` if causal and ``recipes.square`` otherwise.
      implementation: None for the best that can run, "cuda", "reference", or a sequence to try in order.
      context_axis: Mesh axis over which the sequence is split (ring attention, docs/transforms.md); each shard then
        holds a multiple of 128 positions. Inside ``shard_map`` the arguments are a shard's, elsewhere they are whole.
        Lengths are those of the whole sequence.
      context_order: Order of the split sequence: ``"contiguous"``, or ``"zigzag"`` if the caller has permuted it by
        :func:`jax_fp4attn.zigzag_order`, which saves causal attention an exchange of halves between shards.
      return_residual: Whether to return the log-sum-exp too.

    Returns:
      Output [*B, T, N, H] of the query's dtype; with ``return_residual`` also the lse, float32 [*B, T, N], natural log
      of the denominator that the recipe normalises by, differentiable. A row that sees no key has output 0, lse -inf
      and gradients 0. With a shiftless recipe (``row_reference="zero"``) a row whose largest score is below about -76
      nats has output 0 and lse -inf, and scores above about 88 nats saturate: they weigh alike.

    Raises:
      ValueError: For a shape or a value that does not fit; the message names the argument.
      TypeError: For a dtype or a type that is not accepted, such as a float mask or a traced scale.
      NotImplementedError: For what no (or the named) implementation can do, such as head sizes over 256.

    Example:
      >>> import jax, jax.numpy as jnp, jax_fp4attn
      >>> q = jax.random.normal(jax.random.key(0), (1, 256, 8, 64), jnp.bfloat16)
      >>> kv = jax.random.normal(jax.random.key(1), (1, 256, 2, 64), jnp.bfloat16)
      >>> jax_fp4attn.attention(q, kv, kv, is_causal=True).shape
      (1, 256, 8, 64)
    """
    query, key, value = _check_arrays(query, key, value)
    *batch, num_queries, num_heads, head_size = query.shape
    num_keys = key.shape[-3]
    scores_shape = (*batch, num_heads, num_queries, num_keys)
    is_causal = _check_bool("is_causal", is_causal)
    return_residual = _check_bool("return_residual", return_residual)
    recipe = _check_recipe(recipe, is_causal)
    config = OperatorConfig(
        recipe=recipe,
        scale=_check_scale(scale, head_size),
        is_causal=is_causal,
        window=_check_window(local_window_size),
        context=context_arguments.check_context(context_axis, context_order),
        implementation=implementations.select(
            implementation,
            recipe,
            head_size,
            dense="bias" if bias is not None else "mask" if mask is not None else None,
        ),
    )
    merged = batch_dimensions.merge(batch, has_bias=bias is not None)
    if bias is not None:
        bias = batch_dimensions.merge_scores(_check_scores_like("bias", bias, scores_shape), batch, merged)
    if mask is not None:
        mask = batch_dimensions.merge_scores(_check_scores_like("mask", mask, scores_shape), batch, merged)
    visibility = Visibility(
        mask=mask,
        query_lengths=_check_lengths("query_seq_lengths", query_seq_lengths, batch, merged),
        key_lengths=_check_lengths("key_value_seq_lengths", key_value_seq_lengths, batch, merged),
        segment_ids=_check_segments(segment_ids, batch, merged, num_queries, num_keys),
    )
    if config.context is not None:
        context_arguments.check_split(config.context.axis, query=query, key=key, value=value)
        context_arguments.check_supported(config, bias=bias, mask=mask, lengths=(num_queries, num_keys))
        visibility = context_arguments.as_segments(config.context, visibility, merged, num_queries, num_keys)
    output, lse = batch_dimensions.attend(config, merged, (query, key, value), bias, visibility)
    output = jnp.reshape(output, query.shape)
    if return_residual:
        return output, lse.reshape(*batch, num_queries, num_heads)
    return output


def _check_arrays(*arrays: ArrayLike) -> tuple[jax.Array, jax.Array, jax.Array]:
    names = ("query", "key", "value")
    query, key, value = checked = tuple(_as_array(name, x) for name, x in zip(names, arrays, strict=True))
    for name, x in zip(names, checked, strict=True):
        if x.dtype not in _DTYPES:
            raise TypeError(
                f"{name}: expected bfloat16 or float32, got {x.dtype}; cast it (values are rounded to bfloat16 anyway)"
            )
        if x.dtype != query.dtype:
            raise TypeError(f"{name}: expected the query's dtype {query.dtype}, got {x.dtype}; cast one of them")
        if x.ndim < 3:
            raise ValueError(f"{name}: expected [*B, length, heads, head size], got shape {x.shape}")
        if x.ndim != query.ndim:
            raise ValueError(f"{name}: expected the query's rank {query.ndim}, got shape {x.shape}")
    *batch, num_queries, num_heads, head_size = query.shape
    *_, num_keys, num_kv_heads, _ = key.shape
    expected = (*batch, num_keys, num_kv_heads, head_size)
    for name, x in (("key", key), ("value", value)):
        if x.shape != expected:
            raise ValueError(f"{name}: expected shape {expected} (query {query.shape}, key {key.shape}), got {x.shape}")
    if not all(isinstance(size, int) for size in (num_queries, num_keys, num_heads, num_kv_heads, head_size)):
        raise NotImplementedError(
            f"query, key: expected lengths, heads and head size as numbers (tiles are made of them), got {query.shape} "
            f"and {key.shape}; only the batch may be symbolic"
        )
    if num_queries == 0 or num_keys == 0:
        raise ValueError(f"query, key: expected non-empty sequences, got T={num_queries}, S={num_keys}")
    if 0 in batch:
        raise ValueError(f"query: expected a non-empty batch, got shape {query.shape}")
    if num_kv_heads == 0 or num_heads == 0 or num_heads % num_kv_heads:
        raise ValueError(
            f"key: expected a number of heads K that divides the query's N={num_heads}, got K={num_kv_heads}"
        )
    if head_size == 0 or head_size % 2:
        raise ValueError(
            f"query: expected an even head size (two codes a byte), got H={head_size}; pad with zero channels and pass "
            "scale explicitly"
        )
    if head_size > MAX_HEAD_SIZE:
        raise NotImplementedError(f"query: head sizes up to {MAX_HEAD_SIZE} are implemented, got H={head_size}")
    return query, key, value


def _as_array(name: str, x: ArrayLike) -> jax.Array:
    if not isinstance(x, jax.Array | np.ndarray):
        raise TypeError(f"{name}: expected a JAX or NumPy array, got {type(x).__name__}")
    # float64 must be refused by name, not silently narrowed as jnp.asarray does without x64.
    if x.dtype == np.float64 and not isinstance(x, jax.Array):
        raise TypeError(f"{name}: expected bfloat16 or float32, got float64; cast it")
    return jnp.asarray(x)


def _check_bool(name: str, x: bool) -> bool:
    if not isinstance(x, bool | np.bool_):
        raise TypeError(f"{name}: expected a Python bool, got {type(x).__name__}; it is part of the compiled program")
    return bool(x)


def _check_recipe(recipe: Recipe | None, is_causal: bool) -> Recipe:
    if recipe is None:
        return recipes.train if is_causal else recipes.square
    if not isinstance(recipe, Recipe):
        raise TypeError(f"recipe: expected a jax_fp4attn.Recipe (see jax_fp4attn.recipes), got {type(recipe).__name__}")
    return recipe


def _check_scale(scale: float | None, head_size: int) -> float:
    if scale is None:
        return 1.0 / math.sqrt(head_size)
    if isinstance(scale, jax.core.Tracer):
        raise TypeError(
            "scale: expected a Python number, got a traced value; it is part of the compiled program. Multiply the "
            "query by a traced factor instead"
        )
    if isinstance(scale, bool) or not isinstance(scale, int | float | np.floating | np.integer):
        raise TypeError(f"scale: expected a Python number, got {type(scale).__name__}")
    scale = scale if isinstance(scale, int) else float(scale)
    if not _SCALES[0] <= scale <= _SCALES[1]:
        raise ValueError(
            f"scale: expected a positive number between {_SCALES[0]:.1e} and {_SCALES[1]:.1e}, float32's range, got "
            f"{scale}"
        )
    return float(scale)


def _check_window(window: int | tuple[int, int] | None) -> tuple[int, int] | None:
    if window is None:
        return None
    if isinstance(window, jax.core.Tracer):
        raise TypeError(
            "local_window_size: expected Python ints, got a traced value; it is part of the compiled program"
        )
    if not isinstance(window, int | np.integer | Sequence | np.ndarray):
        raise TypeError(f"local_window_size: expected an int or (left, right), got {type(window).__name__}")
    if isinstance(window, np.ndarray) and window.ndim != 1:
        raise ValueError(f"local_window_size: expected an int or (left, right), got an array of shape {window.shape}")
    sides = (window, window) if isinstance(window, int | np.integer) else tuple(window)
    is_int = [isinstance(side, int | np.integer) and not isinstance(side, bool) for side in sides]
    if len(sides) != 2 or not all(is_int) or min(sides) < 0:
        raise ValueError(f"local_window_size: expected an int or (left, right), all >= 0, got {window!r}")
    # A side beyond any sequence hides nothing, and positions plus a huge one would overflow int32.
    return min(int(sides[0]), _LONGEST_SEQUENCE), min(int(sides[1]), _LONGEST_SEQUENCE)


def _check_scores_like(name: str, x: ArrayLike, shape: tuple[int, ...]) -> jax.Array:
    array = jnp.asarray(x)
    if name == "mask" and array.dtype != jnp.bool_:
        raise TypeError(f"mask: expected bool (True keeps), got {array.dtype}; use `mask != 0` for a 0/1 mask")
    if name == "bias" and not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(f"bias: expected a floating dtype, got {array.dtype}")
    fits = array.ndim == len(shape) and all(size in (1, full) for size, full in zip(array.shape, shape, strict=True))
    if not fits:
        raise ValueError(
            f"{name}: expected [*B, N, T, S] = {shape} or 1 in place of any of them, got shape {array.shape}"
        )
    return array.astype(jnp.float32) if name == "bias" else array


def _check_integers(name: str, x: ArrayLike, shape: Sequence[int]) -> jax.Array:
    if x is None:
        raise TypeError(f"{name}: expected an integer array, got None")
    if isinstance(x, np.ndarray) and np.issubdtype(x.dtype, np.integer) and x.size and not _fits_int32(x):
        raise ValueError(f"{name}: expected int32 values, got {x.min()} to {x.max()}")
    array = jnp.asarray(x)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"{name}: expected an integer dtype, got {array.dtype}")
    if array.shape != tuple(shape):
        raise ValueError(f"{name}: expected shape {tuple(shape)}, got {array.shape}")
    return array.astype(jnp.int32)


def _fits_int32(x: np.ndarray) -> bool:
    limits = np.iinfo(np.int32)
    return bool(limits.min <= int(x.min()) and int(x.max()) <= limits.max)


def _check_lengths(name: str, x: ArrayLike | None, batch: Sequence[int], merged: Sequence[int]) -> jax.Array | None:
    if x is None:
        return None
    if isinstance(x, jax.Array) and x.dtype in (jnp.uint32, jnp.int64, jnp.uint64):
        x = jnp.clip(x, 0, _LONGEST_SEQUENCE)  # They would wrap around, and longer than any sequence is no longer.
    return _check_integers(name, x, batch).reshape(merged)


def _check_segments(
    segment_ids: SegmentIds | None, batch: Sequence[int], merged: Sequence[int], num_queries: int, num_keys: int
) -> SegmentIds | None:
    if segment_ids is None:
        return None
    if not isinstance(segment_ids, SegmentIds):
        raise TypeError(
            f"segment_ids: expected jax_fp4attn.SegmentIds(query, key_value), got {type(segment_ids).__name__}"
        )
    query = _check_integers("segment_ids.query", segment_ids.query, (*batch, num_queries))
    key_value = _check_integers("segment_ids.key_value", segment_ids.key_value, (*batch, num_keys))
    return SegmentIds(query.reshape(*merged, num_queries), key_value.reshape(*merged, num_keys))
