"""tcgen05.ld, .st, .cp and .shift against the figures of the PTX ISA, thread by thread."""

from __future__ import annotations

import numpy as np
import pytest

from cuda.emulator.errors import MemoryFaultError, UnsupportedInstructionError
from tests.emulator.instructions.bench import START, Bench, run_handler, vector
from tests.emulator.tensor_core import layouts


def _cell(shape: str, repeats: int, register: int, thread: int, split: int) -> tuple[int, int]:
    """Lane and logical column of a register of a thread."""
    quad, item = divmod(thread, 4)
    if shape == "32x32b":
        return thread, register
    if shape == "16x32bx2":
        return thread % 16, register + (split if thread >= 16 else 0)
    if shape == "16x64b":
        # Threads 4 q and 4 q + 2 hold the two words of lane q, threads 4 q + 1 and 4 q + 3 those of lane q + 8.
        return quad + 8 * (item % 2), 2 * register + item // 2
    if shape == "16x128b":
        block, half = divmod(register, 2)
        return quad + 8 * half, 4 * block + item
    block, rest = divmod(register, 4)
    half, word = divmod(rest, 2)
    return quad + 8 * half, 8 * block + 2 * item + word


_REGISTERS = {"32x32b": 1, "16x32bx2": 1, "16x64b": 1, "16x128b": 2, "16x256b": 4}
_MOST = {"32x32b": 128, "16x32bx2": 128, "16x64b": 128, "16x128b": 64, "16x256b": 32}
_SHAPES = [(shape, repeats) for shape, most in _MOST.items() for repeats in (1, 2, 8, most)]


def _expected(
    words: np.ndarray, shape: str, repeats: int, column: int, lane: int, split: int, packed: bool
) -> np.ndarray:
    """(registers, 32) of a load, from (512, 128) words."""
    count = _REGISTERS[shape] * repeats
    registers = np.empty((count, 32), np.uint32)
    for register in range(count):
        for thread in range(32):
            at, logical = _cell(shape, repeats, register, thread, 0 if packed else split)
            if packed:
                start = column + 2 * logical + (split if shape == "16x32bx2" and thread >= 16 else 0)
                low, high = (int(words[start + i, lane + at]) & 0xFFFF for i in (0, 1))
                registers[register, thread] = low | high << 16
            else:
                registers[register, thread] = words[column + logical, lane + at]
    return registers


def _text(opcode: str, shape: str, repeats: int, packing: str, split: int) -> str:
    registers = vector("%r", _REGISTERS[shape] * repeats)
    more = f", {split}" if shape == "16x32bx2" else ""
    suffix = f".{packing}" if packing else ""
    if opcode == "ld":
        return f"tcgen05.ld.sync.aligned.{shape}.x{repeats}{suffix}.b32 {registers}, [%r150]{more};"
    return f"tcgen05.st.sync.aligned.{shape}.x{repeats}{suffix}.b32 [%r150]{more}, {registers};"


def _spot(repeats: int, packed: bool) -> tuple[int, int]:
    """A first column, and a split that leaves a gap where there is room for one."""
    columns = repeats * (2 if packed else 1)
    return (0, columns) if repeats >= 32 else (3, columns + 2)


@pytest.mark.parametrize(("shape", "repeats"), _SHAPES)
@pytest.mark.parametrize("packed", [False, True])
def test_loads(shape: str, repeats: int, packed: bool) -> None:
    bench, rng = Bench(), np.random.default_rng(1)
    words = rng.integers(0, 1 << 32, (512, 128), dtype=np.uint32)
    bench.fill_tensor(0, words)
    column, split = _spot(repeats, packed)
    lane = 64 if shape == "32x32b" else 80
    values = bench.run(_text("ld", shape, repeats, "pack::16b" if packed else "", split), lane << 16 | column, warp=2)
    np.testing.assert_array_equal(values, _expected(words, shape, repeats, column, lane, split, packed))
    assert not bench.findings


@pytest.mark.parametrize(("shape", "repeats"), _SHAPES)
@pytest.mark.parametrize("packed", [False, True])
def test_stores(shape: str, repeats: int, packed: bool) -> None:
    bench, rng = Bench(), np.random.default_rng(2)
    tensor = bench.ctas[0].tensor
    tensor.allocate(0, 512)
    column, split = _spot(repeats, packed)
    lane = 96 if shape == "32x32b" else 112
    values = rng.integers(0, 1 << 32, (_REGISTERS[shape] * repeats, 32), dtype=np.uint32)
    bench.run(_text("st", shape, repeats, "unpack::16b" if packed else "", split), lane << 16 | column, values, warp=3)
    assert not tensor.written.any()
    bench.run("tcgen05.wait::st.sync.aligned;", warp=3)
    np.testing.assert_array_equal(_expected(tensor.data, shape, repeats, column, lane, split, packed), values)
    columns = values.size // (32 if shape in ("32x32b",) else 16) * (2 if packed else 1)
    assert tensor.written.sum() == columns * (32 if shape == "32x32b" else 16)
    if packed:
        assert (tensor.data[tensor.written] < 1 << 16).all()


