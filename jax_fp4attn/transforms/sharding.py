"""Which mesh axes an operation may keep, and the specification of every operand and result that follows."""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jax_fp4attn.transforms.operation import Call

AxisNames = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Plan:
    """How one call is split over a mesh.

    Attributes:
      batch: Mesh axes that split the batch.
      heads: Mesh axes that split the query heads.
      kv_heads: Mesh axes that split the key/value heads: those of the query heads, or none.
      heads_per_slice: When query heads are split into more parts than there are key/value heads, the number of parts
        that share a key/value head; each shard then picks its head from an unsplit operand. Otherwise 0.
      sequence: The mesh axis that splits the sequence, or none.
      mapped: Mesh axes that split the mapped dimension.
    """

    batch: AxisNames
    heads: AxisNames
    kv_heads: AxisNames
    heads_per_slice: int
    sequence: AxisNames = ()
    mapped: AxisNames = ()

    def spec(self, layout: str) -> PartitionSpec:
        """Specification of an array of this layout."""
        kv_heads = {"k": self.kv_heads, "K": self.kv_heads}
        axes = {"v": self.mapped, "b": self.batch, "n": self.heads, "s": self.sequence} | kv_heads
        return PartitionSpec(*(axes.get(dimension) or None for dimension in layout))


def axis_names(entry: Any) -> AxisNames:
    """One entry of a PartitionSpec as a tuple of mesh axes."""
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def spec_entries(spec: PartitionSpec, rank: int) -> tuple[AxisNames, ...]:
    """The entries of a specification, padded to the rank."""
    entries = tuple(axis_names(entry) for entry in spec)
    return entries + ((),) * (rank - len(entries))


