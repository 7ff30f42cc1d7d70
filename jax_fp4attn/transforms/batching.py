"""The vmap rule: a mapped axis joins the batch dimension."""

import functools
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp

from jax_fp4attn.transforms.operation import Call, Operation
from jax_fp4attn.transforms.routing import route


def apply(operation: Operation, static: Hashable, *arguments: Any, sequence_axis: str | None = None) -> Any:
    """Runs an operation under whatever transformations are active.

    Args:
      operation: The operation.
      static: Its static arguments, hashable.
      *arguments: Its array arguments, pytrees.
      sequence_axis: The mesh axis over which the sequence is split, or None.

    Returns:
      The operation's results.
    """
    leaves, structure = jax.tree.flatten(arguments)
    call = Call(operation, static, structure, sequence_axis)
    results = _batchable(call)(*leaves)
    return jax.tree.unflatten(jax.tree.structure(call.result_shapes(tuple(leaves))), results)


@functools.lru_cache(maxsize=1024)
def _batchable(call: Call) -> Callable[..., tuple[jax.Array, ...]]:
    function = jax.custom_batching.custom_vmap(lambda *leaves: route(call, leaves))

    @function.def_vmap
    def rule(axis_size: int, mapped: list[bool], *leaves: jax.Array) -> tuple[tuple[jax.Array, ...], tuple[bool, ...]]:
        return _run_mapped(call, axis_size, tuple(mapped), leaves)

    return function


def _run_mapped(
    call: Call, axis_size: int, mapped: tuple[bool, ...], leaves: tuple[jax.Array, ...]
) -> tuple[tuple[jax.Array, ...], tuple[bool, ...]]:
    unmapped = tuple(
        jax.ShapeDtypeStruct(x.shape[1:] if is_mapped else x.shape, x.dtype)
        for x, is_mapped in zip(leaves, mapped, strict=True)
    )
    layouts = call.argument_layouts(unmapped)
    batch = next(x.shape[0] for x, layout in zip(unmapped, layouts, strict=True) if layout[0] == "b")
    results = call.result_shapes(unmapped)
    summed = any(layout[0] == "B" for layout in call.result_layouts(results))
    # The batch stays the slower dimension: if it is sharded, its shards stay contiguous in the joined one.
    joined = []
    for x, shape, is_mapped, layout in zip(leaves, unmapped, mapped, layouts, strict=True):
        if not is_mapped and layout[0] != "b" and not summed:
            joined.append(x)  # Broadcast along the batch, and still broadcast along the longer one.
            continue
        x = jnp.swapaxes(x, 0, 1) if is_mapped else x[:, None]
        x = jnp.broadcast_to(x, (batch, axis_size, *shape.shape[1:]))
        joined.append(x.reshape(batch * axis_size, *shape.shape[1:]))
    outputs = _batchable(call)(*joined)
    split = []
    for x, result in zip(outputs, jax.tree.leaves(results), strict=True):
        x = jnp.swapaxes(x.reshape(-1, axis_size, *x.shape[1:]), 0, 1)
        # A result that is summed over the batch stays separate for each member of the mapped axis.
        split.append(jnp.sum(x, axis=1, keepdims=True) if result.shape[0] == 1 != x.shape[1] else x)
    return tuple(split), (True,) * len(split)
