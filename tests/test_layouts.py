"""Layouts name the dimensions of the arrays that the steps hand to one another."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_fp4attn import layouts, recipes, reference, steps
from jax_fp4attn.config import ContextParallelism, OperatorConfig, Visibility
from jax_fp4attn.context import LaidOut
from jax_fp4attn.formats import BlockScaled
from tests.formats.oracles import assert_same_bytes
from tests.shapes import COMPILER_OPTIONS

SPLIT = ContextParallelism("seq", "contiguous")
RECIPES = {
    "train": recipes.train,
    "square": recipes.square,
    "nvfp4_pv": recipes.nvfp4_pv,
    "bf16": recipes.bf16,
    "amax": dataclasses.replace(recipes.train, qk_tensor_scale="amax"),
    "represented": dataclasses.replace(recipes.train, backward_qk="represented"),
}
# Halves of a sequence have tensor scales of their own.
WITHOUT_AMAX = {name: recipe for name, recipe in RECIPES.items() if recipe.qk_tensor_scale == "unit"}
every_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


def config(recipe, context=None):
    return OperatorConfig(recipe, scale=0.125, is_causal=False, window=None, context=context)


def draw(*shape):
    rng = np.random.default_rng(sum(shape))
    return jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)


def assert_names_every_dimension(names, arrays, sizes):
    names, arrays = jax.tree.leaves(names), jax.tree.leaves(arrays)
    for layout, x in zip(names, arrays, strict=True):
        assert len(layout) == x.ndim
        for name, size in zip(layout, x.shape, strict=True):
            assert size == sizes.get(name, size)


@every_recipe
@pytest.mark.parametrize("context", [None, SPLIT], ids=["whole", "split"])
def test_batch_and_heads(recipe, context):
    query, key = draw(3, 40, 10, 64), draw(3, 50, 5, 64)
    sizes = {"b": 3, "n": 10, "k": 5}
    quantize, quantize_for_training, row_operands = (
        functools.partial(jax.eval_shape, functools.partial(step, config(recipe, context)))
        for step in (steps.quantize, steps.quantize_for_training, steps.row_operands)
    )
    training = quantize_for_training(query, key, key, Visibility())
    assert_names_every_dimension(layouts.training_operands(training), training, sizes)
    forward = quantize(query, key, key, Visibility())
    assert_names_every_dimension(layouts.operands(forward), forward, sizes)
    backward = training.for_backward()
    assert_names_every_dimension(layouts.backward_operands(backward), backward, sizes)
    scale = jnp.ones((3, 5))
    rows = row_operands(query, jnp.zeros((3, 10, 40)), query, jnp.zeros((3, 10, 40)), scale)
    assert_names_every_dimension(layouts.row_operands(), rows, sizes)
    assert_names_every_dimension(layouts.GRADIENT_SCALE, scale, sizes)


@functools.partial(jax.jit, static_argnums=0, compiler_options=COMPILER_OPTIONS)
def quantize_for_training(recipe, query, key, value):
    return steps.quantize_for_training(config(recipe, SPLIT), query, key, value, Visibility())


@pytest.mark.parametrize("recipe", WITHOUT_AMAX.values(), ids=WITHOUT_AMAX)
def test_halves_of_a_split_sequence_are_the_operands_of_its_halves(recipe):
    query, key, value = draw(1, 256, 4, 64), draw(1, 256, 2, 64), draw(1, 256, 2, 80)[..., :64]
    whole = quantize_for_training(recipe, query, key, value)
    halves = LaidOut(whole, layouts.training_operands(whole)).halves()
    for half, part in zip(halves, (slice(128), slice(128, 256)), strict=True):
        own = quantize_for_training(recipe, query[:, part], key[:, part], value[:, part])
        assert_same_bytes(half.values, own)


def test_halves_of_rows_are_the_rows_of_halves():
    output, d_output = draw(1, 256, 4, 64), draw(1, 256, 4, 64)
    lse, d_lse = jnp.zeros((1, 4, 256)), jnp.float32(draw(1, 4, 256))
    scale = jnp.full((1, 2), 2.0)
    arguments = (output, lse, d_output, d_lse)
    names = ("bsn*", layouts.ROW_STATISTICS) * 2
    row_operands = jax.jit(functools.partial(reference.row_operands, config(recipes.train)))
    rows = row_operands(*arguments, scale)
    halves = LaidOut(rows, layouts.row_operands()).halves()
    for half, own in zip(halves, LaidOut(arguments, names).halves(), strict=True):
        assert_same_bytes(half.values, row_operands(*own.values, scale))


@every_recipe
def test_only_a_split_sequence_has_scales_in_rows(recipe):
    query, key = draw(1, 128, 4, 64), draw(1, 128, 2, 64)
    for context, layout in ((None, "pages"), (SPLIT, "rows")):
        quantize = functools.partial(steps.quantize, config(recipe, context))
        operands = jax.eval_shape(quantize, query, key, key, Visibility())
        tensors = [x for x in (operands.query, operands.key, operands.value) if isinstance(x, BlockScaled)]
        assert len(tensors) == (recipe.qk_format == "nvfp4") * 2 + (recipe.v_format in ("mxfp4", "nvfp4"))
        assert {x.scale_layout for x in tensors} <= {layout}
