"""Section 4: `fast` with a growing share of exact exponentials."""

import dataclasses

from tqdm import tqdm

from benchmarks.accuracy import published
from benchmarks.accuracy.figures import Figure, Section, accuracy_figures
from benchmarks.accuracy.forward import accuracies
from jax_fp4attn import Recipe, recipes
from jax_fp4attn.code_map import Affine, with_exponential

_AFFINE = Affine(1.5, 1.2)


def _recipe(density: int) -> Recipe:
    if density == 0:
        return recipes.fast
    code_map = with_exponential(_AFFINE, (density,) * 4, query_tiles=(False, True))
    return dataclasses.replace(recipes.fast, name=f"density {density}", code_map=code_map)


def _measure(quick: bool) -> list[Figure]:
    num_keys, heads = (256, 4) if quick else (4096, 24)
    by_density = {density: _recipe(density) for density in published.DENSITY_SWEEP}
    with tqdm(total=len(by_density) * heads // 4, desc="density_sweep") as progress:
        # Both parities of query tiles: two tiles of 128 rows.
        measured = accuracies(by_density.values(), num_keys, rows=256, heads=heads, group=4, progress=progress)
    figures = []
    for density, recipe in by_density.items():
        figures += accuracy_figures(f"density {density}", measured[recipe.name], published.DENSITY_SWEEP[density])
    return figures


SECTION = Section(
    name="density_sweep",
    title="Share of exact exponentials in fast",
    note=(
        "S=4096, 24 heads, 256 rows (one even and one odd query tile) of each head. Density d takes the exponential "
        "for 4 d of the 16 pairs of a quarter, in odd query tiles only, which is what reproduces the published B300 "
        "sweep; in both tiles the gain would be twice as large."
    ),
    measure=_measure,
)
