"""Section 1: the grid of non-causal shapes at head size 128."""

from tqdm import tqdm

from benchmarks.accuracy import published
from benchmarks.accuracy.figures import Figure, Section, accuracy_figures
from benchmarks.accuracy.forward import accuracies
from benchmarks.accuracy.metrics import Accuracy, mean
from jax_fp4attn import recipes

_RECIPES = (
    recipes.fast,
    recipes.accurate,
    recipes.accurate_raw_margin,
    recipes.nvfp4_pv,
    recipes.fp8_pv,
    recipes.square,
    recipes.square_rte_v,
    recipes.exact_map,
    recipes.two_piece,
)

# (S, rows of each head, heads, heads held at once)
_SHAPES = ((256, 256, 64, 16), (1024, 1024, 32, 4), (4096, 256, 24, 4), (32768, 256, 12, 2))
_QUICK_SHAPES = ((256, 256, 4, 4),)


def _measure(quick: bool) -> list[Figure]:
    shapes = _QUICK_SHAPES if quick else _SHAPES
    by_recipe: dict[str, list[Accuracy]] = {recipe.name: [] for recipe in _RECIPES}
    figures = []
    steps = sum(heads // group for _, _, heads, group in shapes) * len(_RECIPES)
    with tqdm(total=steps, desc="grid") as progress:
        for num_keys, rows, heads, group in shapes:
            measured = accuracies(_RECIPES, num_keys, rows=rows, heads=heads, group=group, progress=progress)
            for name, accuracy in measured.items():
                by_recipe[name].append(accuracy)
                figures += accuracy_figures(f"{name}, S={num_keys}", accuracy, published.grid_mean(name, num_keys))
    for name, measured_shapes in by_recipe.items():
        figures += accuracy_figures(
            f"{name}, mean over S",
            mean(measured_shapes),
            published.GRID_MEANS.get(name),
            published.REQUIRED_MEANS.get(name, (None, None)),
        )
    return figures


SECTION = Section(
    name="grid",
    title="Non-causal attention, head size 128",
    note=(
        "N(0, 1) inputs, one key/value head for each query head, against exact attention on the bfloat16 inputs. S=256 "
        "(64 heads) and S=1024 (32 heads) take all query rows, S=4096 (24 heads) and S=32768 (12 heads) 256 rows of "
        "each head. Published: the mean of the GB200 rows of that length, and the mean over all rows; the recipe "
        "nvfp4_pv stands for NVFP4 Q/K/P/V with an online maximum, fp8_pv for E4M3 P/V. square, square_rte_v, "
        "exact_map and two_piece are not in the paper."
    ),
    measure=_measure,
)
