import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_fp4attn import SegmentIds, recipes
from jax_fp4attn.config import OperatorConfig, Visibility, padded_head_size


def test_operator_configs_are_equal_and_hash_alike_when_their_fields_are():
    one, other = (OperatorConfig(recipes.train, 0.5, True, (1, 2)) for _ in range(2))
    assert one == other
    assert hash(one) == hash(other)
    for change in ({"recipe": recipes.square}, {"scale": 0.25}, {"is_causal": False}, {"window": None}):
        assert dataclasses.replace(one, **change) != one


def test_log2_scale_turns_natural_logs_into_base_two():
    assert OperatorConfig(recipes.train, 0.5, False, None).log2_scale == pytest.approx(0.5 / math.log(2), rel=1e-15)


@pytest.mark.parametrize(("head_size", "padded"), [(2, 64), (64, 64), (66, 128), (128, 128), (130, 256), (256, 256)])
def test_heads_are_padded_to_the_next_tile(head_size, padded):
    assert padded_head_size(head_size) == padded


def test_visibility_and_segment_ids_are_pytrees_of_their_arrays():
    ids = SegmentIds(jnp.ones((1, 2), jnp.int32), jnp.ones((1, 3), jnp.int32))
    visibility = Visibility(query_lengths=jnp.array([1]), segment_ids=ids)
    assert len(jax.tree.leaves(visibility)) == 3
    doubled = jax.jit(lambda v: jax.tree.map(lambda x: 2 * x, v))(visibility)
    assert isinstance(doubled.segment_ids, SegmentIds)
    np.testing.assert_array_equal(doubled.segment_ids.key_value, 2)
    assert doubled.mask is None
