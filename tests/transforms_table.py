"""The table of docs/transforms.md: what the tests of meshes measured, for each version of JAX.

`pytest tests --update-transforms-table` writes the rows of the running JAX, and `python -m tests.transforms_table` the
table.
"""

import csv
from pathlib import Path
from typing import NamedTuple

import jax

ROOT = Path(__file__).parents[1]
ROWS = ROOT / "tests" / "transforms" / "table"
DOCUMENT = ROOT / "docs" / "transforms.md"
BEGIN, END = "<!-- table: begin -->\n", "<!-- table: end -->\n"


class Row(NamedTuple):
    """One case.

    Attributes:
      case: What is computed, and how the arguments are sharded.
      mesh: Axes and their types.
      equal: Whether the results are those of one device, and to what.
      collectives: Of the compiled program.
    """

    case: str
    mesh: str
    equal: str
    collectives: str


def make_row(case: str, mesh: str, equal: str, collectives: dict[str, int]) -> Row:
    counts = ", ".join(f"{count} {name}" for name, count in sorted(collectives.items()))
    return Row(case, mesh, equal, counts or "none")


def path(version: str = jax.__version__) -> Path:
    return ROWS / f"jax-{version}.csv"


def read(version: str = jax.__version__) -> dict[tuple[str, str], Row]:
    """The rows of a version by case and mesh; empty if it has not been measured."""
    if not path(version).exists():
        return {}
    with path(version).open(newline="") as file:
        return {row[:2]: row for row in map(Row._make, list(csv.reader(file))[1:])}


def write(rows: dict[tuple[str, str], Row]) -> None:
    ROWS.mkdir(exist_ok=True)
    with path().open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([Row._fields, *(rows[key] for key in sorted(rows))])


def versions() -> list[str]:
    found = (file.stem.removeprefix("jax-") for file in ROWS.glob("jax-*.csv"))
    return sorted(found, key=lambda version: [int(part) for part in version.split(".")])


def render() -> str:
    """The table in Markdown; where versions differ, each is named."""
    tables = {version: read(version) for version in versions()}
    keys = sorted(set().union(*tables.values()))
    lines = ["| case | mesh | equal to one device | collectives |", "|---|---|---|---|"]
    for key in keys:
        measured = {version: rows[key] for version, rows in tables.items() if key in rows}
        cells = [_cell(measured, tables, field) for field in ("equal", "collectives")]
        lines.append(f"| {' | '.join((*key, *cells))} |")
    return "\n".join(lines) + "\n"


def _cell(measured: dict[str, Row], tables: dict[str, object], field: str) -> str:
    values = {version: getattr(row, field) for version, row in measured.items()}
    if len(set(values.values())) == 1 and values.keys() == tables.keys():
        return next(iter(values.values()))
    return "; ".join(f"{value} (jax {version})" for version, value in values.items())


def main() -> None:
    head, rest = DOCUMENT.read_text().split(BEGIN)
    DOCUMENT.write_text(head + BEGIN + render() + END + rest.split(END)[1])


if __name__ == "__main__":
    main()