def _ordered(values: np.ndarray, largest: bool) -> np.ndarray:
    """The extreme of each thread's values, where -0 is below +0."""
    order = np.lexsort((np.where(np.signbit(values), 0, 1), values), axis=0)
    return np.take_along_axis(values, order[-1:] if largest else order[:1], axis=0)[0]


@pytest.mark.parametrize("operation", ["max", "min"])
@pytest.mark.parametrize("absolute", [False, True])
def test_reductions(operation: str, absolute: bool) -> None:
    bench, rng = Bench(), np.random.default_rng(3)
    values = rng.choice(np.array([-3.5, -0.0, 0.0, 1.0, 2.5, -7.0], np.float32), (8, 128))
    values[:, 3] = [-0.0, 0.0] * 4
    bench.fill_tensor(0, values.view(np.uint32))
    modifiers = f"{operation}{'.abs' if absolute else ''}.f32"
    text = f"tcgen05.ld.red.sync.aligned.32x32b.x8.{modifiers} {vector('%r', 8)}, %r100, [%r150];"
    loaded, reduced = bench.run(text, 0)
    np.testing.assert_array_equal(loaded, values[:, :32].view(np.uint32))
    source = np.abs(values) if absolute else values
    expected = _ordered(source[:, :32], operation == "max")
    np.testing.assert_array_equal(reduced, expected.view(np.uint32))


def test_reductions_of_nan_and_integers() -> None:
    bench = Bench()
    values = np.ones((2, 128), np.float32)
    values[0, 0] = values[0, 1] = values[1, 1] = np.nan
    bench.fill_tensor(0, values.view(np.uint32))
    text = "tcgen05.ld.red.sync.aligned.32x32b.x2.max{}.{} {{%r1, %r2}}, %r3, [%r4];"
    _, reduced = bench.run(text.format("", "f32"), 0)
    assert reduced[:3].tolist() == [0x3F800000, 0x7FFFFFFF, 0x3F800000]
    _, reduced = bench.run(text.format(".NaN", "f32"), 0)
    assert reduced[:3].tolist() == [0x7FFFFFFF, 0x7FFFFFFF, 0x3F800000]
    bench.fill_tensor(0, np.array([[0xFFFFFFFF], [5]], np.uint32).repeat(128, axis=1))
    assert bench.run(text.format("", "s32"), 0)[1][0] == 5
    assert bench.run(text.format("", "u32"), 0)[1][0] == 0xFFFFFFFF


@pytest.mark.parametrize(
    "form",
    [
        "32x32b.x1.max.f32",
        "32x32b.x2.f32",
        "32x32b.x2.min.max.f32",
        "16x64b.x2.max.f32",
        "32x32b.x2.max.NaN.u32",
        "32x32b.x2.max.abs.s32",
        "32x32b.x2.max.b32",
        "32x32b.x2.max.pack::16b.f32",
        "32x32b.x2.max.add.f32",
    ],
)
def test_reductions_that_the_assembler_refuses(form: str) -> None:
    registers = vector("%r", 1 if ".x1." in form else 2)
    with pytest.raises(UnsupportedInstructionError, match="is not supported"):
        Bench().run(f"tcgen05.ld.red.sync.aligned.{form} {registers}, %r100, [%r150];", 0)


@pytest.mark.parametrize(("shape", "repeats"), [("32x32b", 3), ("32x32b", 256), ("16x128b", 128), ("16x256b", 64)])
@pytest.mark.parametrize("opcode", ["ld", "st"])
def test_repetitions_that_the_assembler_refuses(opcode: str, shape: str, repeats: int) -> None:
    with pytest.raises(UnsupportedInstructionError, match=rf"is not supported.*\.x{repeats}"):
        Bench().run(_text(opcode, shape, repeats, "", 0), 0)


def test_lanes_that_a_warp_reaches() -> None:
    bench = Bench()
    bench.fill_tensor(0, np.arange(512 * 128, dtype=np.uint32).reshape(512, 128))
    text = "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r1}, [%r2];"
    np.testing.assert_array_equal(bench.run(text, 0, warp=1)[0], np.arange(32, 64))
    assert [kind for kind, _ in bench.findings] == ["issue"]
    with pytest.raises(MemoryFaultError, match=r"reaches lanes 32\.\.63, not lane 64"):
        bench.run(text, 64 << 16, warp=1)
    with pytest.raises(MemoryFaultError, match="different addresses"):
        bench.run(text, np.arange(32, dtype=np.uint32), warp=0)


