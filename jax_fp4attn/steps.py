"""The steps of the operator on one device or shard, by the implementation that the call selected.

A step is a function of arrays; the reference defines it, and a custom call may stand in for it. Query, key, value,
output and their gradients have the caller's layout, [B, T, N, H]; everything between is head-major and padded.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_fp4attn import native, reference
from jax_fp4attn.config import OperatorConfig, Visibility
from jax_fp4attn.reference import BackwardOperands, Gradients, Operands, RowOperands
from jax_fp4attn.reference.operands import head_major


def quantize(
    config: OperatorConfig,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    visibility: Visibility,
    *,
    sequence_axis: str | None = None,
) -> Operands:
    """See :func:`jax_fp4attn.reference.quantize_operands`."""
    function = functools.partial(reference.quantize_operands, config, sequence_axis=sequence_axis)
    if sequence_axis is not None and config.recipe.qk_tensor_scale == "amax":
        return function(query, key, value, visibility)  # The amax is a sum over shards, which no custom call makes.
    operands: Operands = _run("quantize", config, {}, function, query, key, value, visibility)
    return operands


def quantize_for_backward(
    config: OperatorConfig,
    operands: Operands,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    visibility: Visibility,
) -> BackwardOperands:
    """See :func:`jax_fp4attn.reference.quantize_for_backward`."""
    function = functools.partial(reference.quantize_for_backward, config)
    arguments = (operands, query, key, value, visibility)
    result: BackwardOperands = _run("quantize_for_backward", config, {}, function, *arguments)
    return result


def forward(
    config: OperatorConfig,
    operands: Operands,
    bias: jax.Array | None,
    visibility: Visibility,
    *,
    num_keys: int,
    head_size: int,
) -> tuple[jax.Array, jax.Array]:
    """Output, bfloat16 [B, T, N, H], and lse, float32 [B, N, T]; see :func:`jax_fp4attn.reference.forward`."""

    def function(operands: Operands, bias: jax.Array | None, visibility: Visibility) -> tuple[jax.Array, jax.Array]:
        output, lse = reference.forward(config, operands, bias, visibility, num_keys=num_keys)
        return input_layout(output, head_size).astype(jnp.bfloat16), lse

    lengths = {"num_keys": num_keys, "head_size": head_size}
    result: tuple[jax.Array, jax.Array] = _run("forward", config, lengths, function, operands, bias, visibility)
    return result


def partial_forward(
    config: OperatorConfig, operands: Operands, visibility: Visibility, *, num_keys: int
) -> tuple[jax.Array, jax.Array]:
    """See :func:`jax_fp4attn.reference.partial_forward`."""

    def function(operands: Operands, visibility: Visibility) -> tuple[jax.Array, jax.Array]:
        return reference.partial_forward(config, operands, None, visibility, num_keys=num_keys)

    arguments = (operands, visibility)
    result: tuple[jax.Array, jax.Array] = _run("partial_forward", config, {"num_keys": num_keys}, function, *arguments)
    return result


def backward(
    config: OperatorConfig,
    operands: BackwardOperands,
    output: jax.Array,
    lse: jax.Array,
    output_gradient: jax.Array,
    lse_gradient: jax.Array,
    bias: jax.Array | None,
    visibility: Visibility,
    *,
    num_keys: int,
) -> Gradients:
    """Gradients in the inputs' layout, bfloat16 but for the bias; see :func:`jax_fp4attn.reference.backward`."""
    head_size = output.shape[3]

    def function(
        operands: BackwardOperands,
        output: jax.Array,
        lse: jax.Array,
        output_gradient: jax.Array,
        lse_gradient: jax.Array,
        bias: jax.Array | None,
        visibility: Visibility,
    ) -> Gradients:
        gradients = reference.backward(
            config,
            operands,
            head_major(output, None),
            lse,
            head_major(output_gradient, None),
            lse_gradient,
            bias,
            visibility,
            num_keys=num_keys,
        )
        return Gradients(
            query=input_layout(gradients.query, head_size).astype(jnp.bfloat16),
            key=input_layout(gradients.key[:, :, :num_keys], head_size).astype(jnp.bfloat16),
            value=input_layout(gradients.value[:, :, :num_keys], head_size).astype(jnp.bfloat16),
            bias=gradients.bias,
        )

    arguments = (operands, output, lse, output_gradient, lse_gradient, bias, visibility)
    result: Gradients = _run("backward", config, {"num_keys": num_keys}, function, *arguments)
    return result


def row_operands(
    config: OperatorConfig,
    operands: BackwardOperands,
    output: jax.Array,
    lse: jax.Array,
    output_gradient: jax.Array,
    lse_gradient: jax.Array,
    gradient_scale: jax.Array,
) -> RowOperands:
    """See :func:`jax_fp4attn.reference.row_operands`; output and its gradient are head-major."""
    function = functools.partial(reference.row_operands, config)
    arguments = (operands, output, lse, output_gradient, lse_gradient, gradient_scale)
    result: RowOperands = _run("row_operands", config, {}, function, *arguments)
    return result


def partial_gradients(
    config: OperatorConfig,
    operands: BackwardOperands,
    rows: RowOperands,
    visibility: Visibility,
    *,
    num_keys: int,
) -> Gradients:
    """See :func:`jax_fp4attn.reference.partial_gradients`."""

    def function(operands: BackwardOperands, rows: RowOperands, visibility: Visibility) -> Gradients:
        return reference.partial_gradients(config, operands, rows, None, visibility, num_keys=num_keys)

    arguments = (operands, rows, visibility)
    result: Gradients = _run("partial_gradients", config, {"num_keys": num_keys}, function, *arguments)
    return result


def input_layout(x: jax.Array, head_size: int) -> jax.Array:
    """Head-major, padded [B, N, T, H'] to [B, T, N, H]."""
    return jnp.swapaxes(x[..., :head_size], 1, 2)


def _run(
    step: str, config: OperatorConfig, lengths: dict[str, int], function: Callable[..., Any], *arguments: Any
) -> Any:
    if config.implementation == "reference":
        return function(*arguments)
    custom_call = functools.partial(native.call, step, config, lengths, jax.eval_shape(function, *arguments))
    if config.implementation == "cuda":
        return lax.platform_dependent(*arguments, cuda=custom_call)
    return lax.platform_dependent(*arguments, cuda=custom_call, default=function)
