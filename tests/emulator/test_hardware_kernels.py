"""The emulator against a Hopper GPU: whole kernels, bit for bit."""

import pathlib

import pytest

from tests.emulator import device, launches
from tests.emulator.kernels import catalog, gemm_cases, quantizers
from tests.emulator.kernels.case import Case

pytestmark = pytest.mark.gpu

_CTAS = 3
_ROUNDED_SHAPES = ((128, 128, 64), (130, 40, 200), (64, 96, 1024))


@pytest.fixture(autouse=True)
def _hopper() -> None:
    if device.capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")


@pytest.fixture
def kernels(_hopper: None) -> pathlib.Path:
    """Compiled matrix products."""
    try:
        return gemm_cases.folder()
    except ImportError as error:
        pytest.skip(str(error))


def _compare(case: Case) -> None:
    actual = launches.on_device(case)
    launches.assert_expected(case, actual)
    (emulated,) = launches.on_emulator(case, races=False)
    for place, (one, other) in enumerate(zip(actual, emulated, strict=True)):
        launches.assert_agree(case, place, one, other)


@pytest.mark.parametrize("shape", gemm_cases.SHAPES, ids=str)
@pytest.mark.parametrize("name", gemm_cases.KERNELS)
def test_exact_product(kernels: pathlib.Path, name: str, shape: tuple[int, int, int]) -> None:
    _compare(gemm_cases.case(kernels, name, shape, _CTAS))


@pytest.mark.parametrize("shape", _ROUNDED_SHAPES, ids=str)
@pytest.mark.parametrize("name", gemm_cases.KERNELS)
def test_rounded_product(kernels: pathlib.Path, name: str, shape: tuple[int, int, int]) -> None:
    _compare(gemm_cases.case(kernels, name, shape, _CTAS, exact=False))


@pytest.mark.skipif(not quantizers.available(), reason="build/native has no kernels: make native")
@pytest.mark.parametrize("case", list(quantizers.cases()) if quantizers.available() else [], ids=str)
def test_quantizing_kernel(case: Case) -> None:
    _compare(case)


@pytest.mark.parametrize("case", catalog.cases(), ids=str)
def test_hand_written_kernel(case: Case) -> None:
    _compare(case)
