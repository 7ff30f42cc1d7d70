"""What the type of an array says of its sharding, and how a cotangent gets the type of its primal."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, PartitionSpec


@dataclasses.dataclass(frozen=True)
class ArrayType:
    """Dtype and sharding of an array, as far as they are part of its type.

    Attributes:
      dtype: Its dtype.
      spec: Its specification on an Explicit mesh, None elsewhere.
      varying: The manual mesh axes over which it varies; empty outside ``shard_map``.
    """

    dtype: jnp.dtype
    spec: PartitionSpec | None
    varying: frozenset[str]

    def cast(self, x: jax.Array) -> jax.Array:
        """Gives an array this dtype and specification."""
        x = x.astype(self.dtype)
        return x if self.spec is None else jax.sharding.reshard(x, self.spec)

    def row_type(self, dtype: jnp.dtype) -> "ArrayType":
        """The type of an array [B, T, N] beside this one, [B, T, N, H]."""
        spec = None if self.spec is None else PartitionSpec(*self.spec[:3])
        return ArrayType(dtype, spec, self.varying)

    def cotangent(self, x: jax.Array) -> jax.Array:
        """Gives a cotangent the type of its primal; where shards share the primal, theirs are summed."""
        extra = varying_axes(x) - self.varying
        return self.cast(lax.psum(x.astype(jnp.float32), tuple(sorted(extra))) if extra else x)


def type_of(x: jax.Array) -> ArrayType:
    """The type of an array.

    Args:
      x: The array.

    Returns:
      Its type.
    """
    return ArrayType(x.dtype, explicit_spec(x), varying_axes(x))


def explicit_spec(x: jax.Array) -> PartitionSpec | None:
    """The specification that is part of an array's type, or None off Explicit meshes."""
    sharding = jax.typeof(x).sharding
    if sharding is None or sharding.mesh.empty or AxisType.Explicit not in sharding.mesh.axis_types:
        return None
    spec: PartitionSpec = sharding.spec
    return spec


def varying_axes(x: jax.Array) -> frozenset[str]:
    """The manual mesh axes over which an array varies by its type."""
    kind = jax.typeof(x)
    # The attribute has another name in JAX before 0.10.
    axes: frozenset[str] = kind.manual_axis_type.varying if hasattr(kind, "manual_axis_type") else kind.vma
    return axes
