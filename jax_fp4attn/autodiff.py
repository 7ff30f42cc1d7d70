"""Differentiation of the operator: what the forward saves, under which names, and how the backward is called."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jax_fp4attn.config import OperatorConfig, Visibility
from jax_fp4attn.operations import BACKWARD, FORWARD, QUANTIZE, QUANTIZE_FOR_BACKWARD, Static
from jax_fp4attn.reference import BackwardOperands
from jax_fp4attn.reference.operands import head_major
from jax_fp4attn.transforms import ArrayType, apply, type_of

OUTPUT_NAME = "fp4attn_out"
LSE_NAME = "fp4attn_lse"
OPERANDS_NAME = "fp4attn_operands"


@dataclasses.dataclass(frozen=True)
class _Primal:
    """What the gradient of an input must look like."""

    type: ArrayType
    length: int
    head_size: int

    @classmethod
    def of(cls, x: jax.Array) -> "_Primal":
        return cls(type_of(x), x.shape[1], x.shape[3])

    def layout(self, x: jax.Array) -> jax.Array:
        """Head-major, padded [B, N, T', H'] to [B, T, N, H]."""
        return jnp.swapaxes(x[:, :, : self.length, : self.head_size], 1, 2)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Residuals:
    operands: BackwardOperands
    output: jax.Array  # [B, N, T, H] bfloat16, H padded
    lse: jax.Array  # [B, N, T] float32
    bias: jax.Array | None
    visibility: Visibility
    primals: tuple[_Primal, _Primal, _Primal] = dataclasses.field(metadata={"static": True})


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
    run = _runner(config, key.shape[1])
    operands = run(QUANTIZE, query, key, value, visibility)
    output, lse = run(FORWARD, operands, bias, visibility)
    return _results(output, lse, _Primal.of(query))


def _runner(config: OperatorConfig, num_keys: int) -> Callable[..., Any]:
    axis = None if config.context is None else config.context.axis
    static = Static(config, num_keys)
    return lambda operation, *arguments: apply(operation, static, *arguments, sequence_axis=axis)


def _forward_rule(
    config: OperatorConfig,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None,
    visibility: Visibility,
) -> tuple[tuple[jax.Array, jax.Array], _Residuals]:
    run = _runner(config, key.shape[1])
    operands = run(QUANTIZE, query, key, value, visibility)
    saved = run(QUANTIZE_FOR_BACKWARD, operands, query, key, value, visibility)
    output, lse = run(FORWARD, operands, bias, visibility)
    # Names bind only inside this rule: outside, a remat policy would see the custom_vjp as one opaque call.
    saved = jax.tree.map(lambda leaf: checkpoint_name(leaf, OPERANDS_NAME), saved)
    output = checkpoint_name(output.astype(jnp.bfloat16), OUTPUT_NAME)
    lse = checkpoint_name(lse, LSE_NAME)
    primals = (_Primal.of(query), _Primal.of(key), _Primal.of(value))
    return _results(output, lse, primals[0]), _Residuals(saved, output, lse, bias, visibility, primals)


def _backward_rule(
    config: OperatorConfig, residuals: _Residuals, cotangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None, None]:
    d_output, d_lse = cotangents
    gradients = _runner(config, residuals.primals[1].length)(
        BACKWARD,
        residuals.operands,
        residuals.output.astype(jnp.float32),
        residuals.lse,
        head_major(d_output, None),
        jnp.swapaxes(d_lse, 1, 2),
        residuals.bias,
        residuals.visibility,
    )
    d_query, d_key, d_value = (
        primal.type.cotangent(primal.layout(gradient))
        for gradient, primal in zip((gradients.query, gradients.key, gradients.value), residuals.primals, strict=True)
    )
    d_bias = None if residuals.bias is None else type_of(residuals.bias).cotangent(gradients.bias)
    return d_query, d_key, d_value, d_bias, None


attention_with_lse.defvjp(_forward_rule, _backward_rule)


def _results(output: jax.Array, lse: jax.Array, query: _Primal) -> tuple[jax.Array, jax.Array]:
    return query.type.cast(query.layout(output)), query.type.row_type(lse.dtype).cast(jnp.swapaxes(lse, 1, 2))
