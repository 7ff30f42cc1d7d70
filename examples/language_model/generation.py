"""Text from a model, byte by byte."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


def generate(model: nnx.Module, prompt: np.ndarray, *, length: int, temperature: float, seed: int) -> bytes:
    """Continues a prompt.

    Each byte is drawn after a full forward pass over as many bytes as the prompt has: simple and of fixed shapes, at
    the price of a cache's speed.

    Args:
      model: A language model over bytes.
      prompt: uint8 [T].
      length: Number of bytes to draw.
      temperature: Below 1 for likelier text.
      seed: Of the draws.

    Returns:
      The continuation, without the prompt.
    """
    drawn = _continue(model, jnp.asarray(prompt, jnp.int32), jax.random.key(seed), length, jnp.float32(temperature))
    return np.asarray(drawn).astype(np.uint8).tobytes()


@nnx.jit(static_argnums=3)
def _continue(model: nnx.Module, prompt: jax.Array, key: jax.Array, length: int, temperature: jax.Array) -> jax.Array:
    def draw(window: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = model(window[None])[0, -1]
        byte = jax.random.categorical(key, logits / temperature)
        return jnp.append(window[1:], byte), byte

    return jax.lax.scan(draw, prompt, jax.random.split(key, length))[1]
