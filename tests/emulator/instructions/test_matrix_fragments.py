"""ldmatrix, stmatrix and mma.sync against the figures of the PTX ISA, thread by thread."""

from __future__ import annotations

import numpy as np
import pytest

from cuda.emulator.errors import MemoryFaultError, UnsupportedInstructionError
from tests.emulator.instructions.bench import START, Bench, run_handler, vector
from tests.emulator.tensor_core import layouts


def _matrices(count: int) -> tuple[np.ndarray, np.ndarray]:
    """(count, 8, 8) elements, and the addresses of their rows, in no order, by lane."""
    rng = np.random.default_rng(count)
    elements = rng.integers(0, 1 << 16, (count, 8, 8), dtype=np.uint16)
    rows = START + 16 * rng.permutation(64)[: 8 * count]
    # Lanes beyond the rows may hold anything.
    return elements, np.concatenate([rows, np.full(32 - 8 * count, 0xFFFFFF1)]).astype(np.uint32)


def _fragments(elements: np.ndarray, transposed: bool) -> np.ndarray:
    """(count, 32): thread t holds elements 2 (t % 4) and 2 (t % 4) + 1 of row t / 4."""
    registers = np.empty((len(elements), 32), np.uint32)
    for matrix, register in zip(elements, registers, strict=True):
        for thread in range(32):
            row, column = thread // 4, thread % 4 * 2
            low, high = (int(matrix[column + i, row] if transposed else matrix[row, column + i]) for i in (0, 1))
            register[thread] = low | high << 16
    return registers


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("transposed", [False, True])
def test_ldmatrix_and_stmatrix(count: int, transposed: bool) -> None:
    bench = Bench()
    elements, addresses = _matrices(count)
    rows = addresses[: 8 * count, None].astype(np.int64) + np.arange(16)
    fragments = _fragments(elements, transposed)
    shape = f"sync.aligned.m8n8.x{count}{'.trans' if transposed else ''}.shared.b16"
    bench.run(f"stmatrix.{shape} [%r100], {vector('%r', count)};", addresses, fragments)
    np.testing.assert_array_equal(bench.ctas[0].shared.data[rows], elements.view(np.uint8).reshape(-1, 16))
    assert bench.ctas[0].shared.written.sum() == 128 * count
    loaded = bench.run(f"ldmatrix.{shape} {vector('%r', count)}, [%r100];", addresses)
    np.testing.assert_array_equal(loaded, fragments)


def test_rows_that_are_not_aligned_or_not_written() -> None:
    text = "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r1}, [%r100];"
    with pytest.raises(MemoryFaultError, match="not aligned to 16 bytes"):
        Bench().run(text, START + 8)
    with pytest.raises(MemoryFaultError, match="never written"):
        Bench().run(text, START)


_SIZES = {"tf32": 4, "f16": 2, "bf16": 2}
_PRODUCTS = [
    ("f32", "bf16", "bf16", 16), ("f32", "f16", "f16", 8), ("f16", "f16", "f16", 16), ("f32", "tf32", "tf32", 8),
    ("f32", "tf32", "tf32", 4), ("f32", "e4m3", "e5m2", 32), ("f32", "e5m2", "e4m3", 16), ("f16", "e4m3", "e4m3", 32),
    ("s32", "s8", "u8", 32), ("s32", "u8", "u8", 16),
]  # fmt: skip


def _words(codes: np.ndarray, element: str) -> np.ndarray:
    """(rows, 4-byte words of K)."""
    return codes.astype(f"u{_SIZES.get(element, 1)}").view(np.uint8).view(np.uint32)


@pytest.mark.parametrize(("d", "a", "b", "k"), _PRODUCTS)
def test_products(d: str, a: str, b: str, k: int) -> None:
    rng = np.random.default_rng(k)
    left, right = layouts.random_codes(rng, (16, k), a), layouts.random_codes(rng, (8, k), b)
    if (d, a) == ("f16", "e4m3"):
        # Small values, for the range of float16.
        left, right = left & 0xBF, right & 0xBF
    kind = {"f32": np.float32, "f16": np.float16, "s32": np.int32}[d]
    c = rng.integers(-9, 9, (16, 8)).astype(kind)
    expected = (layouts.decoded(left, a) @ layouts.decoded(right, b).T + c).astype(kind)
    a_words, b_words = _words(left, a), _words(right, b)
    a_registers = np.empty((a_words.shape[1] // 2, 32), np.uint32)
    b_registers = np.empty((b_words.shape[1] // 4, 32), np.uint32)
    for thread in range(32):
        group, item = divmod(thread, 4)
        for register in range(len(a_registers)):
            a_registers[register, thread] = a_words[group + 8 * (register % 2), item + 4 * (register // 2)]
        for register in range(len(b_registers)):
            b_registers[register, thread] = b_words[group, item + 4 * register]
    count = 2 if d == "f16" else 4
    registers = [vector("%r", n) for n in (count, len(a_registers), len(b_registers), count)]
    text = f"mma.sync.aligned.m16n8k{k}.row.col.{d}.{a}.{b}.{d} {', '.join(registers)};"
    result = Bench().run(text, a_registers, b_registers, _accumulators(c))
    np.testing.assert_array_equal(result, _accumulators(expected))


def _accumulators(matrix: np.ndarray) -> np.ndarray:
    """Registers of a (16, 8) matrix; those of float16 hold two columns."""
    wide = np.empty((4, 32), matrix.dtype)
    for register in range(4):
        for thread in range(32):
            wide[register, thread] = matrix[thread // 4 + 8 * (register // 2), thread % 4 * 2 + register % 2]
    if matrix.dtype != np.float16:
        return wide.view(np.uint32)
    halves = wide.view(np.uint16).astype(np.uint32)
    return halves[0::2] | halves[1::2] << np.uint32(16)


@pytest.mark.parametrize(
    "text",
    [
        "ldmatrix.sync.aligned.m16n16.x1.trans.shared.b8 {%r1, %r2}, [%r3];",
        "ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r1}, [%r3];",
        "stmatrix.sync.aligned.m16n8.x1.trans.shared.b8 [%r3], {%r1};",
        "mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 {%r1}, {%r2}, {%r3}, {%r1};",
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.f16.f16 {%r1, %r2}, {%r2}, {%r3}, {%r1, %r2};",
        "mma.sp.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32 {%r1}, {%r2}, {%r3}, {%r1}, %r5, 0;",
    ],
)
def test_unsupported_forms(text: str) -> None:
    with pytest.raises(UnsupportedInstructionError):
        run_handler(text)
