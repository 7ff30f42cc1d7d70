"""Tables and a plot of what was noticed."""

from __future__ import annotations

import csv
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from .survey import UNNOTICED, Outcome

_HEADER = ("change", "mutants", "noticed", "by what")


def rows(outcomes: Iterable[Outcome]) -> list[tuple[str, int, int, str]]:
    """One row for each change of each family: the change, mutants, how many were noticed, and by what."""
    counts: defaultdict[str, Counter] = defaultdict(Counter)
    for outcome in outcomes:
        counts[f"{outcome.mutant.family}: {outcome.mutant.change}"][outcome.noticed] += 1
    result = []
    for change in sorted(counts):
        count = counts[change]
        by = ", ".join(f"{n} {what}" for what, n in count.most_common() if what != UNNOTICED)
        result.append((change, count.total(), count.total() - count[UNNOTICED], by))
    return result


def table(outcomes: Iterable[Outcome]) -> str:
    """The rows and their sum, in Markdown."""
    body = rows(outcomes)
    total = ("all", sum(r[1] for r in body), sum(r[2] for r in body), "")
    lines = [_HEADER, ("---",) * 4, *body, total]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines) + "\n"


def save(outcomes: Iterable[Outcome], stem: Path) -> None:
    """`stem`.md with the table and the mutants that were not noticed, and `stem`.csv with all of them."""
    outcomes = list(outcomes)
    left = [f"- {o.mutant}" for o in outcomes if o.noticed == UNNOTICED]
    Path(f"{stem}.md").write_text(table(outcomes) + "\nNot noticed:\n\n" + "\n".join(left) + "\n")
    with open(f"{stem}.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("family", "change", "line", "instruction", "noticed", "seed", "message"))
        for o in outcomes:
            instruction = o.mutant.instruction
            message = " ".join(o.text.split())[:400]
            what = o.mutant.family, o.mutant.change, instruction.line, instruction.text
            writer.writerow((*what, o.noticed, o.seed, message))


def bars(surveys: Mapping[str, Iterable[Outcome]], path: Path) -> None:
    """Bars of what noticed the mutants of each family, one panel for each survey, two in a row."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.colors import to_hex

    counted = {name: _by_family(outcomes) for name, outcomes in surveys.items()}
    kinds = sum((count for families in counted.values() for count in families.values()), Counter())
    order = [kind for kind, _ in kinds.most_common() if kind != UNNOTICED] + [UNNOTICED]
    palette = pyplot.get_cmap("Paired")
    colours = {kind: to_hex(palette(i % palette.N)) for i, kind in enumerate(order)} | {UNNOTICED: "lightgrey"}
    columns = min(2, len(counted))
    lines = -(-len(counted) // columns)
    figure, axes = pyplot.subplots(
        lines, columns, figsize=(5.5 * columns, 3.4 * lines), squeeze=False, layout="constrained"
    )
    for axis in axes.flat:
        axis.set_visible(False)
    for axis, (name, families) in zip(axes.flat, counted.items(), strict=False):
        axis.set_visible(True)
        _panel(axis, name, families, order, colours)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=6, fontsize="small")
    figure.supxlabel("mutants", fontsize="medium")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _by_family(outcomes: Iterable[Outcome]) -> dict[str, Counter]:
    families: defaultdict[str, Counter] = defaultdict(Counter)
    for outcome in outcomes:
        families[outcome.mutant.family][outcome.noticed] += 1
    return dict(sorted(families.items(), reverse=True))


def _panel(axis, name: str, families: dict[str, Counter], order: list[str], colours: dict[str, str]) -> None:
    left = [0] * len(families)
    for kind in order:
        width = [count[kind] for count in families.values()]
        axis.barh(list(families), width, left=left, color=colours[kind], label=kind)
        left = [a + b for a, b in zip(left, width, strict=True)]
    axis.set_title(name, fontsize="medium", loc="left")
    axis.tick_params(labelsize="small")
