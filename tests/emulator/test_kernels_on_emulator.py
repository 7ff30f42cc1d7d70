"""Kernels that calibrate the emulator: what they leave in memory, against NumPy."""

import json
import pathlib

import pytest

from tests.emulator import launches
from tests.emulator.kernels import catalog, gemm_cases
from tests.emulator.kernels import compile as compiler
from tests.emulator.kernels.case import Case


@pytest.fixture(scope="module")
def kernels() -> pathlib.Path:
    """Compiled matrix products."""
    try:
        return gemm_cases.folder()
    except ImportError as error:
        pytest.skip(str(error))


def test_compiled_kernels_keep_everything_in_registers(kernels: pathlib.Path) -> None:
    manifest = json.loads((kernels / compiler.MANIFEST).read_text())["kernels"]
    assert {name: kernel["stack_bytes"] for name, kernel in manifest.items()} == dict.fromkeys(gemm_cases.KERNELS, 0)


@pytest.mark.parametrize("case", catalog.cases(), ids=str)
def test_hand_written_kernel(case: Case) -> None:
    (arrays,) = launches.on_emulator(case)
    launches.assert_expected(case, arrays)


@pytest.mark.parametrize("shape", gemm_cases.SHAPES[3:8], ids=str)
@pytest.mark.parametrize("name", gemm_cases.KERNELS)
def test_exact_product(kernels: pathlib.Path, name: str, shape: tuple[int, int, int]) -> None:
    case = gemm_cases.case(kernels, name, shape, ctas=2)
    for arrays in launches.on_emulator(case, seeds=range(2)):
        launches.assert_expected(case, arrays)


@pytest.mark.parametrize("name", gemm_cases.KERNELS)
def test_rounded_product(kernels: pathlib.Path, name: str) -> None:
    case = gemm_cases.case(kernels, name, (130, 40, 200), ctas=1, exact=False)
    (arrays,) = launches.on_emulator(case)
    launches.assert_expected(case, arrays)
