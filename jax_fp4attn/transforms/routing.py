"""The way a call takes, by the types of the mesh axes in scope."""

from collections.abc import Callable

import jax
from jax.sharding import AxisType, PartitionSpec

from jax_fp4attn.transforms.automatic import run_automatic
from jax_fp4attn.transforms.operation import Call
from jax_fp4attn.transforms.sharding import make_plan, run_shard, spec_entries


def route(call: Call, leaves: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Runs a call where it stands.

    Explicit axes are entered by ``shard_map``. Inside a ``shard_map`` the call is local already: axes that are still
    automatic there are left to the compiler, since ``custom_partitioning`` cannot be used under partly manual axes.
    Elsewhere ``custom_partitioning`` fixes the sharding, unless the process has one device or does not compile.
    """
    mesh = jax.sharding.get_abstract_mesh()
    types = {} if mesh.empty else dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    explicit = frozenset(name for name, kind in types.items() if kind == AxisType.Explicit)
    if explicit:
        return _explicit(call, leaves, mesh, explicit)
    uncompiled = jax.config.jax_disable_jit  # type: ignore[attr-defined]
    if AxisType.Manual in types.values() or jax.device_count() == 1 or uncompiled:
        return call(*leaves)
    return run_automatic(call, leaves)


def _explicit(
    call: Call, leaves: tuple[jax.Array, ...], mesh: jax.sharding.AbstractMesh, axes: frozenset[str]
) -> tuple[jax.Array, ...]:
    specs = tuple(jax.typeof(x).sharding.spec for x in leaves)
    layouts = call.argument_layouts(leaves)
    for x, layout, spec in zip(leaves, layouts, specs, strict=True):
        _check_explicit(x.shape, layout, spec)
    sizes = {axis: size for axis, size in mesh.shape.items() if axis in axes}
    plan = make_plan(call, leaves, specs, sizes)
    in_specs = tuple(plan.spec(layout) for layout in layouts)
    result_layouts = call.result_layouts(call.result_shapes(leaves))
    out_specs = tuple(plan.spec(layout) for layout in result_layouts)
    resharded = (jax.sharding.reshard(x, spec) for x, spec in zip(leaves, in_specs, strict=True))
    run: Callable[..., tuple[jax.Array, ...]] = jax.shard_map(
        lambda *shards: run_shard(call, plan, layouts, result_layouts, shards),
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=axes,
    )
    return run(*resharded)


def _check_explicit(shape: tuple[int, ...], layout: str, spec: PartitionSpec) -> None:
    for position, (dimension, axes) in enumerate(zip(layout, spec_entries(spec, len(layout)), strict=True)):
        if axes and dimension == "*":
            raise ValueError(
                f"attention: dimension {position} of an operand of shape {shape} is sharded over mesh axes {axes}; on "
                "an Explicit mesh only batch and heads may be. Reshard query, key and value first: "
                "jax.sharding.reshard(x, PartitionSpec(batch_axes, None, head_axes, None))"
            )


def explicit_spec(x: jax.Array) -> PartitionSpec | None:
    """The specification that is part of an array's type, or None off Explicit meshes."""
    sharding = jax.typeof(x).sharding
    if sharding is None or sharding.mesh.empty or AxisType.Explicit not in sharding.mesh.axis_types:
        return None
    spec: PartitionSpec = sharding.spec
    return spec


def match_spec(x: jax.Array, spec: PartitionSpec | None) -> jax.Array:
    """Reshards ``x`` to a specification from :func:`explicit_spec`; a cotangent must have its primal's."""
    return x if spec is None else jax.sharding.reshard(x, spec)
