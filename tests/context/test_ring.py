"""Which rows meet which keys, with positions in place of operands."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jax_fp4attn.context import LaidOut, Visit, run_balanced_causal, run_contiguous, zigzag_order

LENGTH = 4  # of a shard's part
SHARDS = [1, 2, 3, 4, 5, 8]


def make_visit(sees):
    """Contributions to rows are sums over the keys that they see, and the other way round; pairs are counted."""

    def compute(rows, keys, relation):
        (row_positions, row_numbers), (key_positions, key_numbers) = rows.values, keys.values
        visible = sees(relation, row_positions[:, :, None], key_positions[:, None])
        if relation.key_offset is not None:
            offset = key_positions[0, 0] - row_positions[0, 0]
            visible &= relation.key_offset == offset  # A wrong offset loses the pair.
        shape = visible.shape
        for_rows = jnp.sum(jnp.where(visible, key_numbers[:, None], 0), 2)
        for_keys = jnp.sum(jnp.where(visible, row_numbers[:, :, None], 0), 1)
        pairs = jnp.full_like(row_positions, shape[2])
        return LaidOut((for_rows, pairs), ("bs", "bs")), LaidOut(for_keys, "bs")

    def add(x, y):
        return jax.tree.map(jnp.add, x, y)

    def where(x, condition):
        return jax.tree.map(lambda part: jnp.where(condition, part, 0), x)

    return Visit(compute, add, where)


def run_ring(devices, shards, runner, order):
    length = LENGTH * shards
    rng = np.random.default_rng(0)
    row_numbers, key_numbers = rng.integers(1, 1000, (2, 1, length)).astype(np.int32)
    arrays = [np.broadcast_to(order, (1, length)), row_numbers[:, order], key_numbers[:, order]]

    def on_shard(positions, rows, keys):
        for_rows, for_keys = runner(LaidOut((positions, rows), ("bs", "bs")), LaidOut((positions, keys), ("bs", "bs")))
        return *for_rows.values, for_keys.values

    mesh = Mesh(np.array(devices[:shards]), ("seq",))
    spec = P(None, "seq")
    mapped = jax.shard_map(on_shard, mesh=mesh, in_specs=(spec,) * 3, out_specs=(spec,) * 3)
    results = [np.asarray(x)[0][np.argsort(order)] for x in jax.jit(mapped)(*map(jnp.asarray, arrays))]
    return results, row_numbers[0], key_numbers[0]


def assert_pairs(results, row_numbers, key_numbers, visible):
    for_rows, _, for_keys = results
    np.testing.assert_array_equal(for_rows, visible @ key_numbers)
    np.testing.assert_array_equal(for_keys, row_numbers @ visible)


@pytest.mark.parametrize("shards", SHARDS)
def test_balanced_causal_meets_every_earlier_key_once_and_no_later_one(shards, cpu_devices):
    visit = make_visit(lambda relation, row, key: (key <= row) if relation.is_aligned else jnp.ones_like(key <= row))
    results, *numbers = run_ring(
        cpu_devices, shards, lambda *x: run_balanced_causal(visit, "seq", *x), zigzag_order(LENGTH * shards, shards)
    )
    assert_pairs(results, *numbers, np.tri(LENGTH * shards, dtype=np.int32))


@pytest.mark.parametrize("shards", SHARDS)
def test_balanced_causal_gives_all_shards_the_same_work(shards, cpu_devices):
    visit = make_visit(lambda relation, row, key: key <= row)
    (_, pairs, _), *_ = run_ring(
        cpu_devices, shards, lambda *x: run_balanced_causal(visit, "seq", *x), zigzag_order(LENGTH * shards, shards)
    )
    shard_of_position = np.argsort(zigzag_order(LENGTH * shards, shards)) // LENGTH
    work = np.bincount(shard_of_position, weights=pairs)
    np.testing.assert_array_equal(work, work[0])
    # Its own square, and half a square for each of the others.
    assert work[0] == LENGTH**2 + (shards - 1) * LENGTH**2 / 2


@pytest.mark.parametrize("shards", SHARDS)
def test_contiguous_meets_every_key_once(shards, cpu_devices):
    visit = make_visit(lambda relation, row, key: jnp.ones_like(key <= row))
    results, *numbers = run_ring(
        cpu_devices,
        shards,
        lambda *x: run_contiguous(visit, "seq", *x, (LENGTH, LENGTH), None),
        np.arange(LENGTH * shards),
    )
    assert_pairs(results, *numbers, np.ones((LENGTH * shards,) * 2, np.int32))


@pytest.mark.parametrize(
    "window", [(0, 0), (1, 0), (4, 0), (5, 0), (9, 0), (100, 0), (3, 2), (0, 7), (100, 100)], ids=str
)
@pytest.mark.parametrize("shards", [1, 2, 5])
def test_windows_meet_what_they_hold(window, shards, cpu_devices):
    left, right = window
    visit = make_visit(lambda relation, row, key: (row - left <= key) & (key <= row + right))
    results, *numbers = run_ring(
        cpu_devices,
        shards,
        lambda *x: run_contiguous(visit, "seq", *x, (LENGTH, LENGTH), window),
        np.arange(LENGTH * shards),
    )
    positions = np.arange(LENGTH * shards)
    offset = positions - positions[:, None]
    assert_pairs(results, *numbers, ((-left <= offset) & (offset <= right)).astype(np.int32))


@pytest.mark.parametrize(("left", "stops"), [(0, 0), (1, 1), (4, 1), (5, 2), (100, 4)])
def test_a_causal_window_stops_at_the_last_key_that_it_holds(left, stops, cpu_devices):
    visit = make_visit(lambda relation, row, key: (row - left <= key) & (key <= row))
    (_, pairs, _), *_ = run_ring(
        cpu_devices, 5, lambda *x: run_contiguous(visit, "seq", *x, (LENGTH, LENGTH), (left, 0)), np.arange(5 * LENGTH)
    )
    np.testing.assert_array_equal(pairs, LENGTH * (stops + 1))
