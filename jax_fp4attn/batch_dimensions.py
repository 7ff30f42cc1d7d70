"""Leading batch dimensions: the operator takes one, and one more by vmap.

Merging dimensions of which an inner one is split over a mesh would gather it, so the first is mapped and only the
others are merged.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jax_fp4attn import context_arguments
from jax_fp4attn.autodiff import attention_with_lse
from jax_fp4attn.config import OperatorConfig, Visibility
from jax_fp4attn.transforms import explicit_spec


def merge(batch: Sequence[int], *, has_bias: bool) -> tuple[int, ...]:
    """The one or two dimensions that stand for all.

    Args:
      batch: Sizes of the batch dimensions.
      has_bias: Whether the call has a bias; its gradient is summed over one batch, not stored for each mapped entry.

    Returns:
      Their sizes.
    """
    if len(batch) > 1 and not has_bias:
        return batch[0], math.prod(batch[1:])
    return (math.prod(batch),)


def merge_scores(x: jax.Array, batch: Sequence[int], merged: Sequence[int]) -> jax.Array:
    """[*B, N, T, S] with ones allowed to [*merged, N or 1, T or 1, S or 1], or to [1, ...] if all share it."""
    if all(size == 1 for size in x.shape[:-3]):
        return x.reshape(1, *x.shape[-3:])
    return jnp.broadcast_to(x, (*batch, *x.shape[-3:])).reshape(*merged, *x.shape[-3:])


def attend(
    config: OperatorConfig,
    merged: Sequence[int],
    operands: tuple[jax.Array, jax.Array, jax.Array],
    bias: jax.Array | None,
    visibility: Visibility,
) -> tuple[jax.Array, jax.Array]:
    """The operator over merged batch dimensions.

    Args:
      config: Static arguments.
      merged: From :func:`merge`.
      operands: Query [*B, T, N, H], key and value [*B, S, K, H].
      bias: From :func:`merge_scores`, or None.
      visibility: Run-time restrictions with merged batch dimensions.

    Returns:
      Output [*merged, T, N, H] and lse [*merged, T, N].
    """
    query, key, value = (x.reshape(*merged, *x.shape[-3:]) for x in operands)
    run: Callable[..., tuple[jax.Array, jax.Array]] = functools.partial(_attend, config)
    if len(merged) == 1:
        return run(query, key, value, bias, visibility)
    # A mask that all share is not mapped: it stays out of the restrictions that are.
    mask, is_shared = visibility.mask, visibility.mask is not None and visibility.mask.ndim < query.ndim
    mapped = (query, key, value, dataclasses.replace(visibility, mask=None) if is_shared else visibility)

    def of_one(query: jax.Array, key: jax.Array, value: jax.Array, visibility: Visibility) -> Any:
        return run(query, key, value, None, dataclasses.replace(visibility, mask=mask) if is_shared else visibility)

    result: tuple[jax.Array, jax.Array] = jax.vmap(of_one)(*_split_alike(mapped))
    return result


def _split_alike(arrays: Any) -> Any:
    """On an Explicit mesh, splits the first dimension of all arrays as the query's: vmap wants them alike."""
    spec = explicit_spec(arrays[0])
    if spec is None:
        return arrays
    return jax.tree.map(
        lambda x: jax.sharding.reshard(x, PartitionSpec(spec[0], *tuple(explicit_spec(x) or ())[1:])), arrays
    )


# Outside a jit of the caller's the many small operations would be compiled and dispatched one by one.
@functools.partial(jax.jit, static_argnums=(0,))
def _attend(
    config: OperatorConfig,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None,
    visibility: Visibility,
) -> tuple[jax.Array, jax.Array]:
    if config.context is not None:
        query, key, value = (context_arguments.constrain(config.context.axis, x) for x in (query, key, value))
    result: tuple[jax.Array, jax.Array] = attention_with_lse(config, query, key, value, bias, visibility)
    return result
