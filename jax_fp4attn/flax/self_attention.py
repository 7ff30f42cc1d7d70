"""What the Linen and NNX modules share: their checks, and everything between the projections."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jax_fp4attn.api import attention
from jax_fp4attn.config import ContextParallelism, SegmentIds
from jax_fp4attn.context_arguments import sequence_positions
from jax_fp4attn.flax.rotary import apply_rotary
from jax_fp4attn.recipe import Recipe

# The defaults of Flax's own projections.
DEFAULT_KERNEL_INIT = jax.nn.initializers.lecun_normal()
DEFAULT_BIAS_INIT = jax.nn.initializers.zeros


def resolve_heads(
    features: int, num_heads: int, num_kv_heads: int | None, head_dim: int | None, dtype: DTypeLike | None
) -> tuple[int, int]:
    """Fills in the defaults of a module's head layout and checks it.

    Args:
      features: Input and output features.
      num_heads: Query heads.
      num_kv_heads: Key and value heads; None for as many.
      head_dim: Channels of a head; None for ``features // num_heads``.
      dtype: Dtype of the computation, or None.

    Returns:
      Number of key and value heads, and channels of a head.

    Raises:
      ValueError: For numbers that do not go together.
      TypeError: For a dtype that attention does not take.
    """
    _check_positive("num_heads", num_heads)
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    _check_positive("num_kv_heads", num_kv_heads)
    if num_heads % num_kv_heads:
        raise ValueError(f"num_kv_heads: expected a divisor of num_heads={num_heads}, got {num_kv_heads}")
    if head_dim is None:
        if features % num_heads:
            raise ValueError(
                f"num_heads: expected a divisor of the {features} input features, got {num_heads}; or pass head_dim"
            )
        head_dim = features // num_heads
    _check_positive("head_dim", head_dim)
    if head_dim % 2:
        raise ValueError(f"head_dim: expected an even number (two codes a byte), got {head_dim}; pass another head_dim")
    if dtype is not None and jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float32):
        raise TypeError(f"dtype: expected None, bfloat16 or float32, got {jnp.dtype(dtype)}")
    return num_kv_heads, head_dim


def check_input(x: jax.Array, features: int | None = None) -> None:
    """Checks a module's input.

    Args:
      x: What came.
      features: Expected features; None for any number.

    Raises:
      ValueError: If it is not [*B, T, features].
    """
    if x.ndim < 2 or (features is not None and x.shape[-1] != features):
        expected = "[*B, T, features]" if features is None else f"[*B, T, {features}]"
        raise ValueError(f"x: expected {expected}, got shape {x.shape}")


def zero_padding(
    x: jax.Array, segment_ids: ArrayLike | None, seq_lengths: ArrayLike | None, context: ContextParallelism | None
) -> jax.Array:
    """Selects zeros in place of padding, so that what it holds reaches no gradient of the projections either.

    Args:
      x: [*B, T, features].
      segment_ids: int [*B, T]; 0 or less is padding.
      seq_lengths: int [*B].
      context: How the sequence is split over a mesh axis, or None.

    Returns:
      [*B, T, features].

    Raises:
      ValueError: For a shape that does not fit.
      TypeError: For a dtype that is not an integer.
    """
    *batch, length, _ = x.shape
    valid = jnp.ones((), jnp.bool_)
    if segment_ids is not None:
        valid &= _check_integers("segment_ids", segment_ids, (*batch, length)) > 0
    if seq_lengths is not None:
        valid &= sequence_positions(context, length) < _check_integers("seq_lengths", seq_lengths, batch)[..., None]
    if valid.ndim == 0:
        return x
    return jnp.where(valid[..., None], x, jnp.zeros((), x.dtype))


def self_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    positions: ArrayLike | None,
    segment_ids: ArrayLike | None,
    seq_lengths: ArrayLike | None,
    rope_theta: float | None,
    is_causal: bool,
    local_window_size: int | tuple[int, int] | None,
    recipe: Recipe | None,
    implementation: str | Sequence[str] | None,
    context: ContextParallelism | None,
) -> jax.Array:
    """Rotary embedding and attention of one sequence to itself.

    Args:
      query: [*B, T, N, H].
      key: [*B, T, K, H].
      value: [*B, T, K, H].
      positions: [T] or [*B, T], or None for the positions in the whole sequence.
      segment_ids: int [*B, T].
      seq_lengths: int [*B].
      rope_theta: Base of the rotary embedding; None for none.
      is_causal: As in :func:`jax_fp4attn.attention`.
      local_window_size: As in :func:`jax_fp4attn.attention`.
      recipe: As in :func:`jax_fp4attn.attention`.
      implementation: As in :func:`jax_fp4attn.attention`.
      context: How the sequence is split over a mesh axis, or None.

    Returns:
      [*B, T, N, H].
    """
    if rope_theta is not None:
        if positions is None and context is not None:
            positions = sequence_positions(context, query.shape[-3])
        query = apply_rotary(query, positions, rope_theta)
        key = apply_rotary(key, positions, rope_theta)
    ids = None if segment_ids is None else jnp.asarray(segment_ids)
    return attention(
        query,
        key,
        value,
        is_causal=is_causal,
        query_seq_lengths=seq_lengths,
        key_value_seq_lengths=seq_lengths,
        local_window_size=local_window_size,
        segment_ids=None if ids is None else SegmentIds(ids, ids),
        recipe=recipe,
        implementation=implementation,
        context_axis=None if context is None else context.axis,
        context_order="contiguous" if context is None else context.order,
    )


def _check_positive(name: str, x: int) -> None:
    if not isinstance(x, int | np.integer) or isinstance(x, bool) or x <= 0:
        raise ValueError(f"{name}: expected a positive int, got {x!r}")


def _check_integers(name: str, x: ArrayLike, shape: Sequence[int]) -> jax.Array:
    array = jnp.asarray(x)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"{name}: expected an integer dtype, got {array.dtype}")
    if array.shape != tuple(shape):
        raise ValueError(f"{name}: expected shape {tuple(shape)}, got {array.shape}")
    return array
