"""Arithmetic that compilers round alike: a search by error must pick the same scale anywhere."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike


def rounded_product(a: ArrayLike, b: ArrayLike) -> jax.Array:
    """The product of ``a`` and a positive ``b``, rounded before anything is added to it.

    Args:
      a: float32 array.
      b: float32 array of positive values, broadcastable against ``a``.

    Returns:
      float32 array.
    """
    # Compilers contract a product into the addition that uses it, through an optimization_barrier
    # too, which is gone by then, but not through a select.
    return jnp.where(a == 0, a, a * b)


def sum_of_squares(x: jax.Array) -> jax.Array:
    """Sum of squares over the last axis, whose size is a power of two, by halves in that order.

    Args:
      x: float32 array [..., 2**k].

    Returns:
      float32 array [...].
    """
    magnitude = jnp.abs(x)
    total = rounded_product(magnitude, magnitude)
    while total.shape[-1] > 1:
        half = total.shape[-1] // 2
        total = total[..., :half] + total[..., half:]
    return total[..., 0]
