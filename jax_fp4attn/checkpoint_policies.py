"""Rematerialisation policies that know the names which the forward rule gives to its residuals."""

from typing import Any

import jax

from jax_fp4attn.autodiff import LSE_NAME, OPERANDS_NAME, OUTPUT_NAME

__all__ = [
    "LSE_NAME",
    "OPERANDS_NAME",
    "OUTPUT_NAME",
    "offload_attention",
    "save_attention",
    "save_attention_and_operands",
]


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

    Example:
      >>> import jax
      >>> from jax_fp4attn import attention
      >>> layer = jax.checkpoint(lambda x: attention(x, x, x), policy=save_attention_and_operands)
    """
    return _SAVE_ATTENTION_AND_OPERANDS(primitive, *args, **params)


def offload_attention(primitive: Any, *args: Any, **params: Any) -> Any:
    """Moves attention's output to pinned host memory until the backward needs it, and saves the small lse.

    The forward is not run again, and no output occupies the device in between. On a CPU, whose memory is the host's,
    this is :func:`save_attention`. JAX cannot combine policies that offload; for more names write
    ``jax.checkpoint_policies.save_and_offload_only_these_names`` with :data:`OUTPUT_NAME` and :data:`LSE_NAME`.

    Args:
      primitive: As JAX calls a policy.
      *args: As JAX calls a policy.
      **params: As JAX calls a policy.

    Returns:
      What to do with the value.

    Example:
      >>> import jax, jax.numpy as jnp, jax_fp4attn
      >>> f = jax.checkpoint(lambda x: jax_fp4attn.attention(x, x, x, is_causal=True).sum(), policy=offload_attention)
      >>> jax.jit(jax.grad(f))(jnp.ones((1, 4, 1, 64))).shape
      (1, 4, 1, 64)
    """
    return _OFFLOAD_ATTENTION(primitive, *args, **params)


_SAVE_ATTENTION = jax.checkpoint_policies.save_only_these_names(OUTPUT_NAME, LSE_NAME)
_SAVE_ATTENTION_AND_OPERANDS = jax.checkpoint_policies.save_only_these_names(OUTPUT_NAME, LSE_NAME, OPERANDS_NAME)
_OFFLOAD_ATTENTION = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[LSE_NAME],
    names_which_can_be_offloaded=[OUTPUT_NAME],
    offload_src="device",
    offload_dst="pinned_host",
)
