import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest

from jax_fp4attn.code_map import (
    Affine,
    Cubic,
    Exponential,
    MapSchedule,
    MaxAffine,
    SignedSquare,
    paper_pairs,
    uniform,
    with_exponential,
)
from jax_fp4attn.reference.code_maps import apply_map, apply_schedule
from tests import oracles

MAPS = (
    Affine(1.5, 1.2),
    Exponential(-0.25),
    SignedSquare(0.64, 0.39, 0.68),
    MaxAffine(((0.453, 0.953), (2.272, -0.965), (1.0, 0.6))),
    Cubic(0.07430709, 0.28611863, 0.64670005, 0.99010784),
)
all_maps = pytest.mark.parametrize("code_map", MAPS, ids=lambda m: type(m).__name__)


class TestMaps:
    @all_maps
    def test_value_is_that_of_the_formula(self, code_map):
        raw = np.linspace(-40, 20, 601, dtype=np.float32)
        actual = apply_map(code_map, jnp.asarray(raw), 0.125, jnp.float32(0.75))
        expected = oracles.map_value(code_map, raw.astype(np.float64) * 0.125 + 0.75)
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)

    @all_maps
    def test_increases_where_codes_change(self, code_map):
        # Over the arguments whose codes lie between 0 and 6; the cubic turns outside.
        values = oracles.map_value(code_map, np.linspace(-1.5, math.log2(9), 500))
        assert (np.diff(values) > 0).all()

    @all_maps
    def test_a_masked_score_is_never_positive(self, code_map):
        value = apply_map(code_map, jnp.float32(-jnp.inf), 0.125, jnp.float32(3.0))
        assert not value > 0
        assert not jnp.isnan(value)

    @pytest.mark.parametrize(
        "make",
        [
            lambda: Affine(0.0, 1.0),
            lambda: Affine(-1.0, 1.0),
            lambda: Affine(math.nan, 1.0),
            lambda: Affine(1.0, math.inf),
            lambda: Affine("1", 1.0),
            lambda: Exponential(math.nan),
            lambda: SignedSquare(0.0, 0.0, 0.0),
            lambda: SignedSquare(1.0, 0.0, math.inf),
            lambda: MaxAffine(((1.0, 1.0),)),
            lambda: MaxAffine(((1.0, 1.0), (0.0, 1.0))),
            lambda: Cubic(0.0, 1.0, 1.0, 1.0),
            lambda: Cubic(1.0, math.nan, 1.0, 1.0),
            lambda: Affine(1e300, 0.0),
            lambda: Affine(1e-300, 0.0),
            lambda: Affine(True, 0.0),
            lambda: Exponential(1e300),
            lambda: MaxAffine([(1.0, 1.0), (2.0, 1.0)]),
            lambda: MaxAffine(([1.0, 1.0], [2.0, 1.0])),
            lambda: MapSchedule([Affine(1.0, 1.0)] * 4),
            lambda: MapSchedule((Affine(1.0, 1.0),) * 4, Exponential(), [(0,)] * 4),
            lambda: MapSchedule((Affine(1.0, 1.0),) * 4, Exponential(), ((0,),) * 4, [True, True]),
            lambda: MapSchedule((Affine(1.0, 1.0),) * 4, Exponential(), ((0,),) * 4, ("no", "no")),
            lambda: MapSchedule((Affine(1.0, 1.0),) * 4, Exponential(), ((1.5,),) * 4),
            lambda: MapSchedule((Affine(1.0, 1.0),) * 4, Exponential(), ((True,),) * 4),
            lambda: MapSchedule((Affine(1.0, 1.0),) * 4, Exponential(), (("a",),) * 4),
            lambda: MapSchedule((Affine(1.0, 1.0),) * 4, Exponential(), None),
        ],
    )
    def test_what_does_not_make_a_map_is_refused(self, make):
        with pytest.raises(ValueError, match=r"(Affine|Exponential|\w*Square|MaxAffine|Cubic|MapSchedule)\.\w+: exp"):
            make()

    @all_maps
    def test_maps_are_hashable_values(self, code_map):
        assert hash(dataclasses.replace(code_map)) == hash(code_map)
        assert dataclasses.replace(code_map) == code_map


