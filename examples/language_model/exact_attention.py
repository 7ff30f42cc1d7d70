"""Exact attention as JAX has it, in the place of a recipe: what the low-precision arms are compared with on a GPU."""

import dataclasses
from typing import Any, Literal

import jax

from jax_fp4attn.flax import apply_rotary
from jax_fp4attn.flax.nnx import Attention


@dataclasses.dataclass(frozen=True)
class Exact:
    """Bfloat16 products, float32 softmax.

    Attributes:
      implementation: Of :func:`jax.nn.dot_product_attention`: cuDNN's fused kernels, or plain XLA.
    """

    implementation: Literal["cudnn", "xla"]


class ExactAttention(Attention):
    """The projections and the rotary embedding of :class:`Attention`, around :func:`jax.nn.dot_product_attention`."""

    def __call__(self, x: jax.Array, **_: Any) -> jax.Array:
        query, key = apply_rotary(self.query(x)), apply_rotary(self.key(x))
        implementation: Any = self.implementation
        heads = jax.nn.dot_product_attention(query, key, self.value(x), is_causal=True, implementation=implementation)
        return self.out(heads)
