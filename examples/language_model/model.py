"""A Llama-style language model in Flax NNX, whose attention takes a recipe."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

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
    """

    vocabulary: int = 256
    width: int = 128
    hidden: int = 352
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 64


class SwiGLU(nnx.Module):
    """Gated feed-forward layer."""

    def __init__(self, width: int, hidden: int, *, rngs: nnx.Rngs) -> None:
        self.gate = nnx.Linear(width, hidden, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(width, hidden, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(hidden, width, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.silu(self.gate(x)) * self.up(x))


class Block(nnx.Module):
    """Attention and feed-forward layer, each on a normalised input and added to the stream."""

    def __init__(self, config: ModelConfig, *, recipe: Recipe, rngs: nnx.Rngs) -> None:
        self.attention_norm = nnx.RMSNorm(config.width, rngs=rngs)
        self.attention = Attention(
            config.width,
            config.heads,
            num_kv_heads=config.kv_heads,
            head_dim=config.head_size,
            recipe=recipe,
            dtype=jnp.bfloat16,
            rngs=rngs,
        )
        self.mlp_norm = nnx.RMSNorm(config.width, rngs=rngs)
        self.mlp = SwiGLU(config.width, config.hidden, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class LanguageModel(nnx.Module):
    """Predicts each next token from those before it."""

    def __init__(self, config: ModelConfig, *, recipe: Recipe, rngs: nnx.Rngs) -> None:
        # As large as what the blocks add: with Flax's default a token is hard to tell in the stream, and learning slow.
        normal = nnx.initializers.normal(1.0)
        self.embedding = nnx.Embed(config.vocabulary, config.width, embedding_init=normal, rngs=rngs)
        self.blocks = nnx.List([Block(config, recipe=recipe, rngs=rngs) for _ in range(config.layers)])
        self.norm = nnx.RMSNorm(config.width, rngs=rngs)
        self.head = nnx.Linear(config.width, config.vocabulary, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Computes logits.

        Args:
          tokens: int [B, T].

        Returns:
          float32 [B, T, vocabulary].
        """
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
