"""The travel of keys around the ring, and what each shard computes at every stop."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_fp4attn.context.trees import LaidOut

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Relation:
    """How a set of rows sees a set of keys.

    Attributes:
      is_aligned: Whether both hold the same positions.
      key_offset: int32 [], position of the first key minus that of the first row, where the rows' window has to be
        applied; None where every row sees every key (or, if aligned, where both begin at the same position).
    """

    is_aligned: bool
    key_offset: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class Visit:
    """What happens where keys meet rows.

    Attributes:
      compute: ``compute(rows, keys, relation) -> (for rows, for keys)``, contributions of the pair to both.
      merge: ``merge(x, y)`` of two contributions to the same rows. Those to the same keys are added.
      where: ``where(x, condition)``, a contribution to rows or one that changes nothing.
    """

    compute: Callable[[LaidOut, LaidOut, Relation], tuple[LaidOut, LaidOut]]
    merge: Callable[[PyTree, PyTree], PyTree]
    where: Callable[[PyTree, jax.Array], PyTree]

    def merge_rows(self, x: LaidOut, y: LaidOut) -> LaidOut:
        """Merges contributions to rows."""
        return LaidOut(self.merge(x.values, y.values), x.layouts)

    def rows_where(self, x: LaidOut, condition: jax.Array) -> LaidOut:
        """A contribution to rows, or none."""
        return LaidOut(self.where(x.values, condition), x.layouts)


def run_contiguous(
    visit: Visit, axis: str, rows: LaidOut, keys: LaidOut, lengths: tuple[int, int], window: tuple[int, int] | None
) -> tuple[LaidOut, LaidOut]:
    """Every row sees every key, but for a window (causality is one); shards hold contiguous parts.

    Args:
      visit: What happens where keys meet rows.
      axis: The mesh axis.
      rows: The shard's rows.
      keys: The shard's keys.
      lengths: Number of rows and of keys of a shard.
      window: (left, right) in positions, or None for no restriction.

    Returns:
      Contributions of all keys to the shard's rows, and of all rows to the shard's keys.
    """
    num_rows, num_keys = lengths
    shard, shards = lax.axis_index(axis), lax.axis_size(axis)

    def stop(distance: jax.Array | int, visitors: LaidOut) -> tuple[LaidOut, LaidOut]:
        if window is None:
            return visit.compute(rows, visitors, Relation(is_aligned=False))
        offset = (shard - distance) % shards * num_keys - shard * num_rows
        return visit.compute(rows, visitors, Relation(is_aligned=False, key_offset=offset))

    stops = shards - 1
    if window is not None and window[1] == 0:
        stops = min(stops, -(-window[0] // num_keys))  # Keys farther back are seen by no row.
    return _travel(visit, axis, keys, stop(0, keys), stop, stops)


def run_balanced_causal(visit: Visit, axis: str, rows: LaidOut, keys: LaidOut) -> tuple[LaidOut, LaidOut]:
    """A row sees no later key; shards hold their parts in zigzag order, the same positions of rows and keys.

    Of two shards' four pairs of halves, two have all keys before all rows, whichever shard comes first, and the other
    two see nothing. One of the two is always that of the later half of the rows and the earlier half of the keys.

    Args:
      visit: What happens where keys meet rows.
      axis: The mesh axis.
      rows: The shard's rows.
      keys: The shard's keys.

    Returns:
      Contributions of all keys to the shard's rows, and of all rows to the shard's keys.
    """
    early_rows, late_rows = rows.halves()
    shard = lax.axis_index(axis)

    def stop(distance: jax.Array | int, visitors: LaidOut) -> tuple[LaidOut, LaidOut]:
        early_keys, late_keys = visitors.halves()
        from_earlier_shard = shard >= distance
        # Both pairs in one call, as a batch of twice the size.
        for_rows, for_keys = visit.compute(
            late_rows.stack(early_rows.where(from_earlier_shard, late_rows)),
            early_keys.stack(early_keys.where(from_earlier_shard, late_keys)),
            Relation(is_aligned=False),
        )
        (late, other), (early, other_keys) = for_rows.unstack(), for_keys.unstack()
        for_early_rows = visit.rows_where(other, from_earlier_shard)
        for_late_rows = visit.merge_rows(late, visit.rows_where(other, ~from_earlier_shard))
        nothing = _zeros_like(early)
        for_early_keys = _add(early, other_keys.where(from_earlier_shard, nothing))
        for_late_keys = nothing.where(from_earlier_shard, other_keys)
        return for_early_rows.join(for_late_rows), for_early_keys.join(for_late_keys)

    own = visit.compute(rows, keys, Relation(is_aligned=True))
    return _travel(visit, axis, keys, own, stop, lax.axis_size(axis) - 1)


def _travel(
    visit: Visit,
    axis: str,
    keys: LaidOut,
    own: tuple[LaidOut, LaidOut],
    stop: Callable[[jax.Array | int, LaidOut], tuple[LaidOut, LaidOut]],
    stops: int,
) -> tuple[LaidOut, LaidOut]:
    """Sends keys, and with them the contributions to them, to the next shard ``stops`` times, and the latter home."""
    for_rows, for_keys = own
    if stops == 0:
        return own
    keys, for_keys = _shift(axis, 1, keys), _shift(axis, 1, for_keys)

    def arrive(distance: jax.Array | int, keys: LaidOut, for_rows: LaidOut, for_keys: LaidOut) -> tuple[LaidOut, ...]:
        new_for_rows, new_for_keys = stop(distance, keys)
        return visit.merge_rows(for_rows, new_for_rows), _add(for_keys, new_for_keys)

    def step(carry: tuple[PyTree, ...], distance: jax.Array) -> tuple[tuple[PyTree, ...], None]:
        here, rows_now, keys_now = (
            LaidOut(values, x.layouts) for values, x in zip(carry, (keys, for_rows, for_keys), strict=True)
        )
        # Does not wait for what is computed here, so that travel and computation can overlap.
        following = _shift(axis, 1, here)
        rows_now, keys_now = arrive(distance, here, rows_now, keys_now)
        return (following.values, rows_now.values, _shift(axis, 1, keys_now).values), None

    if stops > 1:
        carry = (keys.values, for_rows.values, for_keys.values)
        carry, _ = lax.scan(step, carry, jnp.arange(1, stops))
        keys, for_rows, for_keys = (
            LaidOut(values, x.layouts) for values, x in zip(carry, (keys, for_rows, for_keys), strict=True)
        )
    for_rows, for_keys = arrive(stops, keys, for_rows, for_keys)
    return for_rows, _shift(axis, -stops, for_keys)


def _shift(axis: str, distance: int, x: LaidOut) -> LaidOut:
    shards = lax.axis_size(axis)
    hops = [(shard, (shard + distance) % shards) for shard in range(shards)]
    return x.along_sequence(lambda array, _: lax.ppermute(array, axis, hops))


def _add(x: LaidOut, y: LaidOut) -> LaidOut:
    return LaidOut(jax.tree.map(jnp.add, x.values, y.values), x.layouts)


def _zeros_like(x: LaidOut) -> LaidOut:
    return LaidOut(jax.tree.map(jnp.zeros_like, x.values), x.layouts)
