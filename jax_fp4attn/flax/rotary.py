"""Rotary position embedding in the adjacent-pair layout."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike


def apply_rotary(x: jax.Array, positions: ArrayLike | None = None, theta: float = 10000.0) -> jax.Array:
    """Rotates adjacent channel pairs (2i, 2i + 1) by ``position * theta ** (-2i / H)``.

    Computed in float32. Checkpoints that pair channel i with i + H / 2, such as those of Hugging Face, need the output
    channels of their query and key projections interleaved once.

    Args:
      x: [*B, T, N, H], floating, H even: queries or keys.
      positions: Integer or floating, [T] or [*B, T] (1 for any of *B); None for ``arange(T)``. With packed sequences
        pass positions that restart at each segment.
      theta: Base of the wavelengths, a positive Python number.

    Returns:
      [*B, T, N, H] of x's dtype.

    Raises:
      ValueError: For a shape that does not fit, an odd H or a theta that is not finite and positive.
      TypeError: For positions or an x whose dtype is not accepted.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_fp4attn.flax import apply_rotary
      >>> x = jnp.array([1.0, 0.0, 1.0, 0.0]).reshape(1, 1, 4)
      >>> apply_rotary(x, jnp.array([jnp.pi / 2])).round(2).ravel().tolist()
      [0.0, 1.0, 1.0, 0.02]
    """
    if x.ndim < 3:
        raise ValueError(f"x: expected [*B, T, N, H], got shape {x.shape}")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"x: expected a floating dtype, got {x.dtype}")
    *batch, length, _, head_size = x.shape
    if head_size % 2:
        raise ValueError(f"x: expected an even head size (channels rotate in pairs), got H={head_size}")
    if not (math.isfinite(theta) and theta > 0):
        raise ValueError(f"theta: expected a finite positive number, got {theta}")
    positions = _check_positions(positions, tuple(batch), length)
    frequencies = np.float64(theta) ** (-np.arange(0, head_size, 2) / head_size)
    angles = positions.astype(jnp.float32)[..., None] * jnp.asarray(frequencies, jnp.float32)
    cos, sin = jnp.cos(angles)[..., None, :], jnp.sin(angles)[..., None, :]
    pairs = x.astype(jnp.float32).reshape(*x.shape[:-1], head_size // 2, 2)
    even, odd = pairs[..., 0], pairs[..., 1]
    rotated = jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1)
    return rotated.reshape(x.shape).astype(x.dtype)


def _check_positions(positions: ArrayLike | None, batch: tuple[int, ...], length: int) -> jax.Array:
    if positions is None:
        return jnp.arange(length)
    array = jnp.asarray(positions)
    if not (jnp.issubdtype(array.dtype, jnp.integer) or jnp.issubdtype(array.dtype, jnp.floating)):
        raise TypeError(f"positions: expected an integer or floating dtype, got {array.dtype}")
    full = (*batch, length)
    per_entry = array.ndim == len(full) and all(n in (1, size) for n, size in zip(array.shape[:-1], batch, strict=True))
    if array.shape[-1:] != (length,) or not (array.ndim == 1 or per_entry):
        raise ValueError(f"positions: expected shape {(length,)} or {full}, got {array.shape}")
    return array
