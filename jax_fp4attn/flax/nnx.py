"""Self-attention for Flax NNX."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype, Initializer
from jax.typing import ArrayLike

from jax_fp4attn.config import ContextOrder
from jax_fp4attn.context_arguments import check_context
from jax_fp4attn.flax.self_attention import (
    DEFAULT_BIAS_INIT,
    DEFAULT_KERNEL_INIT,
    check_input,
    resolve_heads,
    self_attention,
    zero_padding,
)
from jax_fp4attn.recipe import Recipe

__all__ = ["Attention"]


class Attention(nnx.Module):
    """Self-attention with grouped-query heads and rotary embedding; output features equal input features.

    Parameters are those of Flax's own layers: ``query``, ``key`` and ``value`` with kernels [features, heads,
    head_dim], and ``out`` with [heads, head_dim, features], each with a ``bias`` if ``use_bias``. To shard heads, give
    the initialisers metadata of those ranks, for example ``kernel_init=nnx.with_partitioning(init, (None, "model",
    None))`` and ``out_kernel_init=nnx.with_partitioning(init, ("model", None, None))``.

    Args:
      in_features: Input and output features.
      num_heads: Query heads.
      num_kv_heads: Key and value heads, a divisor of ``num_heads``; None for as many.
      head_dim: Channels of a head, even and at most 256; None for ``in_features // num_heads``.
      rope_theta: Base of the rotary embedding (adjacent pairs, see :func:`jax_fp4attn.flax.apply_rotary`); None for
        no rotary embedding.
      is_causal: Whether query i sees only keys j <= i.
      local_window_size: (left, right) or one int for both: query i sees keys i - left <= j <= i + right.
      recipe: Numerical choices; None for ``recipes.train`` if causal and ``recipes.square`` otherwise.
      implementation: None for the best that can run, "cuda", "reference", or a sequence to try in order.
      context_axis: Mesh axis over which the sequence is split, for ring attention; see :func:`jax_fp4attn.attention`.
      context_order: Order of the split sequence.
      use_bias: Whether the four projections have biases.
      dtype: Dtype of the computation, bfloat16 or float32; None for what inputs and parameters promote to.
      param_dtype: Dtype of the parameters.
      kernel_init: Initialiser of the kernels; may add partitioning metadata.
      out_kernel_init: Initialiser of ``out``'s kernel, whose axes differ; None for ``kernel_init``.
      bias_init: Initialiser of the biases; may add metadata, too.
      out_bias_init: Initialiser of ``out``'s bias, which has one axis; None for ``bias_init``.
      rngs: Random streams; ``params`` is used.

    Raises:
      ValueError: For numbers that do not go together; the message names the argument.
      TypeError: For a dtype that is not accepted.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jax_fp4attn.flax.nnx import Attention
      >>> layer = Attention(64, num_heads=4, num_kv_heads=2, rngs=nnx.Rngs(0))
      >>> apply = nnx.jit(lambda layer, x, lengths: layer(x, seq_lengths=lengths))
      >>> apply(layer, jnp.ones((2, 8, 64)), jnp.array([8, 5])).shape
      (2, 8, 64)
      >>> layer.key.kernel.shape
      (64, 2, 16)
    """

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        rope_theta: float | None = 10000.0,
        is_causal: bool = True,
        local_window_size: int | tuple[int, int] | None = None,
        recipe: Recipe | None = None,
        implementation: str | Sequence[str] | None = None,
        context_axis: str | None = None,
        context_order: ContextOrder = "contiguous",
        use_bias: bool = False,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        kernel_init: Initializer = DEFAULT_KERNEL_INIT,
        out_kernel_init: Initializer | None = None,
        bias_init: Initializer = DEFAULT_BIAS_INIT,
        out_bias_init: Initializer | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        num_kv_heads, head_dim = resolve_heads(in_features, num_heads, num_kv_heads, head_dim, dtype)
        self.in_features = in_features
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.rope_theta = rope_theta
        self.is_causal = is_causal
        self.local_window_size = local_window_size
        self.recipe = recipe
        # A tuple, because NNX hashes static attributes.
        self.implementation = (
            implementation if implementation is None or isinstance(implementation, str) else tuple(implementation)
        )
        self.context_axis = context_axis
        self.context_order: ContextOrder = context_order
        linear = functools.partial(
            nnx.LinearGeneral,
            use_bias=use_bias,
            dtype=dtype,
            param_dtype=param_dtype,
            rngs=rngs,
        )
        project = functools.partial(linear, in_features, kernel_init=kernel_init, bias_init=bias_init)
        self.query = project((num_heads, head_dim))
        self.key = project((num_kv_heads, head_dim))
        self.value = project((num_kv_heads, head_dim))
        self.out = linear(
            (num_heads, head_dim),
            in_features,
            axis=(-2, -1),
            kernel_init=out_kernel_init or kernel_init,
            bias_init=out_bias_init or bias_init,
        )

    def __call__(
        self,
        x: jax.Array,
        *,
        positions: ArrayLike | None = None,
        segment_ids: ArrayLike | None = None,
        seq_lengths: ArrayLike | None = None,
        qkv_sharding: Any = None,
        out_sharding: Any = None,
    ) -> jax.Array:
        """Applies attention of a sequence to itself.

        Args:
          x: [*B, T, in_features].
          positions: Integer or floating [T] or [*B, T], for the rotary embedding and for it alone; None for
            those in the whole sequence. With packed segments pass positions that restart at each.
          segment_ids: int [*B, T]: a position sees its own segment only; 0 or less is padding. With MXFP4 or NVFP4
            values (not with ``recipes.train``) segments within one block of keys share its scale.
          seq_lengths: int [*B]; what lies beyond is padding. Padding, NaN included, has no influence on other
            positions or on gradients, and its output is ``out``'s bias.
          qkv_sharding: Sharding of query, key and value [*B, T, heads, head_dim], as Flax's layers take it; an Explicit
            mesh needs it where the features of x or of the kernels are sharded.
          out_sharding: Sharding of the result, likewise.

        Returns:
          [*B, T, in_features] of ``dtype``, or of what x and the parameters promote to.

        Raises:
          ValueError: For a shape that does not fit; the message names the argument.
          TypeError: For a dtype that is not accepted.
          NotImplementedError: For what no (or the named) implementation can do.
        """
        check_input(x, self.in_features)
        context = check_context(self.context_axis, self.context_order)
        x = zero_padding(x, segment_ids, seq_lengths, context)
        heads = self_attention(
            self.query(x, out_sharding=qkv_sharding),
            self.key(x, out_sharding=qkv_sharding),
            self.value(x, out_sharding=qkv_sharding),
            positions=positions,
            segment_ids=segment_ids,
            seq_lengths=seq_lengths,
            rope_theta=self.rope_theta,
            is_causal=self.is_causal,
            local_window_size=self.local_window_size,
            recipe=self.recipe,
            implementation=self.implementation,
            context=context,
        )
        return self.out(heads, out_sharding=out_sharding)
