"""Arguments of calls whose sequence is split over a mesh axis: what is refused, and lengths as segments."""

from collections.abc import Sequence
from typing import get_args

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from jax_fp4attn.config import ContextOrder, ContextParallelism, OperatorConfig, SegmentIds, Visibility
from jax_fp4attn.context import positions, zigzag_order
from jax_fp4attn.reference.tiles import KEY_TILE
from jax_fp4attn.split_sequence import check_part
from jax_fp4attn.transforms import axis_types, check_sequence_axis, varying_axes


def check_context(axis: str | None, order: ContextOrder) -> ContextParallelism | None:
    """Checks the arguments ``context_axis`` and ``context_order``.

    Args:
      axis: Name of a mesh axis, or None.
      order: Order of the split sequence.

    Returns:
      Both, or None without an axis.

    Raises:
      TypeError: If the axis is no string.
      ValueError: If the order is unknown, or given without an axis.
    """
    if order not in get_args(ContextOrder):
        raise ValueError(f"context_order: expected one of {get_args(ContextOrder)}, got {order!r}")
    if axis is None:
        if order != "contiguous":
            raise ValueError(f"context_order: expected 'contiguous' without context_axis, got {order!r}")
        return None
    if not isinstance(axis, str):
        raise TypeError(f"context_axis: expected the name of a mesh axis or None, got {type(axis).__name__}")
    types = axis_types()
    if axis not in types and _is_bound(axis):
        raise NotImplementedError(
            f"context_axis: {axis!r} is bound, but as no axis of a mesh (by vmap, it seems); keys travel between "
            "devices, so call inside jax.shard_map over a mesh axis of that name"
        )
    if order == "zigzag" and not types:
        raise ValueError(
            f"context_order: expected a mesh with axis {axis!r} in scope, got none; what stands where in zigzag order "
            "depends on the number of shards. Call under jax.set_mesh(mesh) or inside jax.shard_map"
        )
    return ContextParallelism(axis, order)


def check_supported(
    config: OperatorConfig, *, bias: jax.Array | None, mask: jax.Array | None, lengths: tuple[int, int]
) -> None:
    """Refuses what cannot be computed on a split sequence.

    Args:
      config: The operator's, with a context.
      bias: As in the call.
      mask: As in the call.
      lengths: T and S.

    Raises:
      NotImplementedError: For a bias, a mask, or a recipe that needs keys of other shards before it can begin.
      ValueError: For positions of query and key that do not go together.
    """
    for name, x in (("bias", bias), ("mask", mask)):
        if x is not None:
            raise NotImplementedError(
                f"{name}: expected None with context_axis, got an array; use is_causal, local_window_size, lengths or "
                "segment_ids"
            )
    recipe = config.recipe
    if recipe.row_reference == "anchor":
        raise NotImplementedError(
            f"recipe: expected row_reference='zero' or 'online_max' with context_axis, got {recipe.name!r}, whose rows "
            "are anchored on keys of other shards; use recipes.square, recipes.fast or recipes.train"
        )
    if (config.is_causal or config.window is not None) and lengths[0] != lengths[1]:
        raise ValueError(
            f"key: expected the query's length T={lengths[0]} with context_axis and a causal mask or a window, got "
            f"S={lengths[1]}"
        )
    _check_parts(config, lengths)


def check_split(axis: str, **arrays: jax.Array) -> None:
    """Checks that arrays inside ``shard_map`` are parts, as far as their types tell.

    Args:
      axis: Over which the sequence is split.
      **arrays: By name.

    Raises:
      ValueError: If an array is the same on all shards.
    """
    if axis_types().get(axis) != AxisType.Manual or axis not in varying_axes(lax.axis_index(axis)):
        return  # shard_map(check_vma=False) does not tell.
    for name, x in arrays.items():
        if axis not in varying_axes(x):
            raise ValueError(
                f"{name}: expected a shard's part of the sequence, got an array that is the same on all shards of mesh "
                f"axis {axis!r}; split its sequence over {axis!r} in shard_map's in_specs"
            )


