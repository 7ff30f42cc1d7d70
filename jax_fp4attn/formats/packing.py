"""Two four-bit codes a byte, the even element in the low nibble."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike


def pack_codes(codes: ArrayLike) -> jax.Array:
    """Packs four-bit codes in pairs along the last axis.

    Args:
      codes: Integer array [..., n] with values in [0, 15]; n is even.

    Returns:
      uint8 array [..., n // 2], element 2i in the low nibble and 2i + 1 in the high nibble of byte
      i. This is also the memory order of a ``float4_e2m1fn`` array.

    Raises:
      ValueError: If n is odd.

    Example:
      >>> [hex(b) for b in pack_codes(jnp.array([0x1, 0x7, 0xA, 0x0])).tolist()]
      ['0x71', '0xa']
    """
    codes = jnp.asarray(codes).astype(jnp.uint8)
    if codes.ndim == 0 or codes.shape[-1] % 2:
        raise ValueError(f"codes: expected an even last dimension, got shape {codes.shape}")
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_codes(packed: ArrayLike) -> jax.Array:
    """Undoes :func:`pack_codes`.

    Args:
      packed: uint8 array [..., n // 2].

    Returns:
      uint8 array [..., n] of codes in [0, 15].

    Example:
      >>> unpack_codes(jnp.array([0x71], jnp.uint8)).tolist()
      [1, 7]
    """
    packed = jnp.asarray(packed).astype(jnp.uint8)
    pairs = jnp.stack([packed & 0xF, packed >> 4], axis=-1)
    return pairs.reshape(*packed.shape[:-1], 2 * packed.shape[-1])
