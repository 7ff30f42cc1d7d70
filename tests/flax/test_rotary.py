"""The adjacent-pair rotary embedding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_fp4attn.flax import apply_rotary
from tests.assertions import assert_close

THETA = 500.0


def _normal(*shape: int, seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


def _by_complex_numbers(x: np.ndarray, positions: np.ndarray, theta: float) -> np.ndarray:
    """Channels 2i and 2i + 1 as one complex number, turned by position * theta ** (-2i / H)."""
    head_size = x.shape[-1]
    angles = positions[..., None, None] * theta ** (-np.arange(0, head_size, 2) / head_size)
    turned = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * angles)
    return np.stack([turned.real, turned.imag], axis=-1).reshape(x.shape)


@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
def test_is_a_rotation_of_adjacent_pairs(batch):
    x = _normal(*batch, 5, 2, 6)
    expected = _by_complex_numbers(np.asarray(x, np.float64), np.arange(5), THETA)
    assert_close(apply_rotary(x, theta=THETA), expected.astype(np.float32), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(5,), (2, 5), (1, 5)])
@pytest.mark.parametrize("dtype", [jnp.int32, jnp.float32])
def test_takes_positions_of_the_sequence_or_of_each_batch_entry(shape, dtype):
    x = _normal(2, 5, 2, 6)
    positions = jax.random.randint(jax.random.key(1), shape, 0, 1000)
    expected = _by_complex_numbers(np.asarray(x, np.float64), np.asarray(positions), THETA)
    actual = apply_rotary(x, positions.astype(dtype), THETA)
    assert_close(actual, expected.astype(np.float32), rtol=0, atol=1e-3)


def test_scores_depend_on_distance_only():
    query, key = _normal(1, 1, 8), _normal(1, 1, 8, seed=1)

    def score(i, j):
        return (apply_rotary(query, jnp.array([i])) * apply_rotary(key, jnp.array([j]))).sum()

    assert_close(score(7, 3), score(104, 100), rtol=1e-4, atol=1e-5)
    assert abs(score(7, 3) - score(7, 4)) > 1e-3


def test_rounds_once_from_float32():
    x = _normal(4, 1, 8).astype(jnp.bfloat16)
    expected = apply_rotary(x.astype(jnp.float32)).astype(jnp.bfloat16)
    assert_close(apply_rotary(x), expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("x", "arguments", "error", "message"),
    [
        (jnp.ones((4, 8)), {}, ValueError, r"x: expected \[\*B, T, N, H\], got shape \(4, 8\)"),
        (jnp.ones((4, 1, 7)), {}, ValueError, "x: expected an even head size .* got H=7"),
        (jnp.ones((4, 1, 8), jnp.int32), {}, TypeError, "x: expected a floating dtype, got int32"),
        (jnp.ones((4, 1, 8)), {"theta": 0.0}, ValueError, "theta: expected a finite positive number, got 0"),
        (jnp.ones((4, 1, 8)), {"theta": float("inf")}, ValueError, "theta: .* got inf"),
        (jnp.ones((4, 1, 8)), {"positions": np.arange(3)}, ValueError, r"positions: expected shape \(4,\)"),
        (
            jnp.ones((2, 4, 1, 8)),
            {"positions": np.ones((3, 4))},
            ValueError,
            r"positions: .* or \(2, 4\), got \(3, 4\)",
        ),
        (jnp.ones((2, 4, 1, 8)), {"positions": np.int32(3)}, ValueError, r"positions: .* got \(\)"),
        (jnp.ones((4, 1, 8)), {"positions": np.ones(4, bool)}, TypeError, "positions: expected an integer or floating"),
    ],
)
def test_refuses(x, arguments, error, message):
    with pytest.raises(error, match=message):
        apply_rotary(x, **arguments)
