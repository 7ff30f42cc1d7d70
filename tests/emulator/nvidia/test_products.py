"""NVIDIA's matrix products, as they are on PyPI, give what NumPy gives, without findings, under any schedule."""

import re
from collections.abc import Callable

import numpy as np
import pytest

from cuda.emulator import DeadlockError, Finding, Output, UnsupportedInstructionError, emulate
from cuda.emulator.recording import RecordedLaunch
from tests.emulator.nvidia.cases import BLOCK_SCALED, DENSE, HANGING, HOPPER, UNSUPPORTED, Case
from tests.emulator.nvidia.operands import expected, make_operands, result_of


@pytest.mark.parametrize("case", [*BLOCK_SCALED, *DENSE, *HOPPER], ids=lambda case: f"{case.kernel.target}-{case}")
def test_product(case: Case, launch_of: Callable[[Case], RecordedLaunch]) -> None:
    launch, operands = launch_of(case), make_operands(case)
    *inputs, c = operands.arrays
    result = emulate(launch.ptx, launch.arguments([*inputs, Output(c)]), seeds=range(2), **launch.options())
    place = launch.array_numbers.index(len(inputs))
    for arrays in result.arrays:
        np.testing.assert_array_equal(result_of(case, arrays[place]), expected(case, operands))
    assert not result.varying
    assert not [finding for finding in result.findings if not _is_whole_warp_store(finding)]


def _is_whole_warp_store(finding: Finding) -> bool:
    """Whether it says that all threads of a warp issue a TMA store, as they do in NVIDIA's kernels."""
    return finding.kind == "issue" and re.search(r"cp\.async\.bulk\.tensor\.\dd\.global", finding.text) is not None


@pytest.mark.parametrize("case", HANGING, ids=str)
def test_known_hang_is_found(case: Case, launch_of: Callable[[Case], RecordedLaunch]) -> None:
    launch = launch_of(case)
    arguments = launch.arguments(make_operands(case).arrays)
    with pytest.raises(DeadlockError, match="mbarrier"):
        emulate(launch.ptx, arguments, max_instructions=200_000, **launch.options())


@pytest.mark.parametrize("case", UNSUPPORTED, ids=str)
def test_what_is_not_modelled_is_said(case: Case, launch_of: Callable[[Case], RecordedLaunch]) -> None:
    launch = launch_of(case)
    arguments = launch.arguments(make_operands(case).arrays)
    with pytest.raises(UnsupportedInstructionError):
        emulate(launch.ptx, arguments, **launch.options())
