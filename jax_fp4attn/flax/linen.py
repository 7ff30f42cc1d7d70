"""Self-attention for Flax Linen."""

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
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


class Attention(nn.Module):
    """Self-attention with grouped-query heads and rotary embedding; output features equal input features.

    Parameters are those of Flax's own layers: ``query``, ``key`` and ``value`` with kernels [features, heads,
    head_dim], and ``out`` with [heads, head_dim, features], each with a ``bias`` if ``use_bias``. To shard heads, give
    the initialisers metadata of those ranks, for example ``kernel_init=nn.with_partitioning(init, (None, "model",
    None))`` and ``out_kernel_init=nn.with_partitioning(init, ("model", None, None))``.

    Attributes:
      num_heads: Query heads.
      num_kv_heads: Key and value heads, a divisor of ``num_heads``; None for as many.
      head_dim: Channels of a head, even and at most 256; None for ``features // num_heads``.
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

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_fp4attn.flax.linen import Attention
      >>> layer = Attention(num_heads=4, num_kv_heads=2)
      >>> x = jnp.ones((2, 8, 64))
      >>> variables = jax.jit(layer.init)(jax.random.key(0), x)
      >>> jax.jit(layer.apply)(variables, x, seq_lengths=jnp.array([8, 5])).shape
      (2, 8, 64)
      >>> variables["params"]["key"]["kernel"].shape
      (64, 2, 16)
    """

    num_heads: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    rope_theta: float | None = 10000.0
    is_causal: bool = True
    local_window_size: int | tuple[int, int] | None = None
    recipe: Recipe | None = None
    implementation: str | Sequence[str] | None = None
    context_axis: str | None = None
    context_order: ContextOrder = "contiguous"
    use_bias: bool = False
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    kernel_init: Initializer = DEFAULT_KERNEL_INIT
    out_kernel_init: Initializer | None = None
    bias_init: Initializer = DEFAULT_BIAS_INIT
    out_bias_init: Initializer | None = None

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        *,
        positions: ArrayLike | None = None,
        segment_ids: ArrayLike | None = None,
        seq_lengths: ArrayLike | None = None,
    ) -> jax.Array:
        """Applies attention of a sequence to itself.

        Args:
          x: [*B, T, features].
          positions: Integer or floating [T] or [*B, T], for the rotary embedding and for it alone; None for
            those in the whole sequence. With packed segments pass positions that restart at each.
          segment_ids: int [*B, T]: a position sees its own segment only; 0 or less is padding. With MXFP4 or NVFP4
            values (not with ``recipes.train``) segments within one block of keys share its scale.
          seq_lengths: int [*B]; what lies beyond is padding. Padding, NaN included, has no influence on other
            positions or on gradients, and its output is ``out``'s bias.

        Returns:
          [*B, T, features] of ``dtype``, or of what x and the parameters promote to.

        Raises:
          ValueError: For a shape or a field that does not fit; the message names it.
          TypeError: For a dtype that is not accepted.
          NotImplementedError: For what no (or the named) implementation can do.
        """
        check_input(x)
        features = x.shape[-1]
        num_kv_heads, head_dim = resolve_heads(features, self.num_heads, self.num_kv_heads, self.head_dim, self.dtype)
        context = check_context(self.context_axis, self.context_order)
        x = zero_padding(x, segment_ids, seq_lengths, context)
        query = self._projection("query", (features,), (self.num_heads, head_dim))(x)
        key = self._projection("key", (features,), (num_kv_heads, head_dim))(x)
        value = self._projection("value", (features,), (num_kv_heads, head_dim))(x)
        heads = self_attention(
            query,
            key,
            value,
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
        return self._projection("out", (self.num_heads, head_dim), (features,))(heads)

    def _projection(self, name: str, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> nn.DenseGeneral:
        is_out = name == "out"
        kernel_init = self.out_kernel_init if is_out and self.out_kernel_init else self.kernel_init
        bias_init = self.out_bias_init if is_out and self.out_bias_init else self.bias_init
        return nn.DenseGeneral(
            features=outputs,
            axis=tuple(range(-len(inputs), 0)),
            use_bias=self.use_bias,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            kernel_init=_shaped(kernel_init, (*inputs, *outputs)),
            bias_init=_shaped(bias_init, outputs),
            name=name,
        )


def _shaped(init: Initializer, shape: tuple[int, ...]) -> Initializer:
    """`init` with its flat result reshaped inside its metadata.

    DenseGeneral reshapes too, but unboxes first, which under a mesh applies the metadata's axes to the flat kernel.
    """

    def shaped(key: jax.Array, flat_shape: tuple[int, ...], dtype: Dtype) -> Any:
        return jax.tree.map(lambda leaf: leaf.reshape(shape), init(key, flat_shape, dtype))

    return shaped
