"""The programs of the contention benchmark, and its report."""

import itertools

import pytest

from benchmarks.contention import __main__ as command
from benchmarks.contention.measure import Measurement
from benchmarks.contention.programs import INSTRUCTIONS, PRODUCTS, STREAM, TENSOR_CORES, program
from benchmarks.contention.report import markdown, write_plot
from cuda.emulator.ptx import parser


def opcodes(tensor_cores, instruction):
    return [one.opcode for one in parser.parse(program(tensor_cores, instruction)).instructions]


@pytest.mark.parametrize("instruction", STREAM, ids=lambda instruction: instruction.sass)
@pytest.mark.parametrize("tensor_cores", TENSOR_CORES)
def test_a_program_repeats_its_instruction_beside_the_products(tensor_cores, instruction):
    found = opcodes(tensor_cores, instruction)
    assert sum(opcode.startswith("wgmma.mma_async") for opcode in found) == (tensor_cores != "idle") * PRODUCTS
    opcode = instruction.ptx.split()[0]
    elsewhere = min(opcodes(tensor_cores, other).count(opcode) for other in STREAM)
    assert found.count(opcode) - elsewhere == INSTRUCTIONS * instruction.ptx.count(f"{opcode} ")


def measurement(instruction, tensor_cores, clocks):
    return Measurement(instruction, tensor_cores, clocks, None if tensor_cores == "idle" else 64.0)


def test_the_report_has_medians_and_ranges(tmp_path):
    measurements = [
        measurement(instruction, name, (1.0 + place, 3.0 + place, 2.0 + place))
        for instruction, (place, name) in itertools.product(STREAM, enumerate(TENSOR_CORES))
    ]
    text = markdown(measurements, "GPU", 3)
    assert text.count("2.00 (1.00 to 3.00) | 3.00 (2.00 to 4.00) | 4.00 (3.00 to 5.00)") == len(STREAM)
    write_plot(tmp_path / "plot.png", measurements)
    assert (tmp_path / "plot.png").stat().st_size > 10_000


def test_without_a_gpu_there_is_nothing_to_measure(tmp_path, capsys):
    assert command.main(["--out", str(tmp_path / "out")]) == 1
    assert "no GPU of compute capability 9.0" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
