"""Who did what when, as a picture: one row for each warp and engine, time in instructions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from .ptx.syntax import Instruction

# What code does, its colour, and how the opcodes that say so begin. The most telling first: a stretch of code is shown
# as the first of these that it has an instruction of.
_KINDS = {
    "matrix product": ("#c0392b", ("tcgen05.mma", "wgmma.mma_async", "mma.sync")),
    "copy to tensor memory": ("#e67e22", ("tcgen05.cp",)),
    "asynchronous copy": ("#2471a3", ("cp.async", "cp.reduce")),
    "exponential": ("#f1c40f", ("ex2",)),
    "load from tensor memory": ("#8e44ad", ("tcgen05.ld",)),
    "store to tensor memory": ("#c39bd3", ("tcgen05.st",)),
    "store": ("#1d8348", ("st.", "stmatrix", "red.", "atom.")),
    "load": ("#58d68d", ("ld.shared", "ld.global", "ldmatrix")),
    "barrier": ("#5d6d7e", ("mbarrier", "bar.", "barrier.", "tcgen05.commit", "wgmma.")),
}
_OTHER = "#aeb6bf"
_WAITING = "#ebedef"
_RANKS = {colour: rank for rank, colour in enumerate([*(colour for colour, _ in _KINDS.values()), _OTHER])}


class Timeline:
    """Pass it to `emulate` as `trace`, with one seed, and draw it afterwards.

    Attributes:
      events: (start, end, who, instructions) in the order in which they happened; for operations of engines the start
        is their issue and the end is when they took effect.
      waits: (start, end, who) of warps that could not go on.
    """

    def __init__(self) -> None:
        self.events: list[tuple[int, int, str, Sequence[Instruction]]] = []
        self.waits: list[tuple[int, int, str]] = []
        self._waiting: dict[str, int] = {}

    def __call__(self, start: int, end: int, who: str, instructions: Sequence[Instruction]) -> None:
        if _is_warp(who) and start == end:
            self._waiting.setdefault(who, start)
            return
        since = self._waiting.pop(who, start)
        if since < start:
            self.waits.append((since, start, who))
        self.events.append((start, end, who, instructions))

    def rows(self) -> dict[str, list[tuple[int, int, str]]]:
        """For each warp and engine (start, length, colour)."""
        rows: defaultdict[str, list[tuple[int, int, str]]] = defaultdict(list)
        for start, end, who, instructions in self.events:
            rows[who].append((start, max(1, end - start), _colour(instructions)))
        return dict(sorted(rows.items(), key=_row_order))

    def draw(self, path: str | Path, title: str = "", only: str = "") -> None:
        """Write a picture.

        Args:
          path: of the picture.
          title: above it.
          only: what is drawn, as the end of the rows' names, such as "CTA (0, 0, 0)"; empty for all.
        """
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot as plt
        from matplotlib.patches import Patch

        rows = {who: bars for who, bars in self.rows().items() if who.endswith(only)}
        places = {who: y for y, who in enumerate(rows)}
        figure, axes = plt.subplots(figsize=(14, 1.5 + 0.25 * len(rows)))
        for start, end, who in self.waits:
            if who in places:
                axes.broken_barh([(start, end - start)], (places[who] - 0.4, 0.8), facecolors=_WAITING)
        for who, bars in rows.items():
            # Operations of an engine overlap.
            bars = sorted(bars, key=lambda bar: _RANKS[bar[2]], reverse=True)
            spans, colours = [(s, n) for s, n, _ in bars], [c for _, _, c in bars]
            # Lines, or what is narrower than a pixel would vanish.
            axes.broken_barh(spans, (places[who] - 0.4, 0.8), facecolors=colours, edgecolors=colours, linewidths=0.4)
        axes.set_yticks(range(len(rows)), [who.removesuffix(f" of {only}") for who in rows])
        axes.invert_yaxis()
        axes.margins(x=0.005)
        axes.set_xlabel("time (instructions of the emulated launch; not a prediction of hardware time)")
        axes.set_title(title)
        used = {c for bars in rows.values() for _, _, c in bars}
        legend = {name: c for name, (c, _) in _KINDS.items() if c in used} | {"other": _OTHER, "waiting": _WAITING}
        handles = [Patch(color=c, label=name) for name, c in legend.items()]
        axes.legend(
            handles=handles,
            loc="upper left",
            bbox_to_anchor=(1.0, 1.0),
            title="the first of these\nin a stretch of code",
        )
        figure.savefig(path, dpi=120, bbox_inches="tight")
        plt.close(figure)


def _is_warp(who: str) -> bool:
    return who.startswith("warp ")


def _colour(instructions: Sequence[Instruction]) -> str:
    opcodes = [instruction.opcode for instruction in instructions]
    for colour, starts in _KINDS.values():
        if any(opcode.startswith(starts) for opcode in opcodes):
            return colour
    return _OTHER


def _row_order(row: tuple[str, list]) -> tuple:
    """Warps by number, each followed by its engines."""
    who = row[0]
    engine, _, warp = who.rpartition("warp ")
    number, _, cta = warp.partition(" ")
    return cta, int(number) if number.isdigit() else 0, engine
