"""The way a call takes, by the types of the mesh axes in scope."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType, PartitionSpec

from jax_fp4attn.transforms.automatic import run_automatic
from jax_fp4attn.transforms.operation import Call
from jax_fp4attn.transforms.sharding import check_sequence_axis, make_plan, run_shard, spec_entries


def route(call: Call, leaves: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Runs a call where it stands.

    Explicit axes are entered by ``shard_map``. Inside a ``shard_map`` the call is local already: axes that are still
    automatic there are left to the compiler, since ``custom_partitioning`` cannot be used under partly manual axes.
    Elsewhere ``custom_partitioning`` fixes the sharding, unless the process has one device or does not compile.
    """
    types = axis_types()
    if call.sequence_axis is not None and types:
        _check_sequence_axis_type(call.sequence_axis, types)
    explicit = frozenset(name for name, kind in types.items() if kind == AxisType.Explicit)
    if explicit:
        return _explicit(call, leaves, explicit)
    if AxisType.Manual in types.values():
        return call.on_shard(*leaves)
    uncompiled = jax.config.jax_disable_jit  # type: ignore[attr-defined]
    if uncompiled and call.sequence_axis is not None:
        raise NotImplementedError(
            f"context_axis: under jax.disable_jit the sequence cannot be split over mesh axis {call.sequence_axis!r}; "
            "compile, or call inside jax.shard_map"
        )
    if jax.device_count() == 1 or uncompiled:
        return call(*leaves)
    return run_automatic(call, leaves)


def axis_types() -> dict[str, AxisType]:
    """Name and type of every axis of the mesh in scope."""
    mesh = jax.sharding.get_abstract_mesh()
    return {} if mesh.empty else dict(zip(mesh.axis_names, mesh.axis_types, strict=True))


def _check_sequence_axis_type(axis: str, types: dict[str, AxisType]) -> None:
    check_sequence_axis(axis, types)
    if types[axis] != AxisType.Auto:
        return
    manual = [name for name, kind in types.items() if kind == AxisType.Manual]
    if manual:
        raise NotImplementedError(
            f"context_axis: mesh axis {axis!r} is automatic inside a shard_map over {manual}; add it to that "
            "shard_map's axis_names, with the sequence split in its in_specs"
        )
    explicit = [name for name, kind in types.items() if kind == AxisType.Explicit]
    if explicit:
        raise NotImplementedError(
            f"context_axis: mesh axis {axis!r} is automatic and {explicit} Explicit; make {axis!r} Explicit too, or "
            f"call inside jax.shard_map over {axis!r}"
        )


def _explicit(call: Call, leaves: tuple[jax.Array, ...], axes: frozenset[str]) -> tuple[jax.Array, ...]:
    specs = tuple(jax.typeof(x).sharding.spec for x in leaves)
    layouts = call.argument_layouts(leaves)
    for x, layout, spec in zip(leaves, layouts, specs, strict=True):
        _check_explicit(call.sequence_axis, x.shape, layout, spec)
    mesh_shape = jax.sharding.get_abstract_mesh().shape
    # By default shard_map leaves out the axes that an enclosing vmap splits; naming all must not bring them back.
    names: dict[str, Any] = {} if axes == set(mesh_shape) else {"axis_names": axes}
    plan = make_plan(call, leaves, specs, {axis: size for axis, size in mesh_shape.items() if axis in axes})
    in_specs = tuple(plan.spec(layout) for layout in layouts)
    result_layouts = call.result_layouts(call.result_shapes(leaves))
    out_specs = tuple(plan.spec(layout) for layout in result_layouts)
    resharded = (jax.sharding.reshard(x, spec) for x, spec in zip(leaves, in_specs, strict=True))
    run: Callable[..., tuple[jax.Array, ...]] = jax.shard_map(
        lambda *shards: run_shard(call, plan, layouts, result_layouts, shards),
        in_specs=in_specs,
        out_specs=out_specs,
        **names,
    )
    return run(*resharded)


def _check_explicit(sequence_axis: str | None, shape: tuple[int, ...], layout: str, spec: PartitionSpec) -> None:
    for position, (dimension, axes) in enumerate(zip(layout, spec_entries(spec, len(layout)), strict=True)):
        if axes and (dimension == "*" or (dimension == "s" and axes != (sequence_axis,))):
            raise ValueError(
                f"attention: dimension {position} of an operand of shape {shape} is sharded over mesh axes {axes}; on "
                "an Explicit mesh only batch and heads may be, and the sequence over context_axis. Reshard query, key "
                "and value first: jax.sharding.reshard(x, PartitionSpec(batch_axes, None, head_axes, None)), or pass "
                "context_axis"
            )
        if sequence_axis in axes and dimension != "s":
            raise ValueError(
                f"context_axis: mesh axis {sequence_axis!r} already shards dimension {position} of an operand of shape "
                f"{shape}; shard the sequence over it instead: jax.sharding.reshard(x, PartitionSpec(batch_axes, "
                f"{sequence_axis!r}, head_axes, None))"
            )
