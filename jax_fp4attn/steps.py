"""The steps of the operator on one device or shard, by the implementation that the call selected.

A step is a function of arrays; the reference defines it, and a custom call may stand in for it. Query, key, value,
output and their gradients have the caller's layout, [B, T, N, H]; everything between is head-major, padded, and laid
out as kernels read it. Block scales are in pages. Only where a sequence is split over a mesh axis (``config.context``)
they are in rows between the steps, since half of a shard's part may be no multiple of a page's 128 rows; they become
pages again on the way into each custom call.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_fp4attn import native, reference
from jax_fp4attn.config import OperatorConfig, Visibility
from jax_fp4attn.formats import BlockScaled, round_to_bfloat16
from jax_fp4attn.reference import BackwardOperands, Gradients, Operands, RowOperands, TrainingOperands
from jax_fp4attn.reference.tiles import KEY_TILE, key_order, padded_queries


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
    operands: Operands = _quantize("quantize", config, function, sequence_axis, query, key, value, visibility)
    return operands


def quantize_for_training(
    config: OperatorConfig,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    visibility: Visibility,
    *,
    sequence_axis: str | None = None,
) -> TrainingOperands:
    """See :func:`jax_fp4attn.reference.quantize_for_training`."""
    function = functools.partial(reference.quantize_for_training, config, sequence_axis=sequence_axis)
    arguments = (query, key, value, visibility)
    operands: TrainingOperands = _quantize("quantize_for_training", config, function, sequence_axis, *arguments)
    return operands


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

    expanded, ordered = expanded_operands(config, operands), ordered_key(config, operands)
    attributes = {
        "num_keys": num_keys,
        "head_size": head_size,
        "has_expanded_operands": bool(expanded),
        "has_ordered_key": bool(ordered),
    }
    result: tuple[jax.Array, jax.Array] = _run(
        "forward",
        config,
        head_size,
        attributes,
        function,
        operands,
        bias,
        visibility,
        kernel_arguments=(_slot_order(config, num_keys),),
        workspace=(*expanded, *ordered),
    )
    return result


def expanded_operands(config: OperatorConfig, operands: Operands) -> tuple[jax.ShapeDtypeStruct, ...]:
    """What key and value are expanded to on their way into Hopper's tensor cores, and a counter of work.

    Args:
      config: Static arguments.
      operands: As they are stored.

    Returns:
      Key, float16 [B, K, S', H']; of MXFP4 values also E5M2 bytes [B, K, H', S'] and an int32 exponent of each tile,
      [B, K, S'/128]; and the counter, int32 [1]. Nothing in a program that is not for Hopper.
    """
    if not native.is_for("hopper"):
        return ()
    b, k, slots, h = operands.key.shape
    key, counter = jax.ShapeDtypeStruct((b, k, slots, h), jnp.float16), jax.ShapeDtypeStruct((1,), jnp.int32)
    if config.recipe.v_format != "mxfp4":
        return key, counter
    value = jax.ShapeDtypeStruct((b, k, h, slots), jnp.uint8)
    return key, value, jax.ShapeDtypeStruct((b, k, slots // KEY_TILE), jnp.int32), counter


def ordered_key(config: OperatorConfig, operands: Operands) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The key in the order of the slots, which Blackwell's kernels read.

    Args:
      config: Static arguments.
      operands: As they are stored.

    Returns:
      Codes [B, K, S', H'/2] and scales [B, K, S'/128, H'/64, 512], uint8. Nothing where that is the order of the keys
      anyway, or in a program that is not for Blackwell.
    """
    b, k, slots, h = operands.key.shape
    if config.recipe.anchor_order != "strided" or not native.is_for("blackwell"):
        return ()
    shapes = (b, k, slots, h // 2), (b, k, slots // KEY_TILE, h // 64, 512)
    return tuple(jax.ShapeDtypeStruct(shape, jnp.uint8) for shape in shapes)


def _slot_order(config: OperatorConfig, num_keys: int) -> np.ndarray | None:
    order = key_order(config.recipe, num_keys)
    return None if order is None else order.astype(np.int32)


def partial_forward(
    config: OperatorConfig, operands: Operands, visibility: Visibility, *, num_keys: int
) -> tuple[jax.Array, jax.Array]:
    """See :func:`jax_fp4attn.reference.partial_forward`."""

    def function(operands: Operands, visibility: Visibility) -> tuple[jax.Array, jax.Array]:
        return reference.partial_forward(config, operands, None, visibility, num_keys=num_keys)

    lengths = {"num_keys": num_keys}
    head_size = operands.query.shape[3]
    arguments = (operands, visibility)
    result: tuple[jax.Array, jax.Array] = _run("partial_forward", config, head_size, lengths, function, *arguments)
    return result


def row_operands(
    config: OperatorConfig,
    output: jax.Array,
    lse: jax.Array,
    output_gradient: jax.Array,
    lse_gradient: jax.Array,
    gradient_scale: jax.Array,
) -> RowOperands:
    """See :func:`jax_fp4attn.reference.row_operands`."""
    function = functools.partial(reference.row_operands, config)
    arguments = (output, lse, output_gradient, lse_gradient, gradient_scale)
    result: RowOperands = _run("row_operands", config, output.shape[3], {}, function, *arguments)
    return result


def backward(
    config: OperatorConfig,
    operands: BackwardOperands,
    rows: RowOperands,
    lse: jax.Array,
    gradient_scale: jax.Array,
    bias: jax.Array | None,
    visibility: Visibility,
    *,
    num_keys: int,
    head_size: int,
) -> Gradients:
    """Gradients in the inputs' layout, bfloat16 but for the bias; see :func:`jax_fp4attn.reference.backward`."""

    def function(
        operands: BackwardOperands,
        rows: RowOperands,
        lse: jax.Array,
        gradient_scale: jax.Array,
        bias: jax.Array | None,
        visibility: Visibility,
    ) -> Gradients:
        arguments = (operands, rows, lse, gradient_scale, bias, visibility)
        gradients = reference.backward(config, *arguments, num_keys=num_keys)
        return Gradients(
            query=input_layout(gradients.query, head_size).astype(jnp.bfloat16),
            key=input_layout(gradients.key[:, :, :num_keys], head_size).astype(jnp.bfloat16),
            value=input_layout(gradients.value[:, :, :num_keys], head_size).astype(jnp.bfloat16),
            bias=gradients.bias,
        )

    lengths = {"num_keys": num_keys, "head_size": head_size}
    arguments = (operands, rows, lse, gradient_scale, bias, visibility)
    workspace = _backward_workspace(config, operands)
    result: Gradients = _run("backward", config, head_size, lengths, function, *arguments, workspace=workspace)
    return result


def _backward_workspace(config: OperatorConfig, operands: BackwardOperands) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Query and key as float16, what is known of rows of 64 queries, and unless dQ has an order its float32 sums."""
    b, n, t, h = operands.score_query.shape
    rows = padded_queries(t)
    query = jax.ShapeDtypeStruct((b, n, rows, h), jnp.float16)
    key = jax.ShapeDtypeStruct(operands.score_key.shape, jnp.float16)
    statistics = jax.ShapeDtypeStruct((b, n, rows // 64, 2, 64), jnp.float32)
    if config.recipe.dq_accumulation == "float32_ordered":
        return query, key, statistics
    return query, key, statistics, jax.ShapeDtypeStruct((b, n, rows, h), jnp.float32)


def partial_gradients(
    config: OperatorConfig,
    operands: BackwardOperands,
    rows: RowOperands,
    lse: jax.Array,
    gradient_scale: jax.Array,
    visibility: Visibility,
    *,
    num_keys: int,
) -> Gradients:
    """See :func:`jax_fp4attn.reference.partial_gradients`."""

    def function(
        operands: BackwardOperands,
        rows: RowOperands,
        lse: jax.Array,
        gradient_scale: jax.Array,
        visibility: Visibility,
    ) -> Gradients:
        arguments = (operands, rows, lse, gradient_scale, None, visibility)
        return reference.partial_gradients(config, *arguments, num_keys=num_keys)

    arguments = (operands, rows, lse, gradient_scale, visibility)
    lengths = {"num_keys": num_keys}
    head_size = operands.score_query.shape[3]
    result: Gradients = _run("partial_gradients", config, head_size, lengths, function, *arguments)
    return result


def input_layout(x: jax.Array, head_size: int) -> jax.Array:
    """Head-major, padded [B, N, T, H'] to [B, T, N, H]."""
    return jnp.swapaxes(x[..., :head_size], 1, 2)


def _quantize(
    step: str,
    config: OperatorConfig,
    function: Callable[..., Any],
    sequence_axis: str | None,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    visibility: Visibility,
) -> Any:
    query, key, value = (
        x if x.dtype == jnp.bfloat16 else round_to_bfloat16(x).astype(jnp.bfloat16) for x in (query, key, value)
    )
    arguments = (query, key, value, visibility)
    if sequence_axis is not None and config.recipe.qk_tensor_scale == "amax":
        operands = function(*arguments)  # The amax is a maximum over shards, which no custom call takes.
    else:
        order = _slot_order(config, key.shape[1])
        operands = _run(step, config, query.shape[3], {}, function, *arguments, kernel_arguments=(order,))
    return operands if config.context is None else _each_block_scaled(BlockScaled.in_rows, operands)


def _each_block_scaled(function: Callable[[BlockScaled], BlockScaled], tree: Any) -> Any:
    def is_block_scaled(x: Any) -> bool:
        return isinstance(x, BlockScaled)

    return jax.tree.map(lambda x: function(x) if is_block_scaled(x) else x, tree, is_leaf=is_block_scaled)


def _run(
    step: str,
    config: OperatorConfig,
    head_size: int,
    further: dict[str, int | bool],
    function: Callable[..., Any],
    *arguments: Any,
    kernel_arguments: tuple[Any, ...] = (),
    workspace: tuple[jax.ShapeDtypeStruct, ...] = (),
) -> Any:
    """Runs a step by the implementation of the call.

    The custom call takes ``kernel_arguments`` besides, and its kernels work in arrays like ``workspace``.
    """
    if config.implementation == "reference":
        return function(*arguments)
    batch = jax.tree.leaves(arguments)[0].shape[0]
    missing = native.missing_kernel(step, config.recipe, head_size, batch)
    if missing is not None and config.implementation == "cuda":
        raise NotImplementedError(f"implementation: cuda: {missing}; use None or 'reference'")
    if missing is not None:
        return function(*arguments)
    results = jax.eval_shape(function, *arguments)

    def custom_call(*arguments: Any) -> Any:
        arguments = _each_block_scaled(BlockScaled.in_pages, arguments)
        return native.call(step, config, further, results, *arguments, *kernel_arguments, workspace=workspace)

    if config.implementation == "cuda":
        return lax.platform_dependent(*arguments, cuda=custom_call)
    return lax.platform_dependent(*arguments, cuda=custom_call, default=function)
