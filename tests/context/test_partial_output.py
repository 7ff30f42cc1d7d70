import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_fp4attn.context import PartialOutput
from tests.assertions import assert_close

INF = np.inf


def partial(lse, output=1.0):
    lse = jnp.asarray(lse, jnp.float32).reshape(1, 1, -1)
    return PartialOutput(jnp.broadcast_to(jnp.float32(output), (*lse.shape, 2)), lse)


@given(st.lists(st.tuples(st.floats(-80, 80, width=32), st.floats(-80, 80, width=32)), min_size=1, max_size=8))
def test_merging_weighs_by_the_denominators(pairs):
    lse = np.array(pairs, np.float32).T
    merged = partial(lse[0], 1.0).merge(partial(lse[1], -3.0))
    wanted = np.logaddexp(*lse.astype(np.float64))
    weights = np.exp(lse.astype(np.float64) - wanted)
    assert_close(merged.lse[0, 0], jnp.asarray(wanted, jnp.float32), rtol=1e-6, atol=1e-6)
    assert_close(merged.output[0, 0, :, 0], jnp.asarray(weights[0] - 3 * weights[1], jnp.float32), rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    ("lse", "other", "merged_lse", "merged_output"),
    [
        (-INF, -INF, -INF, 0),
        (-INF, 2.0, 2.0, 7),
        (2.0, -INF, 2.0, 1),
        (INF, -INF, INF, 0),
        (INF, 2.0, INF, 0),
        (INF, INF, INF, 0),
        (1e30, -1e30, 1e30, 1),
        (-1e38, -1e38, -1e38, 4),
    ],
)
def test_infinite_and_huge_denominators(lse, other, merged_lse, merged_output):
    merged = partial(lse, 1.0).merge(partial(other, 7.0))
    np.testing.assert_array_equal(merged.lse.ravel(), np.float32(merged_lse))
    np.testing.assert_array_equal(merged.output.ravel(), merged_output)


def test_what_one_part_does_not_see_has_no_influence():
    # Output of a row that saw nothing is 0 by contract; merging must not rely on more than its lse.
    merged = partial(1.0, 5.0).merge(partial(-INF, 1e30))
    np.testing.assert_array_equal(merged.output, 5)


@pytest.mark.parametrize("values", [(np.nan, 0.0), (0.0, np.nan)], ids=["first", "second"])
def test_nan_stays_nan(values):
    merged = partial(values[0]).merge(partial(values[1]))
    assert np.isnan(merged.lse).all()
    assert np.isnan(merged.output).all()


def test_where_gives_nothing_that_could_change_another_part():
    nothing = partial(3.0, 9.0).where(jnp.asarray(False))
    merged = partial(-2.0, 1.5).merge(nothing)
    np.testing.assert_array_equal(merged.lse, -2)
    np.testing.assert_array_equal(merged.output, 1.5)
    np.testing.assert_array_equal(partial(3.0, 9.0).where(jnp.asarray(True)).output, 9)
