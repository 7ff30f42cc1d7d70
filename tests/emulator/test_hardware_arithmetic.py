"""The emulator's register instructions against the hardware's, value by value.

PTX_SWEEP_TABLE names a file for the table of all instructions; without it the table goes to a temporary folder.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
import pytest

from tests.emulator import device, sweeps

pytestmark = pytest.mark.gpu


@dataclass
class Row:
    name: str
    values: int
    different: int = 0
    largest_ulp: int = 0
    examples: str = ""


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """The rows of the table, written when the last instruction has been swept."""
    collected: list[Row] = []
    yield collected
    path = os.environ.get("PTX_SWEEP_TABLE") or str(tmp_path_factory.mktemp("sweeps") / "table.md")
    with open(path, "w") as file:
        file.write(table(collected))
    print(f"\nwrote {path}")


def table(rows: list[Row]) -> str:
    lines = [
        "| instruction | values | different | largest distance (ulp) | some of the differences |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        cells = (row.name, row.values, row.different, row.largest_ulp, row.examples)
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def on_hardware(sweep: sweeps.Sweep, columns: list[np.ndarray]) -> np.ndarray:
    code = sweep.operation.output.replace("i", "u").replace("f", "u").replace("b1", "u2")
    result = np.zeros(len(columns[0]), code)
    blocks = -(-len(result) // sweeps.BLOCK)
    arguments = [np.uint32(len(result)), *columns, result]
    device.launch(sweeps.kernel(sweep), "sweep", arguments, (blocks, 1, 1), (sweeps.BLOCK, 1, 1))
    return result


def _examples(columns: list[np.ndarray], wrong: np.ndarray, expected: np.ndarray, actual: np.ndarray) -> str:
    """Up to five of the elements with the indices `wrong`, spread evenly over them, the first and the last included."""
    if not len(wrong):
        return ""
    chosen = np.unique(np.linspace(0, len(wrong) - 1, 5).astype(int))
    return "; ".join(_example(columns, index, expected, actual) for index in wrong[chosen])


def _example(columns: list[np.ndarray], index: int, expected: np.ndarray, actual: np.ndarray) -> str:
    operands = ", ".join(f"{int(column[index]):#x}" for column in columns)
    return f"{operands}: emulator {int(expected[index]):#x}, hardware {int(actual[index]):#x}"


@pytest.mark.parametrize("sweep", sweeps.SWEEPS, ids=lambda sweep: f"{sweep.name}-{sweep.target}")
def test_emulator_agrees_with_hardware(sweep: sweeps.Sweep, rows: list[Row]) -> None:
    if sweep.target == "sm_100a" and device.capability()[0] != 10:
        pytest.skip("needs compute capability 10")
    columns = sweeps.inputs(sweep)
    kind = sweep.result_type
    expected = sweeps.canonical_nans(sweeps.emulated(sweep, columns), kind)
    actual = sweeps.canonical_nans(on_hardware(sweep, columns), kind)
    row = Row(sweep.name, len(expected))
    rows.append(row)
    wrong = np.flatnonzero(expected != actual)
    if len(wrong):
        row.different = len(wrong)
        row.examples = _examples(columns, wrong, expected, actual)
        if kind.removesuffix("x2") in ("f16", "bf16", "f32", "f64"):
            row.largest_ulp = int(sweeps.ulp_distance(expected, actual, kind).max())
    if sweep.approximate:
        assert not out_of_bounds(sweep, columns, actual)
    else:
        assert row.different == 0, row.examples


def out_of_bounds(sweep: sweeps.Sweep, columns: list[np.ndarray], actual: np.ndarray) -> str:
    """Some of the results outside the bound of the ISA, or empty."""
    wrong = np.flatnonzero(sweeps.errors(sweep, columns, actual) > 1)
    return _examples(columns, wrong, sweeps.emulated(sweep, columns), actual)