def constrain(axis: str, x: jax.Array) -> jax.Array:
    """Splits the sequence of [*B, T, N, H] over an automatic axis of the mesh in scope, and leaves the rest open."""
    if axis_types().get(axis) != AxisType.Auto or jax.config.jax_disable_jit:  # type: ignore[attr-defined]
        return x
    open_ = PartitionSpec.UNCONSTRAINED
    result: jax.Array = lax.with_sharding_constraint(x, PartitionSpec(*(open_,) * (x.ndim - 3), axis, open_, open_))
    return result


def _is_bound(axis: str) -> bool:
    try:
        lax.axis_size(axis)
    except NameError:
        return False
    return True


def _check_parts(config: OperatorConfig, lengths: tuple[int, int]) -> None:
    """Checks what is known before the program is compiled; without a mesh in scope the number of shards is not."""
    assert config.context is not None
    axis, types = config.context.axis, axis_types()
    if not types:
        return
    check_sequence_axis(axis, types)
    shards = jax.sharding.get_abstract_mesh().shape[axis]
    for name, length in zip(("query", "key"), lengths, strict=True):
        if types[axis] == AxisType.Manual:
            check_part(config, name, length, shards)
        elif length % shards:
            raise ValueError(
                f"{name}: expected a length that is a multiple of {KEY_TILE * shards} (tiles of {KEY_TILE} on each of "
                f"the {shards} shards of mesh axis {axis!r}), got {length}; pad the sequence and mark the padding with "
                "lengths or segment_ids"
            )
        else:
            check_part(config, name, length // shards, shards)


def as_segments(
    context: ContextParallelism, visibility: Visibility, batch: Sequence[int], num_queries: int, num_keys: int
) -> Visibility:
    """Writes lengths as segments, which can travel with their part of the sequence.

    Args:
      context: How the sequence is split.
      visibility: Lengths and segments of the call.
      batch: Sizes of the batch dimensions.
      num_queries: T, of the shard inside ``shard_map`` and of the whole elsewhere.
      num_keys: S, likewise.

    Returns:
      Restrictions with segments alone.
    """
    if visibility == Visibility():
        return visibility
    ids = visibility.segment_ids
    query = _segments(context, None if ids is None else ids.query, visibility.query_lengths, batch, num_queries)
    key = _segments(context, None if ids is None else ids.key_value, visibility.key_lengths, batch, num_keys)
    return Visibility(segment_ids=SegmentIds(query, key))


def _segments(
    context: ContextParallelism, ids: jax.Array | None, lengths: jax.Array | None, batch: Sequence[int], length: int
) -> jax.Array:
    if ids is None:
        ids = jnp.ones((*batch, length), jnp.int32)
    if lengths is None:
        return ids
    return jnp.where(sequence_positions(context, length) < lengths[..., None], ids, 0)


def sequence_positions(context: ContextParallelism | None, length: int) -> jax.Array:
    """Position of each place of the sequence.

    Args:
      context: How it is split, or None.
      length: Of the sequence; of the shard's part inside ``shard_map``.

    Returns:
      int32 [length].

    Raises:
      ValueError: If the order cannot be told, or does not fit the length.
    """
    if context is None:
        return jnp.arange(length, dtype=jnp.int32)
    types = axis_types()
    if types.get(context.axis) == AxisType.Manual:
        return positions(context.order, length, lax.axis_index(context.axis), lax.axis_size(context.axis))
    if context.order == "contiguous":
        return jnp.arange(length, dtype=jnp.int32)
    shards = jax.sharding.get_abstract_mesh().shape[context.axis]
    if length % (2 * shards):
        raise ValueError(
            f"context_order: expected a length that is a multiple of {2 * shards}, twice the shards of mesh axis "
            f"{context.axis!r}, got {length}"
        )
    return jnp.asarray(zigzag_order(length, shards))
