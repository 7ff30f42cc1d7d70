"""Which bytes of shared memory a matrix descriptor means."""

import numpy as np
import pytest

from cuda.emulator.errors import DescriptorFaultError
from cuda.emulator.machine.memory import SharedMemory
from cuda.emulator.tensor_core.descriptors import tcgen05_matrix, wgmma_matrix
from cuda.emulator.tensor_core.operands import shared_operand
from tests.emulator.tensor_core import layouts

_MODES = ["none", "32B", "64B", "128B"]


def _shared(addresses: np.ndarray, data: np.ndarray) -> SharedMemory:
    shared = SharedMemory(0, 1 << 19)
    shared.data[addresses] = data
    shared.written.reshape(-1, 16)[np.unique(addresses) // 16] = 1
    return shared


def _k_major_strides(mode: str) -> tuple[int, int]:
    """Leading and stride offsets, all different from the compact ones."""
    return (2304, 256) if mode == "none" else (16, {"32B": 512, "64B": 512, "128B": 2048}[mode])


@pytest.mark.parametrize("mode", _MODES)
@pytest.mark.parametrize("element", ["bf16", "tf32", "e4m3", "e2m3", "e2m1"])
def test_k_major(mode: str, element: str) -> None:
    rng = np.random.default_rng(1)
    leading, stride = _k_major_strides(mode)
    codes = layouts.random_codes(rng, (64, 8 if element == "tf32" else 16 if element == "bf16" else 32), element)
    addresses = layouts.k_major(64, 32, mode, 2048, leading, stride)
    shared = _shared(addresses, layouts.packed(codes, element))
    matrix = tcgen05_matrix(layouts.matrix_descriptor(mode, 2048, leading, stride))
    values = shared_operand(matrix, element, 64, 32).read(shared, None, None)
    np.testing.assert_array_equal(values, layouts.decoded(codes, element))


@pytest.mark.parametrize("step", [1, 2, 3])
def test_the_start_advances_inside_a_swizzled_row(step: int) -> None:
    rng = np.random.default_rng(2)
    codes = layouts.random_codes(rng, (32, 64), "bf16")
    shared = _shared(layouts.k_major(32, 128, "128B", 1024, 0, 1024), layouts.packed(codes, "bf16"))
    matrix = tcgen05_matrix(layouts.matrix_descriptor("128B", 1024 + 32 * step, 0, 1024))
    values = shared_operand(matrix, "bf16", 32, 32).read(shared, None, None)
    np.testing.assert_array_equal(values, layouts.decoded(codes[:, 16 * step : 16 * step + 16], "bf16"))


@pytest.mark.parametrize("mode", [*_MODES, "128B/32B"])
@pytest.mark.parametrize(("element", "k"), [("f16", 16), ("tf32", 8), ("e5m2", 32), ("e2m1", 32), ("e3m2", 32)])
def test_mn_major(mode: str, element: str, k: int) -> None:
    rng = np.random.default_rng(3)
    size = {"f16": 2, "tf32": 4}.get(element, 1)
    leading, stride = (4352, 256) if mode == "none" else (2048, 32768)
    codes = layouts.random_codes(rng, (k, 128), element)
    addresses = layouts.mn_major(128, k, size, mode, 2048, leading, stride)
    shared = _shared(addresses, layouts.packed(codes, element))
    matrix = tcgen05_matrix(layouts.matrix_descriptor(mode, 2048, leading, stride))
    values = shared_operand(matrix, element, 128, 32, transposed=True).read(shared, None, None)
    np.testing.assert_array_equal(values, layouts.decoded(codes, element).T)


@pytest.mark.parametrize("transposed", [False, True])
def test_a_window_of_the_rows(transposed: bool) -> None:
    rng = np.random.default_rng(4)
    codes = layouts.random_codes(rng, (16, 64) if transposed else (64, 16), "f16")
    if transposed:
        addresses = layouts.mn_major(64, 16, 2, "128B", 1024, 0, 1024)
    else:
        addresses = layouts.k_major(64, 32, "128B", 1024, 0, 1024)
    shared = _shared(addresses, layouts.packed(codes, "f16"))
    matrix = wgmma_matrix(layouts.wgmma_descriptor("128B", 1024, 0, 1024))
    operand = shared_operand(matrix, "f16", 64, 32, transposed, window=slice(16, 32))
    expected = layouts.decoded(codes, "f16")
    expected = expected.T[16:32] if transposed else expected[16:32]
    np.testing.assert_array_equal(operand.read(shared, None, None), expected)


@pytest.mark.parametrize("chunk", range(8))
def test_rows_of_48_bytes_that_go_on_in_another_buffer(chunk: int) -> None:
    rng = np.random.default_rng(5)
    codes = rng.integers(0, 16, (24, 96))
    first = layouts.k_major(24, 128, "128B", 1024, 0, 1024)
    second = layouts.k_major(24, 128, "128B", 8192, 0, 1024)
    addresses = np.concatenate([first, second], axis=1)[:, 16 * chunk : 16 * chunk + 48]
    shared = _shared(addresses, layouts.packed(codes, "e2m1", dense=True))
    matrix = tcgen05_matrix(layouts.matrix_descriptor("128B", 1024 + 16 * chunk, 8192, 1024, absolute=True))
    values = shared_operand(matrix, "e2m1", 24, 48, packed=True).read(shared, None, None)
    np.testing.assert_array_equal(values, layouts.decoded(codes, "e2m1"))


def _descriptor(**fields: int) -> int:
    bits = layouts.matrix_descriptor("128B", 1024, 0, 1024)
    for place, value in fields.items():
        bits |= value << int(place[3:])
    return bits


@pytest.mark.parametrize(
    "bits", [_descriptor(bit61=1), _descriptor(bit47=1), _descriptor(bit53=1), _descriptor(bit49=1), 0]
)
def test_impossible_descriptors(bits: int) -> None:
    with pytest.raises(DescriptorFaultError):
        tcgen05_matrix(bits)


def test_impossible_operands() -> None:
    atoms_of_32 = tcgen05_matrix(layouts.matrix_descriptor("128B/32B", 1024, 0, 1024))
    crossing = tcgen05_matrix(layouts.matrix_descriptor("128B", 1024 + 112, 0, 1024))
    split = tcgen05_matrix(layouts.matrix_descriptor("128B", 1024, 1040, 1024, absolute=True))
    for matrix in (atoms_of_32, crossing, split):
        with pytest.raises(DescriptorFaultError):
            shared_operand(matrix, "bf16", 64, 32)
    with pytest.raises(DescriptorFaultError):
        shared_operand(wgmma_matrix(0), "e4m3", 8, 32, transposed=True)