def test_columns_without_data() -> None:
    bench = Bench()
    bench.ctas[0].tensor.allocate(32, 32)
    text = "tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r1, %r2}, [%r3];"
    with pytest.raises(MemoryFaultError, match="column 40, lane 0, which was never written"):
        bench.run(text, 40)
    with pytest.raises(MemoryFaultError, match=r"columns 63..64 .* are not all allocated"):
        bench.run(text, 63)
    with pytest.raises(MemoryFaultError, match=r"columns 511..512 .* are not all allocated"):
        bench.run(text, 511)


def _copy_case(bench: Bench, rows: int, nbytes: int, mode: str = "none") -> tuple[np.ndarray, int]:
    """Random rows in the shared memory of each CTA: (CTAs, rows, words) and the descriptor."""
    rng = np.random.default_rng(rows)
    leading, stride = (4096, 128) if mode == "none" else (0, 1024)
    addresses = layouts.k_major(rows, nbytes, mode, START, leading, stride)
    data = rng.integers(0, 256, (len(bench.ctas), rows, nbytes), dtype=np.uint8)
    for cta in bench.ctas:
        bench.fill_shared(addresses, data[cta.rank], cta.rank)
        cta.tensor.allocate(0, 64)
    return data.view(np.uint32), layouts.matrix_descriptor(mode, START, leading, stride)


_COPIES = {
    "128x256b": (128, 8, lambda lane: lane),
    "128x128b": (128, 4, lambda lane: lane),
    "64x128b.warpx2::02_13": (64, 4, lambda lane: lane % 64),
    "64x128b.warpx2::01_23": (64, 4, lambda lane: lane // 64 * 32 + lane % 32),
    "32x128b.warpx4": (32, 4, lambda lane: lane % 32),
}


@pytest.mark.parametrize("shape", _COPIES)
@pytest.mark.parametrize("ctas", [1, 2])
@pytest.mark.parametrize("mode", ["none", "128B"])
def test_copies(shape: str, ctas: int, mode: str) -> None:
    bench = Bench(ctas)
    rows, words, row_of = _COPIES[shape]
    data, descriptor = _copy_case(bench, rows, 4 * words, mode)
    bench.one(f"tcgen05.cp.cta_group::{ctas}.{shape} [%r1], %d1;", 8, descriptor)
    for cta in bench.ctas:
        for lane in range(128):
            np.testing.assert_array_equal(cta.tensor.data[8 : 8 + words, lane], data[cta.rank, row_of(lane)])
        assert cta.tensor.written.sum() == words * 128


def test_four_rows_to_one_lane_of_each_quadrant() -> None:
    bench = Bench()
    data, descriptor = _copy_case(bench, 4, 32)
    bench.one("tcgen05.cp.cta_group::1.4x256b [%r1], %d1;", 31 << 16 | 16, descriptor)
    for row in range(4):
        np.testing.assert_array_equal(bench.ctas[0].tensor.data[16:24, 32 * row + 31], data[0, row])
    assert bench.ctas[0].tensor.written.sum() == 32


def test_copies_to_impossible_lanes() -> None:
    bench = Bench()
    _, descriptor = _copy_case(bench, 32, 16)
    with pytest.raises(MemoryFaultError, match="cannot start at lane 32"):
        bench.one("tcgen05.cp.cta_group::1.32x128b.warpx4 [%r1], %d1;", 32 << 16, descriptor)


def test_shift() -> None:
    bench = Bench()
    words = np.arange(8 * 128, dtype=np.uint32).reshape(8, 128)
    bench.fill_tensor(4, words)
    bench.one("tcgen05.shift.cta_group::1.down [%r1];", 32 << 16 | 4)
    expected = words.copy()
    expected[:, 32:63] = words[:, 33:64]
    np.testing.assert_array_equal(bench.ctas[0].tensor.data[4:12], expected)


@pytest.mark.parametrize(
    "text",
    [
        "tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r1}, [%r2];",
        "tcgen05.ld.sync.aligned.16x32bx2.x1.b32 {%r1}, [%r2];",
        "tcgen05.st.sync.aligned.32x32b.x1.pack::16b.b32 [%r2], {%r1};",
        "tcgen05.cp.cta_group::1.32x128b [%r1], %d1;",
        "tcgen05.cp.cta_group::1.128x256b.b8x16.b4x16_p64 [%r1], %d1;",
        "tcgen05.shift.cta_group::1.up [%r1];",
    ],
)
def test_unsupported_forms(text: str) -> None:
    with pytest.raises(UnsupportedInstructionError):
        run_handler(text)
