"""Automatic meshes: ``custom_partitioning`` with an enforced sharding of every operand and result."""

import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_fp4attn.transforms.operation import Call
from jax_fp4attn.transforms.sharding import make_plan, run_shard

Shapes = tuple[jax.ShapeDtypeStruct, ...]


def run_automatic(call: Call, leaves: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Runs a call under ``custom_partitioning``."""
    return _partitioned(call, tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves))(*leaves)


@functools.lru_cache(maxsize=1024)
def _partitioned(call: Call, shapes: Shapes) -> Callable[..., tuple[jax.Array, ...]]:
    layouts = call.argument_layouts(shapes)
    result_layouts = call.result_layouts(call.result_shapes(shapes))

    # The jit keeps array constants of the operation inside it; custom_partitioning cannot hold any.
    function = custom_partitioning(jax.jit(call))

    def partition(mesh: Mesh, arguments: Any, results: Any) -> Any:
        del results
        plan = make_plan(call, shapes, tuple(_spec(x) for x in arguments), mesh.shape)

        def shardings(layouts: Iterable[str]) -> tuple[NamedSharding, ...]:
            return tuple(NamedSharding(mesh, plan.spec(layout)) for layout in layouts)

        def lowered(*shards: jax.Array) -> tuple[jax.Array, ...]:
            return run_shard(call, plan, layouts, result_layouts, shards)

        # What the callback returns is what the partitioner makes true: a dimension that a caller sharded and the
        # operation needs whole is gathered here. The rule below alone would not do it.
        return mesh, lowered, shardings(result_layouts), shardings(layouts)

    def rule(mesh: Mesh, value_types: Any, result_types: Any) -> tuple[str, dict[str, Any]]:
        del value_types, result_types
        sizes = {d: n for x, layout in zip(shapes, layouts, strict=True) for d, n in zip(layout, x.shape, strict=True)}
        return sharding_rule(layouts, result_layouts, sizes.get("n", 1), sizes.get("k", 1), mesh.shape.values())

    function.def_partition(partition=partition, sharding_rule=rule)
    return function


def _spec(argument: Any) -> PartitionSpec:
    # A sharding that does not come from a mesh has no specification; the operand is then gathered.
    spec = getattr(argument.sharding, "spec", None)
    return spec if spec is not None else PartitionSpec()


def sharding_rule(
    layouts: tuple[str, ...],
    result_layouts: tuple[str, ...],
    num_heads: int,
    num_kv_heads: int,
    mesh_axis_sizes: Iterable[int],
) -> tuple[str, dict[str, Any]]:
    """The Shardy rule of a call, which steers how shardings propagate through it.

    Batch and head factors are shared by all operands; every other dimension is a factor of its own that asks to be
    whole. Multi-head: query and key/value heads are one factor. Grouped-query: query heads are the compound ``(k g)``,
    but only if every mesh axis divides K, since the compiler may otherwise split an axis into parts that no
    specification can name. Else, and for multi-query, they are separate factors.

    Args:
      layouts: Layouts of the operands.
      result_layouts: Layouts of the results.
      num_heads: N.
      num_kv_heads: K.
      mesh_axis_sizes: Sizes of the mesh axes.

    Returns:
      The rule and its keyword arguments.

    Example:
      >>> sharding_rule(("b*n", "b*k"), ("bn",), 8, 2, [2])
      ('b x0 (k g), b x1 k -> b (k g)', {'g': 4, 'need_replication_factors': ('x0', 'g', 'x1')})
    """
    groups, rest = divmod(num_heads, num_kv_heads)
    factors = {"b": "b", "n": "n", "k": "k", "K": "k"}
    whole = {"k"}
    options: dict[str, Any] = {}
    if num_heads == num_kv_heads:
        factors["n"], whole = "k", set()
    elif num_kv_heads > 1 and rest == 0 and all(num_kv_heads % size == 0 for size in mesh_axis_sizes):
        factors["n"], whole = "(k g)", {"g"}
        options["g"] = groups
    counter = itertools.count()
    seen: list[str] = []

    def render(layout: str) -> str:
        tokens = [factors[d] if d in factors else f"x{next(counter)}" for d in layout]
        for token in tokens:
            seen.extend(name for name in token.strip("()").split() if name not in seen)
        return " ".join(tokens)

    operands = ", ".join(render(layout) for layout in layouts)
    results = ", ".join(render(layout) for layout in result_layouts)
    # The verifier wants these in order of first appearance.
    options["need_replication_factors"] = tuple(name for name in seen if name in whole or name.startswith("x"))
    return f"{operands} -> {results}", options
