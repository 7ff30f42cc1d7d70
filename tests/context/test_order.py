import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jax_fp4attn.context import LaidOut, exchange, positions, zigzag_order

SHARDS = [1, 2, 3, 4, 5, 8]


@pytest.fixture(name="run")
def _run(cpu_devices):
    """Runs a function of a shard on arrays whose last dimension is split over some devices."""

    def run(shards, function, *arrays):
        mesh = Mesh(np.array(cpu_devices[:shards]), ("seq",))
        specs = tuple(P(*(None,) * (x.ndim - 1), "seq") for x in arrays)
        return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=specs))(*arrays)

    return run


@pytest.mark.parametrize("shards", SHARDS)
def test_zigzag_pairs_the_parts_from_both_ends(shards):
    parts = zigzag_order(6 * shards, shards).reshape(shards, 2, 3)
    np.testing.assert_array_equal(parts[:, 0], np.arange(3 * shards).reshape(shards, 3))
    np.testing.assert_array_equal(parts[:, 1], np.arange(3 * shards, 6 * shards).reshape(shards, 3)[::-1])


@pytest.mark.parametrize("length", [-8, 0, 0.5, 1, 7])
def test_zigzag_refuses_what_does_not_split_into_halves(length):
    with pytest.raises(ValueError, match=r"length: expected a positive multiple of 2 \* shards = 8"):
        zigzag_order(length, 4)


def test_zigzag_needs_shards():
    with pytest.raises(ValueError, match="shards: expected at least 1, got 0"):
        zigzag_order(8, 0)


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
@pytest.mark.parametrize("shards", SHARDS)
def test_positions_of_all_shards_make_the_order(shards, order, run):
    def shard_positions(x):
        return positions(order, x.shape[0], jax.lax.axis_index("seq"), shards)

    expected = zigzag_order(6 * shards, shards) if order == "zigzag" else np.arange(6 * shards)
    (actual,) = run(shards, lambda x: (shard_positions(x),), jnp.zeros(6 * shards, jnp.int32))
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("shards", SHARDS)
def test_exchange_permutes_every_array_along_its_sequence_and_undoes_it(shards, run):
    arrays = jnp.arange(4 * shards)[None], jnp.arange(24 * shards, dtype=jnp.uint8).reshape(2, 3, 4 * shards)
    layouts = ("bs", "b*s")

    def move(given, wanted, *arrays):
        return exchange("seq", given, wanted, LaidOut(arrays, layouts)).values

    moved = run(shards, functools.partial(move, "contiguous", "zigzag"), *arrays)
    order = zigzag_order(4 * shards, shards)
    for x, y in zip(moved, arrays, strict=True):
        np.testing.assert_array_equal(x, y[..., order])
        assert x.dtype == y.dtype
    back = run(shards, functools.partial(move, "zigzag", "contiguous"), *moved)
    for x, y in zip(back, arrays, strict=True):
        np.testing.assert_array_equal(x, y)


def test_exchange_leaves_alone_what_has_no_sequence_and_what_is_in_order(run):
    def move(x, scale):
        whole = exchange("seq", "contiguous", "zigzag", LaidOut((x, scale), ("s", "*")))
        assert exchange("seq", "zigzag", "zigzag", whole) is whole
        return whole.values

    x, scale = run(2, move, jnp.arange(8), jnp.arange(8))
    np.testing.assert_array_equal(x, [0, 1, 6, 7, 2, 3, 4, 5])
    np.testing.assert_array_equal(scale, jnp.arange(8))
