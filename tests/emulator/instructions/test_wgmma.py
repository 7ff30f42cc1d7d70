"""wgmma.mma_async of a warpgroup on operands laid out byte by byte, against integer arithmetic."""

from __future__ import annotations

import numpy as np
import pytest

from cuda.emulator.errors import DescriptorFaultError, UnsupportedInstructionError
from cuda.emulator.machine.wait import Wait
from tests.emulator.instructions.bench import Bench, run_handler, statement, vector
from tests.emulator.tensor_core import layouts
from tests.emulator.tensor_core.truncated_sums import truncated_sums

_A, _B = 2048, 20480
_SIZES = {"tf32": 4, "bf16": 2, "f16": 2}


def _operand(
    bench: Bench, rng, element: str, rows: int, start: int, mode: str, transposed: bool
) -> tuple[np.ndarray, int]:
    """Values of random codes in shared memory, and the descriptor."""
    size = _SIZES.get(element, 1)
    k = 32 // size
    codes = layouts.random_codes(rng, (rows, k), element)
    span = {"none": 16, "32B": 32, "64B": 64, "128B": 128}[mode]
    if transposed:
        near, far = span * 8, span * 8 * max(1, rows * size // span)
        leading, stride = (far, near) if mode == "none" else (near, far)
        addresses = layouts.mn_major(rows, k, size, mode, start, leading, stride)
        bench.fill_shared(addresses, layouts.packed(codes.T, element))
    else:
        leading, stride = (8192, 128) if mode == "none" else (0, 8 * span)
        bench.fill_shared(layouts.k_major(rows, 32, mode, start, leading, stride), layouts.packed(codes, element))
    return layouts.decoded(codes, element), layouts.wgmma_descriptor(mode, start, leading, stride)


def _registers(matrix: np.ndarray, warp: int) -> np.ndarray:
    """(N / 2, 32) accumulators of a warp from (64, N): figure of the D fragment of wgmma.m64nNk16."""
    registers = np.empty((matrix.shape[1] // 2, 32), matrix.dtype)
    for register in range(len(registers)):
        for thread in range(32):
            row = 16 * warp + thread // 4 + 8 * (register // 2 % 2)
            registers[register, thread] = matrix[row, register // 4 * 8 + thread % 4 * 2 + register % 2]
    return registers


def _text(n: int, types: str, a_in_registers: bool, more: str, count: int | None = None) -> str:
    k = {"bf16": 16, "f16": 16, "tf32": 8}.get(types.split(".")[1], 32)
    d = vector("%f", n // 2 if count is None else count)
    a = vector("%r", 4) if a_in_registers else "%d1"
    return f"wgmma.mma_async.sync.aligned.m64n{n}k{k}.{types} {d}, {a}, %d2, %p1{more};"


_CASES = [
    ("f32", "bf16", "bf16", "128B"),
    ("f32", "f16", "f16", "64B"),
    ("f32", "tf32", "tf32", "32B"),
    ("f32", "e4m3", "e5m2", "none"),
    ("f32", "e5m2", "e5m2", "128B"),
    ("s32", "s8", "u8", "64B"),
]


@pytest.mark.parametrize(("d", "a", "b", "mode"), _CASES)
@pytest.mark.parametrize("n", [8, 96, 256])
@pytest.mark.parametrize("accumulate", [False, True])
def test_types_and_swizzles(d: str, a: str, b: str, mode: str, n: int, accumulate: bool) -> None:
    rng, bench = np.random.default_rng(1), Bench()
    left, a_descriptor = _operand(bench, rng, a, 64, _A, mode, False)
    right, b_descriptor = _operand(bench, rng, b, n, _B, mode, False)
    kind = np.int32 if d == "s32" else np.float32
    old = rng.integers(-99, 99, (64, n)).astype(kind)
    more = {"tf32": ", 1, 1", "e4m3": ", 1, 1", "e5m2": ", 1, 1", "s8": ""}.get(a, ", 1, 1, 0, 0")
    text = _text(n, f"{d}.{a}.{b}", False, more)
    start = old * accumulate
    expected = (left @ right.T).astype(kind) + start if d == "s32" else truncated_sums(left, right, start, (a, b, d))
    for warp in range(4):
        before = _registers(old, warp).view(np.uint32)
        after = bench.run(text, before, a_descriptor, b_descriptor, accumulate, warp=warp)
        np.testing.assert_array_equal(after, _registers(expected, warp).view(np.uint32))


@pytest.mark.parametrize("mode", ["none", "32B", "64B", "128B"])
@pytest.mark.parametrize("transposed", [(0, 1), (1, 0), (1, 1)])
def test_transposed_operands(mode: str, transposed: tuple[int, int]) -> None:
    rng, bench = np.random.default_rng(2), Bench()
    left, a_descriptor = _operand(bench, rng, "bf16", 64, _A, mode, bool(transposed[0]))
    right, b_descriptor = _operand(bench, rng, "bf16", 64, _B, mode, bool(transposed[1]))
    text = _text(64, "f32.bf16.bf16", False, f", 1, 1, {transposed[0]}, {transposed[1]}")
    expected = truncated_sums(left, right, np.zeros((64, 64)), ("bf16", "bf16", "f32"))
    for warp in range(4):
        after = bench.run(text, np.zeros((32, 32), np.uint32), a_descriptor, b_descriptor, False, warp=warp)
        np.testing.assert_array_equal(after, _registers(expected, warp).view(np.uint32))


@pytest.mark.parametrize("element", ["f16", "tf32", "e4m3"])
def test_a_in_registers(element: str) -> None:
    rng, bench = np.random.default_rng(3), Bench()
    size = _SIZES.get(element, 1)
    right, descriptor = _operand(bench, rng, element, 16, _B, "32B", False)
    codes = layouts.random_codes(rng, (16, 32 // size), element)
    raw = codes.astype(f"u{size}").view(np.uint8).reshape(16, 32)
    registers = np.empty((4, 32), np.uint32)
    for register in range(4):
        for thread in range(32):
            row, byte = thread // 4 + 8 * (register % 2), thread % 4 * 4 + register // 2 * 16
            registers[register, thread] = raw[row, byte : byte + 4].view(np.uint32)[0]
    more = ", -1, 1, 0" if element == "f16" else ", -1, 1"
    text = _text(16, f"f32.{element}.{element}", True, more)
    after = bench.run(text, np.zeros((8, 32), np.uint32), registers, descriptor, True, warp=2)
    expected = np.zeros((64, 16), np.float32)
    negative = -layouts.decoded(codes, element)
    expected[32:48] = truncated_sums(negative, right, np.zeros((16, 16)), (element, element, "f32"))
    np.testing.assert_array_equal(after.view(np.float32), _registers(expected, 2))


def test_float16_accumulators() -> None:
    rng, bench = np.random.default_rng(4), Bench()
    left, a_descriptor = _operand(bench, rng, "f16", 64, _A, "128B", False)
    right, b_descriptor = _operand(bench, rng, "f16", 16, _B, "128B", False)
    old = rng.standard_normal((64, 16)).astype(np.float16)
    expected = truncated_sums(left, right, old.astype(np.float64), ("f16", "f16", "f16"))
    text = _text(16, "f16.f16.f16", False, ", 1, 1, 0, 0", count=4)

    def halves(matrix: np.ndarray) -> np.ndarray:
        pairs = _registers(matrix, 1).view(np.uint16).astype(np.uint32)
        return pairs[0::2] | pairs[1::2] << np.uint32(16)

    after = bench.run(text, halves(old), a_descriptor, b_descriptor, True, warp=1)
    np.testing.assert_array_equal(after, halves(expected))


def _racing_bench() -> tuple[Bench, tuple]:
    rng, bench = np.random.default_rng(5), Bench(races=True)
    _, a_descriptor = _operand(bench, rng, "bf16", 64, _A, "128B", False)
    _, b_descriptor = _operand(bench, rng, "bf16", 8, _B, "128B", False)
    return bench, (np.zeros((4, 32), np.uint32), a_descriptor, b_descriptor, False)


_MMA = _text(8, "f32.bf16.bf16", False, ", 1, 1, 0, 0")
_COMMIT, _WAIT = "wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned {};"


def _overwrite(bench: Bench, row: int) -> list[str]:
    """Warp 0 stores to a row of A; the kinds of findings."""
    address = layouts.k_major(64, 32, "128B", _A, 0, 1024)[row, 0]
    shared, actor = bench.ctas[0].shared, bench.ctas[0].warps[0].actor
    shared.write(np.array([address]), np.array([1], np.uint32), 4, actor, statement("st.shared.b32 [%r1], %r2;"))
    return [kind for kind, _ in bench.findings]


@pytest.mark.parametrize("row", [0, 20, 63])
def test_shared_memory_is_free_after_the_wait_of_one_warp(row: int) -> None:
    bench, values = _racing_bench()
    for warp in range(4):
        bench.run(_MMA, *values, warp=warp)
        bench.run(_COMMIT, warp=warp)
    assert bench.run(_WAIT.format(0)) is None
    assert _overwrite(bench, row) == []


@pytest.mark.parametrize("keep", [1, 2])
def test_shared_memory_is_read_until_the_group_is_waited_for(keep: int) -> None:
    bench, values = _racing_bench()
    for warp in range(4):
        bench.run(_MMA, *values, warp=warp)
        bench.run(_COMMIT, warp=warp)
        if keep == 2:
            bench.run(_COMMIT, warp=warp)
    bench.run(_WAIT.format(keep))
    assert set(_overwrite(bench, 20)) == {"race"}


def test_a_wait_includes_the_other_warps() -> None:
    bench, values = _racing_bench()
    for warp in range(3):
        bench.run(_MMA, *values, warp=warp)
        bench.run(_COMMIT, warp=warp)
    wait = bench.run(_WAIT.format(0))
    assert isinstance(wait, Wait)
    assert not wait.ready()
    bench.run(_MMA, *values, warp=3)
    bench.run(_COMMIT, warp=3)
    assert wait.ready()


def test_impossible_descriptors() -> None:
    bench, values = _racing_bench()
    with pytest.raises(DescriptorFaultError, match=r"line \d+.*base offset"):
        bench.run(_MMA, values[0], values[1] | 1 << 49, values[2], False)


@pytest.mark.parametrize(
    "text",
    [
        _text(8, "f32.bf16.f16", False, ", 1, 1, 0, 0"),
        _text(8, "f16.bf16.bf16", False, ", 1, 1, 0, 0", count=2),
        _text(12, "f32.f16.f16", False, ", 1, 1, 0, 0"),
        _text(8, "f32.f16.f16", False, ", 1, 2, 0, 0"),
        _text(8, "f32.tf32.tf32", False, ", 1, 1, 0, 1"),
        _text(8, "f32.f16.f16", False, ", 1, 1, 0, 0", count=2),
        "wgmma.mma_async.sp.sync.aligned.m64n8k32.f32.f16.f16 {%f0, %f1, %f2, %f3}, %d1, %d2, %r1, 0, %p1, 1, 1, 0, 0;",
    ],
)
def test_unsupported_forms(text: str) -> None:
    with pytest.raises(UnsupportedInstructionError):
        run_handler(text)
