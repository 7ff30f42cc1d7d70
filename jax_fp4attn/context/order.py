"""Which part of the sequence a shard holds.

With n shards, contiguous order gives shard i the i-th of n equal parts. Under a causal mask the last shard then has n
times the work of the first. In zigzag order the sequence has 2 n parts, of which shard i holds i and 2 n - 1 - i: all
shards have the same work, and a shard's own positions still increase.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_fp4attn.config import ContextOrder
from jax_fp4attn.context.trees import LaidOut


def zigzag_order(length: int, shards: int) -> np.ndarray:
    """The position that stands in each place of a sequence in zigzag order.

    Args:
      length: Of the sequence.
      shards: Number of shards.

    Returns:
      int32 [length], a permutation: ``x[:, zigzag_order(length, shards)]`` is x in zigzag order, and ``argsort`` of the
      permutation undoes it.

    Raises:
      ValueError: If ``length`` is not a positive multiple of ``2 * shards``, or there are no shards.

    Example:
      >>> zigzag_order(8, 2).tolist()
      [0, 1, 6, 7, 2, 3, 4, 5]
    """
    if shards < 1:
        raise ValueError(f"shards: expected at least 1, got {shards}")
    if length < 1 or length % (2 * shards):
        raise ValueError(f"length: expected a positive multiple of 2 * shards = {2 * shards}, got {length}")
    parts = np.arange(length, dtype=np.int32).reshape(2 * shards, -1)
    return np.concatenate([part for i in range(shards) for part in (parts[i], parts[2 * shards - 1 - i])])


def positions(order: ContextOrder, length: int, shard: jax.Array, shards: int) -> jax.Array:
    """Positions that a shard holds.

    Args:
      order: Of the sequence.
      length: Of the shard's part.
      shard: Its index, int32 [].
      shards: Number of shards.

    Returns:
      int32 [length].
    """
    if order == "contiguous":
        return shard * length + jnp.arange(length, dtype=jnp.int32)
    half = jnp.arange(length // 2, dtype=jnp.int32)
    return jnp.concatenate([shard * half.size + half, (2 * shards - 1 - shard) * half.size + half])


def exchange(axis: str, given: ContextOrder, wanted: ContextOrder, arrays: LaidOut) -> LaidOut:
    """Brings a split sequence from one order to another; every half of a shard's part travels once.

    Args:
      axis: The mesh axis over which the sequence is split.
      given: Order of the arrays.
      wanted: Order of the result.
      arrays: A shard's arrays.

    Returns:
      A shard's arrays.
    """
    shards = lax.axis_size(axis)
    if given == wanted or shards == 1:
        return arrays
    # Of 2 n parts the even ones are first halves in contiguous order, and each shard holds one of them in zigzag order.
    holder = [min(part, 2 * shards - 1 - part) for part in range(2 * shards)]
    hops = [[(part // 2, holder[part]) for part in range(parity, 2 * shards, 2)] for parity in (0, 1)]
    holds_even_first = lax.axis_index(axis) % 2 == 0
    first, second = arrays.halves()
    if wanted == "zigzag":
        even, odd = _send(axis, hops[0], first), _send(axis, hops[1], second)
        return even.where(holds_even_first, odd).join(odd.where(holds_even_first, even))
    even, odd = first.where(holds_even_first, second), second.where(holds_even_first, first)
    back = [[(target, source) for source, target in hop] for hop in hops]
    return _send(axis, back[0], even).join(_send(axis, back[1], odd))


def _send(axis: str, hops: list[tuple[int, int]], arrays: LaidOut) -> LaidOut:
    return arrays.along_sequence(lambda x, _: lax.ppermute(x, axis, hops))
