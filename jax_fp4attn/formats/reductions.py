"""Arithmetic that every compiler leaves as it is: a scale must be the same byte everywhere."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike


def max_magnitude(x: jax.Array, axis: int | tuple[int, ...] | None = None, *, keepdims: bool = False) -> jax.Array:
    """Largest magnitude along axes; NaN if there is a NaN.

    Args:
      x: float32 array.
      axis: Axes to reduce; None for all.
      keepdims: Whether to keep the reduced axes, with size 1.

    Returns:
      float32 array.
    """
    # As integers: XLA's maximum of floats loses NaN on a CPU (openxla/xla#21461).
    bits = lax.bitcast_convert_type(x, jnp.int32) & 0x7FFFFFFF
    largest = jnp.max(bits, axis=axis, keepdims=keepdims)
    return lax.bitcast_convert_type(largest, jnp.float32)


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


def sum_of_neighbours(x: jax.Array) -> jax.Array:
    """Sum over the last axis, whose size is a power of two: each element meets its neighbour, then each pair the next.

    The first additions of a row fall to one thread of a kernel, which holds neighbours; only its last ones cross
    threads. Where the elements are products, they have to be exact, as a compiler may contract them into the additions.

    Args:
      x: float32 array [..., 2**k].

    Returns:
      float32 array [...].

    Example:
      >>> sum_of_neighbours(jnp.array([2.0**24, 0.0, 1.0, 1.0])).item() - 2**24
      2.0
    """
    while x.shape[-1] > 1:
        x = x[..., 0::2] + x[..., 1::2]
    return x[..., 0]
