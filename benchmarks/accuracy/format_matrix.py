"""Section 3: the NVFP4-QK / MXFP4-PV column of the format matrix."""

from tqdm import tqdm

from benchmarks.accuracy import published
from benchmarks.accuracy.figures import Figure, Section, accuracy_figures
from benchmarks.accuracy.forward import accuracies
from jax_fp4attn import recipes

# (S, rows of each head, heads, heads held at once)
_SHAPES = ((256, 256, 64, 16), (1024, 256, 32, 4), (2048, 256, 24, 4), (4096, 256, 24, 4), (8192, 256, 24, 4))
_QUICK_SHAPES = ((256, 256, 4, 4),)


def _measure(quick: bool) -> list[Figure]:
    figures = []
    for num_keys, rows, heads, group in tqdm(_QUICK_SHAPES if quick else _SHAPES, desc="format_matrix"):
        measured = accuracies((recipes.sampled_denominator,), num_keys, rows=rows, heads=heads, group=group)
        for name, accuracy in measured.items():
            figures += accuracy_figures(f"{name}, S={num_keys}", accuracy, published.FORMAT_MATRIX[num_keys])
    return figures


SECTION = Section(
    name="format_matrix",
    title="Format matrix: NVFP4 Q/K, MXFP4 P/V",
    note=(
        "The recipe sampled_denominator, against exact attention; 256 rows of each head, 64 heads at S=256, 32 at "
        "S=1024, 24 otherwise. Published: the mean of the rows of that length."
    ),
    measure=_measure,
)
