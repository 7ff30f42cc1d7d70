"""A Llama-style language model in Flax NNX, whose attention takes a recipe."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from examples.language_model.exact_attention import Exact, ExactAttention
from jax_fp4attn import Recipe
from jax_fp4attn.flax.nnx import Attention


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Size of a model.

    Attributes:
      vocabulary: Number of tokens; 256 for bytes.
      width: Features of the residual stream.
      hidden: Features inside the feed-forward layers.
      layers: Number of blocks.
      heads: Query heads.
      kv_heads: Key and value heads.
      head_size: Channels of a head.
      dtype: What the feed-forward layers compute in; attention computes in bfloat16, and parameters are float32.
      context_axis: Mesh axis over which the sequence is split, in zigzag order; None where it is whole.
      implementation: Of the recipe; None for the best that can run.
    """

    vocabulary: int = 256
    width: int = 128
    hidden: int = 352
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 64
    dtype: str = "float32"
    context_axis: str | None = None
    implementation: str | None = None


class SwiGLU(nnx.Module):
    """Gated feed-forward layer."""

    def __init__(self, width: int, hidden: int, *, dtype: str, rngs: nnx.Rngs) -> None:
        self.gate = nnx.Linear(width, hidden, use_bias=False, dtype=jnp.dtype(dtype), rngs=rngs)
        self.up = nnx.Linear(width, hidden, use_bias=False, dtype=jnp.dtype(dtype), rngs=rngs)
        self.down = nnx.Linear(hidden, width, use_bias=False, dtype=jnp.dtype(dtype), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.silu(self.gate(x)) * self.up(x))


class Block(nnx.Module):
    """Attention and feed-forward layer, each on a normalised input and added to the stream."""

    def __init__(self, config: ModelConfig, *, recipe: Recipe | Exact, rngs: nnx.Rngs) -> None:
        self.attention_norm = nnx.RMSNorm(config.width, rngs=rngs)
        self.attention = _attention(config, recipe, rngs)
        self.mlp_norm = nnx.RMSNorm(config.width, rngs=rngs)
        self.mlp = SwiGLU(config.width, config.hidden, dtype=config.dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class LanguageModel(nnx.Module):
    """Predicts each next token from those before it."""

    def __init__(self, config: ModelConfig, *, recipe: Recipe | Exact, rngs: nnx.Rngs) -> None:
        # As large as what the blocks add: with Flax's default a token is hard to tell in the stream, and learning slow.
        normal = nnx.initializers.normal(1.0)
        self.embedding = nnx.Embed(config.vocabulary, config.width, embedding_init=normal, rngs=rngs)
        self.blocks = nnx.List([Block(config, recipe=recipe, rngs=rngs) for _ in range(config.layers)])
        self.norm = nnx.RMSNorm(config.width, rngs=rngs)
        self.head = nnx.Linear(config.width, config.vocabulary, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Computes logits.

        Args:
          tokens: int [B, T], in zigzag order where the sequence is split.

        Returns:
          float32 [B, T, vocabulary].
        """
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def cast_kernels(model: nnx.Module) -> nnx.Module:
    """Casts kernels to what their layers compute in, as the layers do when they are called.

    Where kernels are gathered in between, fewer bytes travel and the results are the same.

    Args:
      model: With float32 parameters.

    Returns:
      A copy.
    """
    cast = nnx.clone(model)
    for _, layer in nnx.iter_modules(cast):
        if isinstance(layer, (nnx.Linear, nnx.LinearGeneral)) and layer.dtype is not None:
            layer.kernel.set_value(layer.kernel.get_value().astype(layer.dtype))
    return cast


def _attention(config: ModelConfig, recipe: Recipe | Exact, rngs: nnx.Rngs) -> Attention:
    arguments: dict[str, Any] = {
        "num_kv_heads": config.kv_heads,
        "head_dim": config.head_size,
        "dtype": jnp.bfloat16,
        "rngs": rngs,
    }
    if isinstance(recipe, Exact):
        return ExactAttention(config.width, config.heads, implementation=recipe.implementation, **arguments)
    if config.context_axis is not None:
        arguments |= {"context_axis": config.context_axis, "context_order": "zigzag"}
    return Attention(config.width, config.heads, recipe=recipe, implementation=config.implementation, **arguments)