def make_plan(
    call: Call,
    leaves: tuple[Any, ...],
    specs: tuple[PartitionSpec, ...],
    mesh_shape: Mapping[str, int],
) -> Plan:
    """Keeps the batch axes and the head axes of the operands where the operation allows it.

    Args:
      call: The operation.
      leaves: Its flat arguments (shapes are enough), with global shapes.
      specs: Their specifications.
      mesh_shape: Size of each mesh axis.

    Returns:
      The plan. Axes on any other dimension are dropped: the operand is gathered along them.

    Raises:
      ValueError: If the sequence axis does not divide the sequence.
    """
    layouts = call.argument_layouts(leaves)
    mapped: AxisNames = ()
    batch: AxisNames = ()
    heads: AxisNames = ()
    kv_heads: AxisNames = ()
    sizes: dict[str, int] = {}
    for x, layout, spec in zip(leaves, layouts, specs, strict=True):
        for dimension, size, axes in zip(layout, x.shape, spec_entries(spec, len(layout)), strict=True):
            sizes.setdefault(dimension, size)
            if dimension == "v":
                mapped = mapped or axes
            elif dimension == "b":
                batch = batch or axes
            elif dimension == "n":
                heads = heads or axes
            elif dimension == "k":
                kv_heads = kv_heads or axes
    heads = heads or kv_heads
    sequence: AxisNames = ()
    if call.sequence_axis is not None and call.sequence_axis in mesh_shape:
        sequence = (call.sequence_axis,)
        _check_sequence(call.sequence_axis, layouts, leaves, mesh_shape)
        mapped, heads = (tuple(axis for axis in axes if axis not in sequence) for axes in (mapped, heads))
    batch = tuple(axis for axis in batch if axis not in (*sequence, *mapped))
    results = call.result_shapes(leaves)
    sums_batch = any("B" in layout for layout in call.result_layouts(results))
    if sums_batch and sizes["b"] % _size(batch, mesh_shape):
        batch = ()  # The rows that pad the last shard must not enter a sum.
    heads = tuple(axis for axis in heads if axis not in (*mapped, *batch))
    parts, num_heads, num_kv_heads = _size(heads, mesh_shape), sizes.get("n"), sizes.get("k")
    if num_heads is None or num_kv_heads is None or num_heads % parts:
        return Plan(batch, (), (), 0, sequence, mapped)
    if num_kv_heads % parts == 0:
        return Plan(batch, heads, heads, 0, sequence, mapped)
    if parts % num_kv_heads == 0:
        return Plan(batch, heads, (), parts // num_kv_heads, sequence, mapped)
    return Plan(batch, (), (), 0, sequence, mapped)


def _check_sequence(
    axis: str, layouts: tuple[str, ...], leaves: tuple[Any, ...], mesh_shape: Mapping[str, int]
) -> None:
    for x, layout in zip(leaves, layouts, strict=True):
        for dimension, size in zip(layout, x.shape, strict=True):
            if dimension == "s" and size % mesh_shape[axis]:
                raise ValueError(
                    f"context_axis: expected a sequence that the {mesh_shape[axis]} shards of mesh axis {axis!r} "
                    f"divide, got a dimension of {size} in an operand of shape {x.shape}; pad the sequence"
                )


def check_sequence_axis(axis: str, mesh_axes: Iterable[str]) -> None:
    """Checks that a mesh has the axis over which the sequence is to be split.

    Args:
      axis: Its name.
      mesh_axes: Names of the mesh's axes.

    Raises:
      ValueError: If it has not.
    """
    names = tuple(mesh_axes)
    if axis not in names:
        raise ValueError(
            f"context_axis: expected one of the mesh axes {names}, got {axis!r}; name the axis over which the sequence "
            "is split, or leave context_axis out"
        )


def run_shard(
    call: Call,
    plan: Plan,
    layouts: tuple[str, ...],
    result_layouts: tuple[str, ...],
    leaves: tuple[jax.Array, ...],
) -> tuple[jax.Array, ...]:
    """The operation on one shard: picks its key/value head if shards outnumber them, and sums partial results.

    Args:
      call: The operation.
      plan: How it is split.
      layouts: Layouts of the arguments, from their global shapes.
      result_layouts: Layouts of the results, from their global shapes.
      leaves: The shard's arguments.

    Returns:
      The shard's results.
    """
    num_kv_heads = _kv_heads(layouts, leaves)
    # A result with plain key/value heads (quantised keys) is computed whole on every shard instead.
    slices = plan.heads_per_slice > 0 and not any("k" in layout for layout in result_layouts)
    if slices:
        head = lax.axis_index(plan.heads) // plan.heads_per_slice
        leaves = tuple(
            lax.dynamic_slice_in_dim(x, head, 1, layout.index("k")) if "k" in layout else x
            for x, layout in zip(leaves, layouts, strict=True)
        )
    results = call.on_shard(*leaves)
    return tuple(
        _complete(plan, x, layout, head if slices and "K" in layout else None, num_kv_heads)
        for x, layout in zip(results, result_layouts, strict=True)
    )


def _complete(plan: Plan, x: jax.Array, layout: str, head: jax.Array | None, num_kv_heads: int) -> jax.Array:
    axes: AxisNames = ()
    if head is not None:
        dimension = layout.index("K")
        shape = (*x.shape[:dimension], num_kv_heads, *x.shape[dimension + 1 :])
        x = lax.dynamic_update_slice_in_dim(jnp.zeros(shape, x.dtype), x, head, dimension)
        axes += plan.heads
    if "B" in layout:
        axes += plan.batch
    if "N" in layout:
        axes += plan.heads
    # Summed in float32, whatever the shards' parts are rounded to.
    return lax.psum(x.astype(jnp.float32), axes).astype(x.dtype) if axes else x


def _kv_heads(layouts: tuple[str, ...], leaves: tuple[jax.Array, ...]) -> int:
    for x, layout in zip(leaves, layouts, strict=True):
        if "k" in layout:
            return x.shape[layout.index("k")]
    return 0


def _size(axes: AxisNames, mesh_shape: Mapping[str, int]) -> int:
    return math.prod(mesh_shape[axis] for axis in axes)
