"""Section 7: the constant by which a Direct-P denominator misses the softmax's."""

from collections.abc import Sequence

import jax.numpy as jnp
from tqdm import tqdm

from benchmarks.accuracy import published
from benchmarks.accuracy.exact import exact_attention
from benchmarks.accuracy.figures import Figure, Section, Within
from benchmarks.accuracy.forward import forward, quantize, represented
from benchmarks.accuracy.inputs import Sample, draw_groups
from jax_fp4attn import Recipe, recipes

# (S, rows of each head, heads)
_SHAPES = ((1024, 1024, 16), (4096, 256, 16))
_QUICK_SHAPES = ((256, 256, 4),)
_GROUP = 4


def direct_p_recipes() -> list[Recipe]:
    """The recipes with MXFP4 P, and two guarded ones with margins that video models use."""
    named = [recipe for recipe in recipes.named().values() if recipe.p_format == "mxfp4"]
    return [*named, recipes.guarded(10, 16), recipes.guarded_raw_margin(110, 16)]


def _is_causal(recipe: Recipe) -> bool:
    return recipe.name.startswith("causal")


def _mean_error(recipe: Recipe, samples: Sequence[Sample], num_keys: int) -> float:
    means = []
    for sample in samples:
        operands = quantize(recipe, sample)
        _, lse = forward(recipe, operands, num_keys, is_causal=_is_causal(recipe))
        values = represented(recipe, operands, num_keys)
        _, exact = exact_attention(values.query, values.key, values.value, is_causal=_is_causal(recipe))
        means.append(float(jnp.mean(lse - exact)))
    return sum(means) / len(means)


def _requirement(recipe: Recipe) -> Within | None:
    # The bias of a sampled sum's logarithm shrinks with S, so that no constant cancels it.
    if recipe.denominator == "sampled":
        return None
    return Within(-recipe.backward_lse_correction, published.LSE_TOLERANCE)


def _measure(quick: bool) -> list[Figure]:
    chosen = [recipes.accurate, recipes.causal_mxfp4] if quick else direct_p_recipes()
    figures = []
    for num_keys, rows, heads in _QUICK_SHAPES if quick else _SHAPES:
        samples = list(draw_groups(num_keys, rows=rows, heads=heads, group=_GROUP))
        for recipe in tqdm(chosen, desc=f"lse_bias, S={num_keys}"):
            if _is_causal(recipe) and rows < num_keys:
                continue  # needs all rows
            figures.append(
                Figure(
                    f"{recipe.name}, S={num_keys}",
                    "mean lse error",
                    _mean_error(recipe, samples, num_keys),
                    requirement=_requirement(recipe),
                )
            )
    return figures


SECTION = Section(
    name="lse_bias",
    title="Bias of the lse",
    note=(
        "N(0, 1) inputs, 16 heads, all rows at S=1024 and 256 of each head at S=4096: mean of the recipe's lse less "
        "the exact lse of the same quantised Q and K (nats; causal recipes with the causal mask). "
        "Recipe.backward_lse_correction is minus this mean; 'required' holds minus the recipe's constant. "
        "sampled_denominator, whose constant is 0, misses it by more than .005 at S=1024 and has no requirement: the "
        "logarithm of a sum over every eighth key is biased by about -6 / S. Not a figure of the paper."
    ),
    measure=_measure,
)