class TestPaperPairs:
    @pytest.mark.parametrize("quarter", range(4))
    def test_density_one_is_q_q_plus_8_4_and_12(self, quarter):
        assert set(paper_pairs(1, quarter)) == {quarter, quarter + 8, 4, 12}

    def test_the_published_sets(self):
        assert paper_pairs(2, 0) == (0, 2, 4, 6, 8, 10, 12, 14)
        assert paper_pairs(2, 3) == (1, 3, 4, 6, 9, 11, 12, 14)
        assert paper_pairs(3, 1) == (1, 2, 3, 4, 5, 6, 9, 10, 11, 12, 13, 14)
        assert paper_pairs(3, 3) == (0, 1, 3, 4, 5, 6, 8, 9, 11, 12, 13, 14)

    @pytest.mark.parametrize("quarter", range(4))
    @pytest.mark.parametrize("density", range(5))
    def test_each_step_adds_four_pairs(self, density, quarter):
        pairs = paper_pairs(density, quarter)
        assert len(pairs) == len(set(pairs)) == 4 * density
        assert pairs == tuple(sorted(pairs))
        if density:
            assert set(paper_pairs(density - 1, quarter)) < set(pairs) <= set(range(16))

    @pytest.mark.parametrize(
        ("density", "quarter", "name"), [(5, 0, "density"), (-1, 0, "density"), (1, 4, "quarter"), (1, -1, "quarter")]
    )
    def test_arguments_out_of_range_are_refused(self, density, quarter, name):
        with pytest.raises(ValueError, match=f"{name}: expected 0 to [34], got"):
            paper_pairs(density, quarter)


class TestMapSchedule:
    def test_uniform_gives_every_quarter_the_map(self):
        assert uniform(MAPS[0]) == MapSchedule((MAPS[0],) * 4)

    def test_with_exponential_puts_it_on_the_published_pairs(self):
        schedule = with_exponential(MAPS[0], (0, 1, 3, 4), offset=0.5, query_tiles=(True, False))
        assert schedule.quarters == (MAPS[0],) * 4
        assert schedule.alternate == Exponential(0.5)
        assert schedule.alternate_pairs == ((), *(paper_pairs(d, q) for q, d in ((1, 1), (2, 3), (3, 4))))
        assert schedule.alternate_query_tiles == (True, False)
        assert with_exponential(MAPS[:4], (1, 0, 0, 0)).quarters == MAPS[:4]

    def test_every_element_takes_its_map(self):
        schedule = with_exponential(MAPS[1:], (1, 0, 2, 3), offset=1.0, query_tiles=(False, True))
        raw = np.random.default_rng(0).standard_normal((1, 260, 4, 32)).astype(np.float32)
        actual = apply_schedule(schedule, jnp.asarray(raw), 0.5, jnp.ones((1, 260, 4, 1)))
        expected = oracles.map_values(schedule, raw.astype(np.float64) * 0.5 + 1)
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)
        # Rows 128 to 255 are the odd query tile.
        exponential = 2.0 ** (raw * 0.5 + 2)
        takes = np.isclose(actual, exponential, rtol=1e-5)
        assert takes[0, 128:256, 0, 0:2].all()
        assert not takes[0, :128, 0, 0:2].all()
        assert not takes[0, 256:, 0, 0:2].all()

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"quarters": (MAPS[0],) * 3}, "quarters: expected a tuple of four code maps"),
            ({"quarters": (1.5,) * 4}, "quarters: expected a tuple of four code maps"),
            ({"alternate": 1.5}, "alternate: expected a code map"),
            ({"alternate_pairs": ((16,), (), (), ())}, "alternate_pairs: expected"),
            ({"alternate_pairs": ((-1,), (), (), ())}, "alternate_pairs: expected"),
            ({"alternate_pairs": ((1, 1), (), (), ())}, "alternate_pairs: expected"),
            ({"alternate_pairs": ((1,), (), ())}, "alternate_pairs: expected"),
            ({"alternate_pairs": ((), (), (), ())}, "given together"),
            ({"alternate": None}, "given together"),
            ({"alternate_query_tiles": (False, False)}, "alternate_query_tiles: expected a tuple of two bools"),
            ({"alternate_query_tiles": (True,)}, "alternate_query_tiles: expected a tuple of two bools"),
        ],
    )
    def test_schedules_that_make_no_sense_are_refused(self, changes, message):
        fields = {"quarters": (MAPS[0],) * 4, "alternate": Exponential(), "alternate_pairs": ((1,), (), (), ())}
        with pytest.raises(ValueError, match=f"MapSchedule.*{message}"):
            MapSchedule(**{**fields, **changes})
