"""Section 8: every named recipe on the same inputs, for the plot."""

from tqdm import tqdm

from benchmarks.accuracy.figures import Figure, Section, accuracy_figures
from benchmarks.accuracy.forward import accuracies
from jax_fp4attn import recipes

NUM_KEYS = 1024


def _measure(quick: bool) -> list[Figure]:
    heads, rows = (4, 256) if quick else (16, 1024)
    named = recipes.named()
    chosen = [named[name] for name in ("fp8_pv", "bf16")] if quick else list(named.values())
    with tqdm(total=len(chosen) * heads // 4, desc="pareto") as progress:
        measured = accuracies(chosen, NUM_KEYS, rows=rows, heads=heads, group=4, progress=progress)
    return [figure for name, accuracy in measured.items() for figure in accuracy_figures(name, accuracy)]


SECTION = Section(
    name="pareto",
    title="All named recipes",
    note=(
        "S=1024, 16 heads, all rows, against exact attention, all without a mask (also the recipes meant for causal "
        "attention), so that they compare. pareto.png shows this section."
    ),
    measure=_measure,
)
