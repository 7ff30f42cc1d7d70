"""Differentiation of the operator: what the forward saves, under which names, and how the backward is called."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jax_fp4attn import reference
from jax_fp4attn.config import OperatorConfig, Visibility
from jax_fp4attn.reference import BackwardOperands, Operands
from jax_fp4attn.reference.operands import head_major

OUTPUT_NAME = "fp4attn_out"
LSE_NAME = "fp4attn_lse"
OPERANDS_NAME = "fp4attn_operands"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Residuals:
    operands: BackwardOperands
    output: jax.Array  # [B, N, T, H] bfloat16, H padded
    lse: jax.Array  # [B, N, T] float32
    bias: jax.Array | None
    visibility: Visibility
    # Zero-size arrays that carry the primals' dtype and shape, which a pytree of arrays cannot hold otherwise.
    query_like: jax.Array
    key_like: jax.Array


def _like(x: jax.Array) -> jax.Array:
    return jnp.zeros((0, *x.shape[1:]), x.dtype)


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
    operands = reference.quantize_operands(config, query, key, value, visibility)
    output, lse = reference.forward(config, operands, bias, visibility, num_keys=key.shape[1])
    return _output_layout(output, query), jnp.swapaxes(lse, 1, 2)


def _forward_rule(
    config: OperatorConfig,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None,
    visibility: Visibility,
) -> tuple[tuple[jax.Array, jax.Array], _Residuals]:
    operands: Operands = reference.quantize_operands(config, query, key, value, visibility)
    saved = reference.quantize_for_backward(config, operands, query, key, value, visibility)
    output, lse = reference.forward(config, operands, bias, visibility, num_keys=key.shape[1])
    # Names bind only inside this rule: outside, a remat policy would see the custom_vjp as one opaque call.
    saved = jax.tree.map(lambda leaf: checkpoint_name(leaf, OPERANDS_NAME), saved)
    output = checkpoint_name(output.astype(jnp.bfloat16), OUTPUT_NAME)
    lse = checkpoint_name(lse, LSE_NAME)
    residuals = _Residuals(saved, output, lse, bias, visibility, _like(query), _like(key))
    return (_output_layout(output, query), jnp.swapaxes(lse, 1, 2)), residuals


def _backward_rule(
    config: OperatorConfig, residuals: _Residuals, cotangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None, None]:
    d_output, d_lse = cotangents
    num_keys = residuals.key_like.shape[1]
    gradients = reference.backward(
        config,
        residuals.operands,
        residuals.output.astype(jnp.float32),
        residuals.lse,
        head_major(d_output, None),
        jnp.swapaxes(d_lse, 1, 2),
        residuals.bias,
        residuals.visibility,
        num_keys=num_keys,
    )
    return (
        _output_layout(gradients.query, residuals.query_like),
        _output_layout(gradients.key[:, :, :num_keys], residuals.key_like),
        _output_layout(gradients.value[:, :, :num_keys], residuals.key_like),
        gradients.bias,
        None,
    )


attention_with_lse.defvjp(_forward_rule, _backward_rule)


def _output_layout(x: jax.Array, like: jax.Array) -> jax.Array:
    """Head-major, padded [B, N, T, H'] to [B, T, N, H] of the dtype of ``like``."""
    return jnp.swapaxes(x, 1, 2)[..., : like.shape[-1]].astype(like.dtype)
