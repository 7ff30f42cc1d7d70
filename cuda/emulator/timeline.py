"""Who did what when, as a picture: one row for each warp and engine, time in instructions."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from .ptx.syntax import Instruction

# Instruction families by the start of the opcode, and their colours.
_FAMILIES = {
    "tcgen05.mma": "#c0392b",
    "wgmma.mma_async": "#c0392b",
    "tcgen05.cp": "#e67e22",
    "tcgen05.ld": "#8e44ad",
    "tcgen05.st": "#af7ac5",
    "tcgen05.commit": "#922b21",
    "cp.async": "#2471a3",
    "cp.reduce": "#2471a3",
    "mbarrier": "#7f8c8d",
    "bar": "#7f8c8d",
    "ld": "#28b463",
    "st": "#1d8348",
}
_OTHER = "#85929e"


class Timeline:
    """Pass it to `emulate` as `trace`, with one seed, and draw it afterwards.

    Attributes:
      events: (start, end, who, instruction) in the order in which they happened; for operations of engines the start
        is their issue and the end is when they took effect.
    """

    def __init__(self) -> None:
        self.events: list[tuple[int, int, str, Instruction]] = []

    def __call__(self, start: int, end: int, who: str, instruction: Instruction) -> None:
        self.events.append((start, end, who, instruction))

    def rows(self) -> dict[str, list[tuple[int, int, str]]]:
        """For each warp and engine (start, length, colour)."""
        rows: defaultdict[str, list[tuple[int, int, str]]] = defaultdict(list)
        for start, end, who, instruction in self.events:
            rows[who].append((start, max(1, end - start), _colour(instruction)))
        return dict(sorted(rows.items(), key=_row_order))

    def draw(self, path: str | Path, title: str = "") -> None:
        """Write a picture."""
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot as plt
        from matplotlib.patches import Patch

        rows = self.rows()
        figure, axes = plt.subplots(figsize=(14, 1.5 + 0.3 * len(rows)))
        for y, bars in enumerate(rows.values()):
            axes.broken_barh([(s, n) for s, n, _ in bars], (y - 0.4, 0.8), facecolors=[c for _, _, c in bars])
        axes.set_yticks(range(len(rows)), list(rows))
        axes.invert_yaxis()
        axes.set_xlabel("time (instructions of the emulated launch; not a prediction of hardware time)")
        axes.set_title(title)
        used = {c for bars in rows.values() for _, _, c in bars}
        legend = {c: name for name, c in reversed(_FAMILIES.items()) if c in used}
        handles = [Patch(color=c, label=name) for c, name in legend.items()] + [Patch(color=_OTHER, label="other")]
        axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.0, 1.0))
        figure.savefig(path, dpi=120, bbox_inches="tight")
        plt.close(figure)


def _colour(instruction: Instruction) -> str:
    best = max((f for f in _FAMILIES if instruction.opcode.startswith(f)), key=len, default=None)
    return _FAMILIES[best] if best is not None else _OTHER


def _row_order(row: tuple[str, list]) -> tuple:
    """Warps by number, each followed by its engines."""
    who = row[0]
    engine, _, warp = who.rpartition("warp ")
    number, _, cta = warp.partition(" ")
    return cta, int(number) if number.isdigit() else 0, engine
