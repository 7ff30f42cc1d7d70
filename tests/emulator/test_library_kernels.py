"""The library's quantising kernels on the emulator: no findings, and the same bytes for Hopper and for Blackwell."""

import pathlib

import numpy as np
import pytest

from cuda.emulator import Result, emulate
from tests.emulator.kernels import quantizers
from tests.emulator.kernels.case import Case

_BUILD = pathlib.Path(__file__).parents[2] / "build" / "native"

pytestmark = pytest.mark.skipif(not quantizers.available(), reason="build/native has no kernels: make native")


def _run(case: Case, target: str, seed: int) -> Result:
    ptx = (_BUILD / f"kernels.{target}.ptx").read_text()
    return emulate(
        ptx,
        case.arguments,
        case.grid,
        block=case.block,
        shared_bytes=case.shared_bytes,
        entry=case.entry,
        seeds=[seed],
    )


@pytest.mark.parametrize("case", list(quantizers.cases()) if quantizers.available() else [], ids=str)
def test_hopper_and_blackwell_write_the_same_bytes(case: Case) -> None:
    hopper, blackwell = _run(case, "sm_90a", 0), _run(case, "sm_100f", 1)
    assert not hopper.findings and not blackwell.findings
    for one, other in zip(hopper.arrays[0], blackwell.arrays[0], strict=True):
        np.testing.assert_array_equal(one, other)
