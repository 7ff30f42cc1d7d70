"""Which parameter is split how: fully sharded over `data`, tensor parallel over `model`.

A parameter is stored split over both axes, and so is the optimiser state that belongs to it. For a step it is gathered
along `data`, along which it meets the batch, and stays split over `model`.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from examples.language_model.meshes import DATA, MODEL

Tree = TypeVar("Tree")

# The end of a parameter's path, and the axis that splits each of its dimensions.
RULES: dict[str, tuple[str | None, ...]] = {
    "embedding/embedding": (MODEL, DATA),
    "query/kernel": (DATA, MODEL, None),
    "key/kernel": (DATA, MODEL, None),
    "value/kernel": (DATA, MODEL, None),
    "out/kernel": (MODEL, None, DATA),
    "gate/kernel": (DATA, MODEL),
    "up/kernel": (DATA, MODEL),
    "down/kernel": (MODEL, DATA),
    "head/kernel": (DATA, MODEL),
    # A few hundred bytes each: not worth a gather.
    "norm/scale": (None,),
}


def stored_spec(path: str, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    """How a parameter, or optimiser state of its shape, is stored.

    Args:
      path: Names from the root to the array, with slashes between.
      shape: Of the array.
      mesh: The mesh.

    Returns:
      The specification. An axis that does not divide its dimension is left out: key and value heads stay whole where
      they are fewer than the shards.

    Raises:
      ValueError: If there is no rule for the array.
    """
    if not shape:
        return PartitionSpec()
    for suffix, axes in RULES.items():
        if path.endswith(suffix):
            sizes = zip(axes, shape, strict=True)
            return PartitionSpec(*(a if a is not None and size % mesh.shape[a] == 0 else None for a, size in sizes))
    raise ValueError(f"{path}: no rule says how to split it; add one to RULES")


def computing_spec(spec: PartitionSpec) -> PartitionSpec:
    """How a parameter that is stored in this way is split in a step: gathered along the data axis."""
    return PartitionSpec(*(None if axis == DATA else axis for axis in spec))


def stored_shardings(tree: Tree, mesh: Mesh) -> Tree:
    """Shardings of parameters and optimiser state.

    Args:
      tree: Arrays or their shapes; the names in it say what they are.
      mesh: The mesh.

    Returns:
      A sharding for each array.
    """

    def sharding(path: Any, x: Any) -> NamedSharding:
        # The state of an NNX module has a variable around each array, which is one more step of the path.
        name = jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value")
        return NamedSharding(mesh, stored_spec(name, x.shape, mesh))

    return jax.tree_util.tree_map_with_path(sharding, tree)


def computing_shardings(stored: Tree) -> Tree:
    """Shardings in a step, from those of :func:`stored_shardings`."""
    return jax.tree.map(lambda sharding: NamedSharding(sharding.mesh, computing_spec(sharding.spec)), stored)


def create_sharded(create: Callable[[], Tree], mesh: Mesh) -> Tree:
    """Makes parameters and optimiser state, of which each device makes its own part alone.

    Args:
      create: Makes them, without regard to the mesh.
      mesh: The mesh.

    Returns:
      The same values, split.
    """
    return jax.jit(create, out_shardings=stored_shardings(jax.eval_shape(create), mesh))()
