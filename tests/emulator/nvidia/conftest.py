"""Recorded launches of NVIDIA's kernels, made once a session."""

import importlib.util
import pathlib
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache

import pytest

from cuda.emulator.recording import RecordedLaunch
from tests.emulator.nvidia.cases import Case, key

_ROOT = pathlib.Path(__file__).parents[3]


def _missing() -> str:
    if importlib.util.find_spec("cutlass") is None:
        return "nvidia-cutlass-dsl is not installed"
    if importlib.util.find_spec("cutlass.operators") is None:
        return "nvidia-cutlass-operators is not installed"
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        return "there is no C compiler"
    return ""


@pytest.fixture(scope="session")
def launch_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], RecordedLaunch]:
    """The launch of a case. All cases of a target are compiled when the first of them is asked for."""
    missing = _missing()
    if missing:
        pytest.skip(missing)

    @cache
    def recorded(target: str) -> dict[str, RecordedLaunch]:
        # The compiler reads its settings when it is imported.
        path = tmp_path_factory.mktemp("nvidia") / f"{target}.pickle"
        command = [sys.executable, "-m", "tests.emulator.nvidia.record", target, str(path)]
        subprocess.run(command, check=True, cwd=_ROOT)
        return pickle.loads(path.read_bytes())

    return lambda case: recorded(case.kernel.target)[key(case)]
