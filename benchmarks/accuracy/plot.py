"""Pareto plot: cosine against relative L2 error of every recipe."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Canvas

from benchmarks.accuracy import pareto, published
from benchmarks.accuracy.figures import Figure
from benchmarks.accuracy.metrics import Accuracy
from jax_fp4attn import recipes

_COLORS = {"mxfp4": "#1f77b4", "nvfp4": "#d95f02", "e4m3": "#1b9e77", "bf16": "#555555"}
_LABEL_STEP = 0.042  # of the axis, between two labels


def write_plot(path: Path, figures: Sequence[Figure]) -> None:
    """Draws the figures of the section `pareto` beside the published points.

    Args:
      path: PNG to write.
      figures: Cosine and relative L2 error of each recipe.
    """
    points: dict[str, dict[str, float]] = {}
    for figure in figures:
        points.setdefault(figure.case, {})[figure.quantity] = figure.ours
    measured = {name: Accuracy(x["cosine"], x["rel-L2"]) for name, x in points.items()}

    canvas = Canvas(figsize=(9, 6), layout="constrained")
    FigureCanvasAgg(canvas)
    axes = canvas.add_subplot()
    named = recipes.named()
    for p_format, color in _COLORS.items():
        chosen = [accuracy for name, accuracy in measured.items() if named[name].p_format == p_format]
        if chosen:
            label = f"{p_format} P and V"
            axes.scatter([a.rel_l2 for a in chosen], [a.cosine for a in chosen], s=26, color=color, label=label)
    theirs = [a for name in measured if (a := published.grid_mean(name, pareto.NUM_KEYS)) is not None]
    axes.scatter(
        [a.rel_l2 for a in theirs],
        [a.cosine for a in theirs],
        s=90,
        facecolors="none",
        edgecolors="black",
        linewidths=0.8,
        label=f"published ({published.SOURCE})",
    )
    # A margin at the right for the labels.
    axes.set_xlim(-0.015, 1.8 * max(a.rel_l2 for a in measured.values()))
    _label_points(axes, measured)
    axes.set_xlabel("relative L2 error (lower is better)")
    axes.set_ylabel("cosine (higher is better)")
    axes.set_title(f"Output against exact attention, N(0, 1) inputs, S={pareto.NUM_KEYS}, head size 128")
    axes.grid(alpha=0.25)
    axes.legend(loc="lower left")
    # Without the version of matplotlib, which would change the file and nothing else.
    canvas.savefig(path, dpi=100, metadata={"Software": None})


def _label_points(axes, measured: Mapping[str, Accuracy]) -> None:
    """Labels in a column at the right, joined to their points; recipes at the same point share a label."""
    groups: dict[tuple[float, float], list[str]] = {}
    for name, accuracy in sorted(measured.items(), key=lambda item: -item[1].cosine):
        groups.setdefault((round(accuracy.rel_l2, 3), round(accuracy.cosine, 3)), []).append(name)
    points = [measured[names[0]] for names in groups.values()]
    column = 0.63 * axes.get_xlim()[1]
    heights = _spread([point.cosine for point in points], *axes.get_ylim())
    for names, point, height in zip(groups.values(), points, heights, strict=True):
        axes.annotate(
            ", ".join(names),
            xy=(point.rel_l2, point.cosine),
            xytext=(column, height),
            fontsize=8,
            va="center",
            arrowprops={"arrowstyle": "-", "color": "0.7", "linewidth": 0.6, "shrinkB": 3, "relpos": (0.0, 0.5)},
        )


def _spread(wanted: list[float], bottom: float, top: float) -> list[float]:
    """Heights near the wanted ones, which descend, but a label apart and inside the axes."""
    step = _LABEL_STEP * (top - bottom)
    heights: list[float] = []
    for height in wanted:
        heights.append(min(height, heights[-1] - step) if heights else height)
    floor = bottom + step / 2
    for i in reversed(range(len(heights))):
        heights[i] = max(heights[i], floor)
        floor = heights[i] + step
    return heights
