"""A mapped dimension joins the batch where a call runs, on one device or shard, and leaves it again."""

import jax
import jax.numpy as jnp


def join_batch(
    leaves: tuple[jax.Array, ...], mapped: tuple[bool, ...], layouts: tuple[str, ...], *, summed: bool
) -> tuple[jax.Array, ...]:
    """Makes one batch of the mapped dimension and the batch.

    Args:
      leaves: Arguments; those that are mapped have a leading dimension for it.
      mapped: Which are.
      layouts: Their layouts without it.
      summed: Whether some result is a sum over the batch; nothing may broadcast along the longer one then.

    Returns:
      Arguments whose batch is that many times longer.
    """
    size = next(x.shape[0] for x, is_mapped in zip(leaves, mapped, strict=True) if is_mapped)
    batch = next(
        x.shape[1 if is_mapped else 0]
        for x, is_mapped, layout in zip(leaves, mapped, layouts, strict=True)
        if layout[:1] == "b"
    )
    joined = []
    for x, is_mapped, layout in zip(leaves, mapped, layouts, strict=True):
        if not is_mapped and layout[:1] != "b" and not (summed and layout):
            joined.append(x)  # Broadcast along the batch, and still broadcast along the longer one.
            continue
        x = x if is_mapped else x[None]
        x = jnp.broadcast_to(x, (size, batch, *x.shape[2:]))
        joined.append(x.reshape(size * batch, *x.shape[2:]))
    return tuple(joined)


def split_batch(outputs: tuple[jax.Array, ...], size: int, batches: tuple[int, ...] | None) -> tuple[jax.Array, ...]:
    """Takes the mapped dimension out of the batch of results.

    Args:
      outputs: Results with the joined batch.
      size: Of the mapped dimension.
      batches: The batch of each result without the mapped dimension, 1 where it is a sum; None if nothing is summed.

    Returns:
      Results with the mapped dimension first.
    """
    split = [x.reshape(size, -1, *x.shape[1:]) for x in outputs]
    if batches is None:
        return tuple(split)
    # A result that is summed over the batch stays separate for each member of the mapped dimension.
    return tuple(
        jnp.sum(x, axis=1, keepdims=True) if batch == 1 != x.shape[1] else x
        for x, batch in zip(split, batches, strict=True)
    )
