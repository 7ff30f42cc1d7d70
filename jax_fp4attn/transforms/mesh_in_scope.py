"""The mesh of ``jax.set_mesh`` for programs none of whose arguments is on it.

``custom_partitioning`` learns the mesh from arguments and results that are on one. Where there are none, such as of
NumPy arrays, it gives no mesh, and shardings that know devices and parts of arrays, but no axes.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec


def concrete_mesh(scope: AbstractMesh, arguments: Sequence[Any]) -> Mesh | None:
    """The mesh in scope over the devices that arguments are on.

    Args:
      scope: Mesh in scope when the call was traced.
      arguments: Shapes with shardings.

    Returns:
      The mesh; None if there is no mesh in scope, or it is not over all of these devices.
    """
    shardings = [(x.sharding, x.shape) for x in arguments if x.sharding is not None]
    if scope.empty or not shardings:
        return None
    sharding, shape = shardings[0]
    devices = list(sharding.devices_indices_map(shape))  # In the order of the program's devices, which is the mesh's.
    return Mesh(np.array(devices).reshape(scope.axis_sizes), scope.axis_names) if len(devices) == scope.size else None


def spec_of(argument: Any, mesh: jax.sharding.Mesh) -> PartitionSpec:
    """How an argument lies on a mesh.

    Args:
      argument: Shape with a sharding.
      mesh: Over the devices of the sharding, or an empty one.

    Returns:
      Axes of each dimension, those with the longest parts first.
    """
    sharding = argument.sharding
    if isinstance(sharding, NamedSharding):
        return sharding.spec
    if sharding is None or mesh.empty:
        return PartitionSpec()
    parts = sharding.devices_indices_map(argument.shape)
    return PartitionSpec(*(_axes(mesh, parts, dimension) for dimension in range(len(argument.shape))))


def _axes(mesh: jax.sharding.Mesh, parts: Any, dimension: int) -> tuple[str, ...] | None:
    """The mesh axes along which the parts of a dimension start elsewhere."""
    starts = np.array([parts[device][dimension].start or 0 for device in mesh.devices.flat])
    starts = starts.reshape(mesh.devices.shape)
    steps = {}
    for i, name in enumerate(mesh.axis_names):
        if starts.shape[i] > 1:
            first, second = (np.take(starts, place, axis=i).flat[0] for place in (0, 1))
            steps[name] = second - first
    return tuple(sorted((name for name, step in steps.items() if step), key=lambda name: -steps[name])) or None
