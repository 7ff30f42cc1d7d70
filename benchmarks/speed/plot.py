"""Bars of TFLOP/s: a group for each shape, a bar for each contender, a panel for each mask."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.speed.cases import MASKS, Case
from benchmarks.speed.measure import Result

_COLORS = {
    "xla": "#d9d9d9",
    "cudnn": "#969696",
    "flash3": "#404040",
    "fast": "#1f77b4",
    "square": "#d95f02",
    "exact_map": "#1b9e77",
    "accurate": "#7570b3",
    "fp8_pv": "#e7298a",
    "train": "#e6ab02",
}
_GROUP = 0.84


def write_plot(path: Path, results: Sequence[Result], passes: str, title: str) -> bool:
    """Draws the results of some passes.

    A recipe's bar is the whole call; the rate of its forward step alone stands behind it, pale, and in parentheses.

    Args:
      path: PNG to write.
      results: Of all contenders.
      passes: Which of them to draw.
      title: Of the figure.

    Returns:
      Whether there was anything to draw.
    """
    drawn = [x for x in results if x.case.passes == passes and x.tflops is not None]
    masks = [mask for mask in MASKS if any(x.case.mask == mask for x in drawn)]
    if not masks:
        return False
    canvas = Figure(figsize=(15, 4.5 * len(masks) + 0.5), layout="constrained")
    FigureCanvasAgg(canvas)
    for axes, mask in zip(canvas.subplots(len(masks), squeeze=False)[:, 0], masks, strict=True):
        _draw(axes, [x for x in drawn if x.case.mask == mask])
        axes.set_title(f"{passes}, {mask} mask")
    canvas.suptitle(title)
    # Without the version of matplotlib, which would change the file and nothing else.
    canvas.savefig(path, dpi=110, metadata={"Software": None})
    return True


def _draw(axes: Axes, results: Sequence[Result]) -> None:
    rates = {(x.case, x.kind, x.recipe): x.tflops or 0.0 for x in results}
    cases: list[Case] = list(dict.fromkeys(x.case for x in results))
    names = [name for name in _COLORS if any(name in (x.kind, x.recipe) for x in results)]
    width = _GROUP / len(names)
    for position, name in enumerate(names):
        places = [i + (position - (len(names) - 1) / 2) * width for i in range(len(cases))]
        kind, recipe = (name, "") if name in ("xla", "cudnn", "flash3") else ("ours", name)
        whole = [rates.get((case, kind, recipe), 0.0) for case in cases]
        steps = [rates.get((case, "ours-forward", recipe), 0.0) for case in cases]
        if kind == "ours":
            axes.bar(places, steps, width, color=_COLORS[name], alpha=0.35)
        bars = axes.bar(places, whole, width, color=_COLORS[name], label=name)
        for bar, rate, step in zip(bars, whole, steps, strict=True):
            if rate or step:
                texts = [f"{rate:.0f}" if rate else "", f"({step:.0f})" if step else ""]
                middle, top = bar.get_x() + width / 2, max(rate, step)
                axes.text(middle, top, " " + " ".join(texts), rotation=90, ha="center", va="bottom", fontsize=6)
    axes.set_xticks(range(len(cases)), [str(case.shape).replace(" H", "\nH") for case in cases], fontsize=8)
    has_steps = any(kind == "ours-forward" for _, kind, _ in rates)
    axes.set_ylabel("TFLOP/s (pale, in parentheses: forward step alone)" if has_steps else "TFLOP/s")
    axes.set_ylim(top=1.25 * max(rates.values()))
    axes.margins(x=0.01)
    axes.grid(axis="y", alpha=0.25)
    axes.legend(ncols=len(names), fontsize=8, loc="upper center")
