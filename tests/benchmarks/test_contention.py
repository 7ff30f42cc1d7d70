"""The programs of the contention benchmark, and its report."""

import itertools
import re

import pytest

from benchmarks.contention import __main__ as command
from benchmarks.contention import measure
from benchmarks.contention.measure import Measurement
from benchmarks.contention.programs import INSTRUCTIONS, OUTLASTING, PRODUCTS, STREAM, TENSOR_CORES, program
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


class Clocks:
    """In place of the driver: clocks that each warpgroup takes for an iteration."""

    def __init__(self, products, instructions):
        self.times = [measure.ITERATIONS * x for x in (products, products, instructions)]

    def clocks(self, text, threads, runs):
        assert threads == 128 * len(self.times)
        return [[0, 0, self.times[-1]] if "wgmma" not in text else self.times] * runs


def test_clocks_are_those_of_one_instruction_and_of_one_product(monkeypatch):
    of_one_iteration = 2 * PRODUCTS * OUTLASTING * 64, INSTRUCTIONS * 5
    monkeypatch.setattr(measure, "Driver", lambda: Clocks(*of_one_iteration))
    found = measure.measure(2)
    assert [(m.instruction, m.tensor_cores) for m in found] == list(itertools.product(STREAM, TENSOR_CORES))
    assert all(m.clocks == (5.0, 5.0) for m in found)
    assert [m.product_clocks for m in found[:3]] == [None, 64.0, 64.0]


def test_products_must_not_end_before_the_instructions(monkeypatch):
    monkeypatch.setattr(measure, "Driver", lambda: Clocks(1000, 1001))
    with pytest.raises(RuntimeError, match="the products ended before float32 multiply-add"):
        measure.measure(1)


@pytest.mark.parametrize("tensor_cores", [name for name, work in TENSOR_CORES.items() if work])
def test_products_have_more_iterations_than_the_instructions(tensor_cores):
    text = program(tensor_cores, STREAM[0])
    (longer,) = re.findall(r"mul\.lo\.u32 %iterations, %iterations, (\d+);", text)
    assert int(longer) == OUTLASTING
    assert text.index("mul.lo.u32 %iterations") < text.index("MULTIPLY:")
    # At 64 clocks a product, and twice what has been seen of an instruction.
    assert 2 * PRODUCTS * OUTLASTING * 64 > INSTRUCTIONS * 20


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
