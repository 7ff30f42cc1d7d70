"""Rematerialisation policies that know the names which the forward rule gives to its residuals."""

from typing import Any

import jax

from jax_fp4attn.autodiff import LSE_NAME, OPERANDS_NAME, OUTPUT_NAME

__all__ = ["LSE_NAME", "OPERANDS_NAME", "OUTPUT_NAME", "save_attention", "save_attention_and_operands"]


def save_attention(primitive: Any, *args: Any, **params: Any) -> Any:
    """Saves attention's output and lse: the forward is not run again, the quantisers are.

    Use it as ``jax.checkpoint(f, policy=save_attention)``, or combine it:
    ``jax.checkpoint_policies.save_from_both_policies(jax.checkpoint_policies.dots_saveable, save_attention)``.

    Args:
      primitive: As JAX calls a policy.
      *args: As JAX calls a policy.
      **params: As JAX calls a policy.

    Returns:
      Whether to save the value.

    Example:
      >>> import jax, jax.numpy as jnp, jax_fp4attn
      >>> f = jax.checkpoint(lambda x: jax_fp4attn.attention(x, x, x, is_causal=True).sum(), policy=save_attention)
      >>> jax.grad(f)(jnp.ones((1, 4, 1, 64))).shape
      (1, 4, 1, 64)
    """
    return _SAVE_ATTENTION(primitive, *args, **params)


def save_attention_and_operands(primitive: Any, *args: Any, **params: Any) -> Any:
    """Saves the quantised operands too: neither the forward nor the quantisers run again.

    Args:
      primitive: As JAX calls a policy.
      *args: As JAX calls a policy.
      **params: As JAX calls a policy.

    Returns:
      Whether to save the value.
    """
    return _SAVE_ATTENTION_AND_OPERANDS(primitive, *args, **params)


_SAVE_ATTENTION = jax.checkpoint_policies.save_only_these_names(OUTPUT_NAME, LSE_NAME)
_SAVE_ATTENTION_AND_OPERANDS = jax.checkpoint_policies.save_only_these_names(OUTPUT_NAME, LSE_NAME, OPERANDS_NAME)
