import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fp4attn
from jax_fp4attn import SegmentIds, batch_dimensions, recipes
from tests.meshes import one_device, random_inputs

LENGTH, HEADS = 12, 2
RNG = np.random.default_rng(3)


@pytest.mark.parametrize(
    ("batch", "has_bias", "merged"),
    [
        ((), False, (1,)),
        ((3,), False, (3,)),
        ((3, 2), False, (3, 2)),
        ((3, 2, 4), False, (3, 8)),
        ((3, 2, 4), True, (24,)),
    ],
)
def test_merged_dimensions(batch, has_bias, merged):
    assert batch_dimensions.merge(batch, has_bias=has_bias) == merged


def restrictions(shape):
    """Name: options of a call with these batch dimensions."""
    scores = RNG.random((*shape, 1, LENGTH, LENGTH)) < 0.7
    ids = jnp.asarray(RNG.integers(0, 3, (*shape, LENGTH)), jnp.int32)
    return {
        "none": {},
        "mask of each": {"mask": jnp.asarray(scores)},
        "mask of some": {"mask": jnp.asarray(scores[:, :1])},
        "mask of all": {"mask": jnp.asarray(scores[:1, :1])},
        "bias of some": {"bias": jnp.asarray(RNG.standard_normal((shape[0], 1, HEADS, 1, LENGTH)), jnp.float32)},
        "lengths": {"key_value_seq_lengths": jnp.asarray(RNG.integers(0, LENGTH + 1, shape), jnp.int32)},
        "segments": {"segment_ids": SegmentIds(ids, ids)},
    }


@pytest.mark.parametrize("case", restrictions((3, 2)))
def test_two_dimensions_equal_one(case):
    shape = (3, 2)
    arrays = random_inputs(6, LENGTH, HEADS, 1, 16)
    options = restrictions(shape)[case]

    def flat(x):
        x = jnp.broadcast_to(x, (*shape, *x.shape[2:]))
        return x.reshape(6, *x.shape[2:])

    def run(options, query, key, value, d_out):
        attend = functools.partial(jax_fp4attn.attention, recipe=recipes.bf16, return_residual=True, **options)
        (out, lse), vjp = jax.vjp(attend, query, key, value)
        return out, lse, *vjp((d_out, jnp.zeros_like(lse)))

    nested = one_device(functools.partial(run, options), *(x.reshape(*shape, *x.shape[1:]) for x in arrays))
    merged = one_device(functools.partial(run, jax.tree.map(flat, options)), *arrays)
    for x, y in zip(nested, merged, strict=True):
        np.testing.assert_array_equal(np.asarray(x, np.float32).reshape(y.shape), np.asarray(y, np.float32))
