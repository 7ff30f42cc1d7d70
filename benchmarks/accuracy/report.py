"""Markdown and CSV of the figures."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.accuracy.figures import DECIMALS, Figure, Section
from benchmarks.accuracy.published import SOURCE

_COLUMNS = ("case", "quantity", "published", "ours", "difference", "required", "verdict")

_INTRODUCTION = f"""# Accuracy

Written by `python -m benchmarks.accuracy` (`make accuracy`); do not edit. "Published" are the figures of {SOURCE};
a difference is ours less the published value. The inputs are our own draws, so that figures differ from the published
ones by sampling noise: about .001 in cosine and .003 in rel-L2 between two draws of a few heads.
"""


def _number(x: float | None, sign: str = "") -> str:
    return "" if x is None else f"{x:{sign}.{DECIMALS}f}"


def _cells(figure: Figure) -> tuple[str, ...]:
    return (
        figure.case,
        figure.quantity,
        _number(figure.published),
        _number(figure.ours),
        _number(figure.difference, "+"),
        "" if figure.requirement is None else str(figure.requirement),
        {None: "", True: "met", False: "NOT MET"}[figure.passes],
    )


def markdown_table(figures: Sequence[Figure]) -> str:
    """An aligned Markdown table, which is as readable on a terminal."""
    rows = [_COLUMNS, *(_cells(figure) for figure in figures)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"

    return "\n".join([line(_COLUMNS), line(["-" * width for width in widths]), *(line(row) for row in rows[1:])])


def summary(results: Mapping[Section, Sequence[Figure]]) -> str:
    """One line: how many requirements are met, and which are not."""
    required = [(section, figure) for section, figures in results.items() for figure in figures if figure.requirement]
    missed = [f"{section.name}: {figure.case}, {figure.quantity}" for section, figure in required if not figure.passes]
    if not required:
        return "No requirements were checked."
    listed = "; not met: " + "; ".join(missed) if missed else ""
    return f"{len(required) - len(missed)} of {len(required)} requirements met{listed}."


def write_markdown(path: Path, results: Mapping[Section, Sequence[Figure]]) -> None:
    """Writes all sections."""
    parts = [_INTRODUCTION, summary(results)]
    for section, figures in results.items():
        parts += [f"## {section.title}", section.note, markdown_table(figures)]
    path.write_text("\n\n".join(part.strip() for part in parts) + "\n")


def write_csv(path: Path, results: Mapping[Section, Sequence[Figure]]) -> None:
    """Writes all figures, one a line."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("section", *_COLUMNS))
        for section, figures in results.items():
            writer.writerows((section.name, *_cells(figure)) for figure in figures)
