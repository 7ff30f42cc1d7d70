"""Every question, put to the emulator, and to the hardware where there is one."""

import os
import pathlib
from collections.abc import Iterator

import pytest

from tests.emulator import device
from tests.emulator.blackwell import catalog, document, hardware
from tests.emulator.blackwell.probe import Probe, Question, assert_expected, on_emulator

_PROBES = catalog.probes()
_IDS = [f"{question.title} {probe.name}" for question, probe in _PROBES]
_CAPABILITIES = {"sm_100f": ((10, 0), (10, 3)), "sm_100a": ((10, 0),), "sm_103a": ((10, 3),)}

all_probes = pytest.mark.parametrize(("question", "probe"), _PROBES, ids=_IDS)


def test_names_are_different() -> None:
    assert len(set(_IDS)) == len(_IDS)


def test_documentation_is_up_to_date() -> None:
    assert document.PATH.read_text() == document.text()


@all_probes
def test_emulator(question: Question, probe: Probe) -> None:
    if probe.fault is not None:
        with pytest.raises(probe.fault):
            on_emulator(probe)
        return
    for arrays in on_emulator(probe):
        assert_expected(probe, arrays)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[tuple[str, ...]]]:
    """Rows of the table of answers, written at the end."""
    rows: list[tuple[str, ...]] = []
    yield rows
    path = pathlib.Path(os.environ.get("BLACKWELL_ANSWERS") or tmp_path_factory.mktemp("blackwell") / "answers.md")
    lines = ["| question | kernel | answer |", "|---|---|---|"]
    lines += ["| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) + " |" for row in rows]
    path.write_text("\n".join(lines) + "\n")
    print(f"\nwrote {path}")


@pytest.fixture(scope="module")
def gpu() -> Iterator[hardware.Device]:
    """The device, in a process of its own."""
    started = hardware.Device()
    yield started
    started.stop()


@pytest.mark.gpu
@all_probes
def test_hardware(
    question: Question, probe: Probe, gpu: hardware.Device, answers: list, capsys: pytest.CaptureFixture[str]
) -> None:
    if device.capability() not in _CAPABILITIES[probe.target]:
        pytest.skip(f"the kernel is for {probe.target}; the device has compute capability {device.capability()}")
    answer = "as stated"
    try:
        for arrays in gpu.run(probe):
            assert_expected(probe, arrays)
    except (AssertionError, device.DeviceError) as error:
        answer = str(error)
        raise
    finally:
        answers.append((question.title, probe.name, answer + capsys.readouterr().out))
