"""A launch of a kernel of CuTe DSL is recorded as it was made, and can be emulated."""

import importlib.util
import pathlib
import pickle
import shutil
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

from cuda.emulator import Output, emulate
from cuda.emulator.recording import Encoding, Place, RecordedLaunch, cute_dsl
from tests.emulator.recording.scale_kernel import CLUSTER, COLUMNS, FACTOR, ROWS, SHARED_BYTES, THREADS, TILE


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> RecordedLaunch:
    if importlib.util.find_spec("cutlass") is None:
        pytest.skip("nvidia-cutlass-dsl is not installed")
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        pytest.skip("there is no C compiler")
    path = tmp_path_factory.mktemp("recording") / "launch.pickle"
    command = [sys.executable, "-m", "tests.emulator.recording.scale_kernel", str(path)]
    subprocess.run(command, check=True, cwd=pathlib.Path(__file__).parents[3])
    return pickle.loads(path.read_bytes())


def test_what_is_recorded(launch: RecordedLaunch) -> None:
    tensor_map, pointer, columns, factor = launch.parameters
    assert tensor_map.tensor_maps == {
        0: Encoding(Place(3, 0), 9, (COLUMNS, ROWS), (2 * COLUMNS,), (TILE, TILE), (1, 1), 0, 0, 0, 0)
    }
    assert pointer.pointers == {0: Place(1, 0)}
    assert int.from_bytes(columns.bytes, "little") == COLUMNS
    assert np.frombuffer(factor.bytes, np.float32) == FACTOR
    assert launch.grid == (COLUMNS // TILE, ROWS // TILE, 1)
    assert (launch.block, launch.cluster) == ((THREADS, 1, 1), CLUSTER)
    assert launch.shared_bytes == SHARED_BYTES
    assert launch.array_numbers == [3, 1]


def test_it_can_be_emulated(launch: RecordedLaunch) -> None:
    x = np.random.default_rng(0).standard_normal((ROWS, COLUMNS)).astype(ml_dtypes.bfloat16)
    y = np.zeros_like(x)
    result = emulate(launch.ptx, launch.arguments([None, Output(y), None, x]), **launch.options())
    expected = (x.astype(np.float32) * np.float32(FACTOR)).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(result.arrays[0][1], expected)
    assert not result.findings


def test_settings_come_before_the_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setitem(sys.modules, "cutlass", sys)
    with pytest.raises(RuntimeError, match="imported already"):
        cute_dsl.prepare("sm_90a", tmp_path)


def test_a_c_compiler_is_needed(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.delitem(sys.modules, "cutlass", raising=False)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(FileNotFoundError, match="C compiler"):
        cute_dsl.prepare("sm_90a", tmp_path)
