"""The vmap rule: a mapped axis becomes a dimension of the call, which may be split over a mesh like the batch."""

import dataclasses
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
    results = _undifferentiable(call)(*leaves)
    return jax.tree.unflatten(jax.tree.structure(call.result_shapes(tuple(leaves))), results)


@functools.lru_cache(maxsize=1024)
def _undifferentiable(call: Call) -> Callable[..., tuple[jax.Array, ...]]:
    """Refuses to be differentiated: the gradient rule stands above, so this would be a second derivative."""
    function = jax.custom_jvp(_batchable(call))

    @function.defjvp
    def refuse(primals: Any, tangents: Any) -> Any:
        del primals, tangents
        raise NotImplementedError(
            "attention: second derivatives (a hessian, the gradient of a gradient) are not implemented, as the "
            "backward rounds too; apply jax.lax.stop_gradient to the inputs of the inner derivative"
        )

    return function


@functools.lru_cache(maxsize=1024)
def _batchable(call: Call) -> Callable[..., tuple[jax.Array, ...]]:
    function = jax.custom_batching.custom_vmap(lambda *leaves: route(call, leaves))

    @function.def_vmap
    def rule(axis_size: int, mapped: list[bool], *leaves: jax.Array) -> tuple[tuple[jax.Array, ...], tuple[bool, ...]]:
        if axis_size == 0:
            raise ValueError("attention: expected a vmapped axis of at least 1, got 0; skip the call for no examples")
        if call.mapped:
            outputs = _map_again(call, axis_size, mapped, leaves)
        else:
            outputs = _batchable(dataclasses.replace(call, mapped=tuple(mapped)))(*leaves)
        return outputs, (True,) * len(outputs)

    return function


def _map_again(call: Call, axis_size: int, mapped: list[bool], leaves: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Maps a mapped call: both dimensions become one."""
    inner_size = next(
        x.shape[1 if is_mapped else 0]
        for x, is_mapped, was_mapped in zip(leaves, mapped, call.mapped, strict=True)
        if was_mapped
    )
    merged = []
    for x, is_mapped, was_mapped in zip(leaves, mapped, call.mapped, strict=True):
        if is_mapped or was_mapped:
            x = x if was_mapped else x[:, None]
            x = x if is_mapped else x[None]
            x = jnp.broadcast_to(x, (axis_size, inner_size, *x.shape[2:]))
            x = x.reshape(axis_size * inner_size, *x.shape[2:])
        merged.append(x)
    both = tuple(is_mapped or was_mapped for is_mapped, was_mapped in zip(mapped, call.mapped, strict=True))
    outputs = _batchable(dataclasses.replace(call, mapped=both))(*merged)
    return tuple(x.reshape(axis_size, inner_size, *x.shape[1:]) for x in outputs)
