import dataclasses

import numpy as np
import pytest

from jax_fp4attn import recipes
from jax_fp4attn.code_map import Affine, Cubic, Exponential, MaxAffine, SignedSquare, uniform, with_exponential
from jax_fp4attn.native.attributes import map_text, recipe_attributes


def test_every_field_with_a_meaning_is_an_attribute_of_a_type_that_does_not_depend_on_its_value():
    kinds = [
        {name: type(value) for name, value in recipe_attributes(recipe).items()} for recipe in recipes.named().values()
    ]
    fields = {f"recipe_{field.name}" for field in dataclasses.fields(recipes.train)} - {"recipe_name"}
    for found in kinds:
        assert found.keys() == fields
        # The exponent rules are a name or a number.
        rules = {"recipe_p_exponent_rule", "recipe_v_exponent_rule"}
        assert {name for name in fields if found[name] is not kinds[0][name]} <= rules


def test_values():
    attributes = recipe_attributes(recipes.causal_mxfp4)
    assert attributes["recipe_margin"] == np.float32(64)
    assert attributes["recipe_margin"].dtype == np.float32
    assert attributes["recipe_p_scale_shift"] == 32
    assert attributes["recipe_p_scale_shift"].dtype == np.int32
    assert attributes["recipe_row_reference"] == "anchor"
    assert attributes["recipe_p_exponent_rule"] == "ceil"
    assert recipe_attributes(recipes.train)["recipe_code_map"] == "none"


def test_recipes_that_differ_have_attributes_that_differ():
    named = list(recipes.named().values())
    texts = {tuple(sorted((name, str(value)) for name, value in recipe_attributes(recipe).items())) for recipe in named}
    assert len(texts) == len(set(named))


@pytest.mark.parametrize(
    ("schedule", "text"),
    [
        (uniform(Affine(1.5, 1.2)), "affine(1.5,1.2)"),
        (uniform(SignedSquare(0.64, 0.39, 0.68)), "signedsquare(0.64,0.39,0.68)"),
        (uniform(MaxAffine(((0.5, 1.0), (2.0, -1.0)))), "maxaffine(0.5:1.0:2.0:-1.0)"),
        (
            with_exponential((Affine(1.0, 2.0),) + (Cubic(1.0, 2.0, 3.0, 4.0),) * 3, (1, 0, 0, 0)),
            "affine(1.0,2.0);cubic(1.0,2.0,3.0,4.0);cubic(1.0,2.0,3.0,4.0);cubic(1.0,2.0,3.0,4.0)"
            "|exponential(0.0)|0,4,8,12;;;|xx",
        ),
        (
            with_exponential(Exponential(0.1), (0, 0, 0, 1), query_tiles=(False, True)),
            "exponential(0.1)|exponential(0.0)|;;;3,4,11,12|-x",
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_text_of_code_maps(schedule, text):
    assert map_text(schedule) == text
