"""Differentiation of the operator: what the forward saves, under which names, and how the backward is called."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jax_fp4attn.config import OperatorConfig, Visibility
from jax_fp4attn.operations import BACKWARD, FORWARD, QUANTIZE, QUANTIZE_FOR_TRAINING, Static
from jax_fp4attn.reference import BackwardOperands
from jax_fp4attn.transforms import ArrayType, apply, type_of

OUTPUT_NAME = "fp4attn_out"
LSE_NAME = "fp4attn_lse"
OPERANDS_NAME = "fp4attn_operands"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Residuals:
    operands: BackwardOperands
    output: jax.Array  # [B, T, N, H] bfloat16
    lse: jax.Array  # [B, N, T] float32
    bias: jax.Array | None
    visibility: Visibility
    num_keys: int = dataclasses.field(metadata={"static": True})
    primals: tuple[ArrayType, ArrayType, ArrayType] = dataclasses.field(metadata={"static": True})


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attention_with_lse(
    config: OperatorConfig,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None,
    visibility: Visibility,
) -> tuple[jax.Array, jax.Array]:
    """The operator with its gradient.

    Args:
      config: Static arguments.
      query: [B, T, N, H], bfloat16 or float32.
      key: [B, S, K, H], of the query's dtype.
      value: [B, S, K, H], of the query's dtype.
      bias: float32, broadcastable to [B, N, T, S], or None.
      visibility: Run-time restrictions.

    Returns:
      Output [B, T, N, H] of the query's dtype and lse, float32 [B, T, N].
    """
    run = _runner(config, key.shape[1], key.shape[3])
    operands = run(QUANTIZE, query, key, value, visibility)
    output, lse = run(FORWARD, operands, bias, visibility)
    return _results(output, lse, type_of(query))


def _runner(config: OperatorConfig, num_keys: int, head_size: int) -> Callable[..., Any]:
    axis = None if config.context is None else config.context.axis
    static = Static(config, num_keys, head_size)
    return lambda operation, *arguments: apply(operation, static, *arguments, sequence_axis=axis)


def _forward_rule(
    config: OperatorConfig,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None,
    visibility: Visibility,
) -> tuple[tuple[jax.Array, jax.Array], _Residuals]:
    run = _runner(config, key.shape[1], key.shape[3])
    operands = run(QUANTIZE_FOR_TRAINING, query, key, value, visibility)
    output, lse = run(FORWARD, operands.forward, bias, visibility)
    # Names bind only inside this rule: outside, a remat policy would see the custom_vjp as one opaque call.
    saved = jax.tree.map(lambda leaf: checkpoint_name(leaf, OPERANDS_NAME), operands.for_backward())
    output = checkpoint_name(output, OUTPUT_NAME)
    lse = checkpoint_name(lse, LSE_NAME)
    primals = (type_of(query), type_of(key), type_of(value))
    return _results(output, lse, primals[0]), _Residuals(saved, output, lse, bias, visibility, key.shape[1], primals)


def _backward_rule(
    config: OperatorConfig, residuals: _Residuals, cotangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None, None]:
    d_output, d_lse = cotangents
    gradients = _runner(config, residuals.num_keys, d_output.shape[3])(
        BACKWARD,
        residuals.operands,
        residuals.output,
        residuals.lse,
        d_output.astype(jnp.bfloat16),  # XLA may leave it out; steps that read values round them.
        jnp.swapaxes(d_lse, 1, 2),
        residuals.bias,
        residuals.visibility,
    )
    d_query, d_key, d_value = (
        primal.cotangent(gradient)
        for gradient, primal in zip((gradients.query, gradients.key, gradients.value), residuals.primals, strict=True)
    )
    d_bias = None if residuals.bias is None else type_of(residuals.bias).cotangent(gradients.bias)
    return d_query, d_key, d_value, d_bias, None


attention_with_lse.defvjp(_forward_rule, _backward_rule)


def _results(output: jax.Array, lse: jax.Array, query: ArrayType) -> tuple[jax.Array, jax.Array]:
    return query.cast(output), query.row_type(lse.dtype).cast(jnp.swapaxes(lse, 1, 2))
