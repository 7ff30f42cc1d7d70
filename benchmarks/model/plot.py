"""A figure: instructions of a fragment by pipe, and modelled beside published times."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.model.check import Comparison
from benchmarks.model.pipes import PIPES
from benchmarks.model.records import Record

_COLORS = (
    *("#1b9e77", "#d95f02", "#7570b3", "#e7298a", "#66a61e", "#e6ab02"),
    *("#a6761d", "#666666", "#1f78b4", "#cab2d6"),
)
_MARKERS = {"GB200": "o", "B200": "s", "B300": "^", "GB300": "D"}


def write_plot(path: Path, records: Sequence[Record], comparisons: Sequence[Comparison]) -> None:
    """Draws the figure.

    Args:
      path: PNG to write.
      records: Of kernels.
      comparisons: With published times.
    """
    canvas = Figure(figsize=(14, 5), layout="constrained")
    FigureCanvasAgg(canvas)
    left, right = canvas.subplots(1, 2)
    _draw_fragments(left, records)
    _draw_comparisons(right, comparisons)
    canvas.suptitle("Forward on Blackwell: counted and modelled, not measured")
    canvas.savefig(path, dpi=110, metadata={"Software": None})


def _draw_fragments(axes: Axes, records: Sequence[Record]) -> None:
    fragments = {f"{x.kernel}, {x.target}": x.fragment for x in records}
    start = [0.0] * len(fragments)
    for pipe, color in zip(PIPES, _COLORS, strict=True):
        counts = [fragment[pipe] for fragment in fragments.values()]
        if any(counts):
            axes.barh(list(fragments), counts, left=start, color=color, label=pipe)
            start = [x + count for x, count in zip(start, counts, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("instructions for 32 scores of a thread")
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))


def _draw_comparisons(axes: Axes, comparisons: Sequence[Comparison]) -> None:
    kernels = list(dict.fromkeys(x.row.kernel for x in comparisons))
    for kernel, color in zip(kernels, _COLORS, strict=False):
        for machine, marker in _MARKERS.items():
            points = [x for x in comparisons if (x.row.kernel, x.row.machine.name) == (kernel, machine)]
            if points:
                published, modelled = ([1e3 * y for y in ys] for ys in _times(points))
                axes.scatter(published, modelled, color=color, marker=marker, label=f"{kernel}, {machine}")
    if comparisons:
        times = [1e3 * y for ys in _times(comparisons) for y in ys]
        axes.plot([min(times), max(times)], [min(times), max(times)], color="black", linewidth=0.8)
        axes.legend(fontsize=7)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("published, ms")
    axes.set_ylabel("modelled, ms")


def _times(comparisons: Sequence[Comparison]) -> tuple[list[float], list[float]]:
    return [x.row.seconds for x in comparisons], [x.seconds for x in comparisons]
