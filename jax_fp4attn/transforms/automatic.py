"""Automatic meshes: ``custom_partitioning`` with an enforced sharding of every operand and result."""

import functools
import hashlib
import itertools
import math
import re
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.extend
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from jax_fp4attn.transforms.mesh_in_scope import concrete_mesh, spec_of
from jax_fp4attn.transforms.operation import Call
from jax_fp4attn.transforms.sharding import check_sequence_axis, make_plan, run_shard

Shapes = tuple[jax.ShapeDtypeStruct, ...]


def run_automatic(call: Call, leaves: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Runs a call under ``custom_partitioning``.

    Raises:
      NotImplementedError: Under GSPMD, whose partitioner ends the process at a call without a rule of its own.
    """
    if not getattr(jax.config, "jax_use_shardy_partitioner", True):
        raise NotImplementedError(
            "attention: jax_use_shardy_partitioner is off, and calls are split by Shardy's rules; turn it on, or call "
            "inside jax.shard_map"
        )
    shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves)
    return _partitioned(call, shapes, jax.sharding.get_abstract_mesh())(*leaves)


@functools.lru_cache(maxsize=1024)
def _partitioned(call: Call, shapes: Shapes, scope: AbstractMesh) -> Callable[..., tuple[jax.Array, ...]]:
    layouts = call.argument_layouts(shapes)
    result_layouts = call.result_layouts(call.result_shapes(shapes))

    # The jit keeps array constants of the operation inside it; custom_partitioning cannot hold any.
    whole = jax.jit(call)
    function = custom_partitioning(whole)

    def partition(mesh: Mesh, arguments: Any, results: Any) -> Any:
        del results
        if mesh.empty:
            mesh = concrete_mesh(scope, arguments) or mesh
        if call.sequence_axis is not None:
            check_sequence_axis(call.sequence_axis, mesh.axis_names)
        plan = make_plan(call, shapes, tuple(spec_of(x, mesh) for x in arguments), mesh.shape)

        def shardings(layouts: Iterable[str]) -> tuple[NamedSharding, ...]:
            return tuple(NamedSharding(mesh, plan.spec(layout)) for layout in layouts)

        def lowered(*shards: jax.Array) -> tuple[jax.Array, ...]:
            return run_shard(call, plan, layouts, result_layouts, shards)

        # What the callback returns is what the partitioner makes true: a dimension that a caller sharded and the
        # operation needs whole is gathered here. The rule below alone would not do it.
        return mesh, lowered, shardings(result_layouts), shardings(layouts)

    def rule(mesh: Mesh, value_types: Any, result_types: Any) -> tuple[str, dict[str, Any]]:
        del value_types, result_types
        sizes = scope.axis_sizes if mesh.empty else mesh.shape.values()
        results = jax.tree.leaves(call.result_shapes(shapes))
        operands = tuple(zip(layouts, (x.shape for x in shapes), strict=True))
        return sharding_rule(operands, tuple(zip(result_layouts, (x.shape for x in results), strict=True)), sizes)

    function.def_partition(partition=partition, sharding_rule=rule)

    def named(*leaves: jax.Array) -> tuple[jax.Array, ...]:
        results: tuple[jax.Array, ...] = function(*leaves)
        return results

    # The custom call shows shapes and a pointer, nothing else. Where the persistent compilation cache leaves the
    # pointer out, only the name of the function around it keeps a call from getting the program of another.
    named.__name__ = f"{call.operation.name}_{_digest(call, scope, whole.trace(*shapes).jaxpr)}"
    return jax.jit(named)


def _digest(call: Call, scope: AbstractMesh, jaxpr: jax.extend.core.ClosedJaxpr) -> str:
    """Names what a call computes, alike in every process."""
    content = hashlib.sha256(repr((call.static, call.sequence_axis, scope.axis_names, scope.axis_sizes)).encode())
    content.update(re.sub(r"0x[0-9a-f]+", "", str(jaxpr)).encode())  # Without addresses of Python's functions.
    for constant in jaxpr.consts:
        content.update(np.asarray(constant).tobytes())
    return content.hexdigest()[:16]


LaidOutShape = tuple[str, tuple[int, ...]]


def sharding_rule(
    operands: tuple[LaidOutShape, ...], results: tuple[LaidOutShape, ...], mesh_axis_sizes: Iterable[int]
) -> tuple[str, dict[str, Any]]:
    """The Shardy rule of a call, which steers how shardings propagate through it.

    Batch, head and sequence factors are shared by all arrays; every other dimension is a factor of its own that asks to
    be whole. Multi-head: query and key/value heads are one factor. Grouped-query: query heads are the compound
    ``(k g)``, but only if every mesh axis divides K, since the compiler may otherwise split an axis into parts that no
    specification can name. Else, and for multi-query, they are separate factors. Sequence dimensions of different sizes
    (codes are packed, scales stand for blocks) are compounds of a common factor and a remainder.

    Args:
      operands: Layout and shape of each.
      results: Layout and shape of each.
      mesh_axis_sizes: Sizes of the mesh axes.

    Returns:
      The rule and its keyword arguments.

    Example:
      >>> sharding_rule((("b*n", (2, 5, 8)), ("b*k", (2, 5, 2))), (("bn", (2, 8)),), [2])
      ('b x0 (k g), b x1 k -> b (k g)', {'g': 4, 'need_replication_factors': ('x0', 'g', 'x1')})
    """
    sizes = [item for array in operands + results for item in zip(*array, strict=True)]
    factors, options = _head_factors(dict(reversed(sizes)), tuple(mesh_axis_sizes))
    common = math.gcd(*(size for dimension, size in sizes if dimension == "s"))
    counter = itertools.count()
    shared = {"v", "b", "n", "s"} | ({"k"} if factors["n"] != "n" else set())
    seen: list[str] = []

    def token(dimension: str, size: int) -> str:
        if dimension == "s" and common == 1:
            return f"x{next(counter)}"
        if dimension == "s" and size > common:
            name = f"r{next(counter)}"
            options[name] = size // common
            return f"(s {name})"
        return factors.get(dimension) or f"x{next(counter)}"

    def render(array: LaidOutShape) -> str:
        tokens = [token(dimension, size) for dimension, size in zip(*array, strict=True)]
        for text in tokens:
            seen.extend(name for name in text.strip("()").split() if name not in seen)
        return " ".join(tokens)

    rule = f"{', '.join(map(render, operands))} -> {', '.join(map(render, results))}"
    if common > 1 and all(size > common for dimension, size in sizes if dimension == "s"):
        options["s"] = common
    # The verifier wants these in order of first appearance.
    options["need_replication_factors"] = tuple(name for name in seen if name not in shared)
    return rule, options


def _head_factors(sizes: dict[str, int], mesh_axis_sizes: tuple[int, ...]) -> tuple[dict[str, str], dict[str, Any]]:
    """Factors of batch, heads and sequence, and the sizes of those inside compounds."""
    num_heads, num_kv_heads = sizes.get("n", 1), sizes.get("k", 1)
    factors = {"v": "v", "b": "b", "s": "s", "n": "n", "k": "k", "K": "k"}
    groups, rest = divmod(num_heads, num_kv_heads)
    if num_heads == num_kv_heads:
        return factors | {"n": "k"}, {}
    if num_kv_heads > 1 and rest == 0 and all(num_kv_heads % size == 0 for size in mesh_axis_sizes):
        return factors | {"n": "(k g)"}, {"g": groups}
    return factors, {}
