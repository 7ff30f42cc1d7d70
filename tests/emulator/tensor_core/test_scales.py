"""Scale factors in tensor memory."""

import numpy as np
import pytest

from cuda.emulator.errors import DescriptorFaultError, MemoryFaultError
from cuda.emulator.machine.tensor_memory import TensorMemory
from cuda.emulator.ptx.syntax import Instruction
from cuda.emulator.tensor_core.scales import scale_factors
from tests.emulator.tensor_core import layouts

_SOME = Instruction("tcgen05.mma", (), None, False, 1, "", 0)


def _memory(words: np.ndarray) -> TensorMemory:
    memory = TensorMemory(0)
    memory.allocate(0, 512)
    memory.data[:], memory.written[:] = words, words != 0
    return memory


@pytest.mark.parametrize("rows", [8, 32, 48, 128, 192, 256])
@pytest.mark.parametrize(("factors", "first"), [(1, 0), (1, 3), (2, 2), (4, 0), (3, 2), (6, 0), (6, 2)])
def test_copies_that_agree(rows: int, factors: int, first: int) -> None:
    codes = np.random.default_rng(rows).integers(1, 127, (rows, factors))
    words = np.zeros((512, 128), np.uint32)
    layouts.place_scales(words, 20, codes, first)
    scales = scale_factors(20, factors, first, "ue4m3").read_copies(_memory(words), rows, range(4), None, _SOME)
    np.testing.assert_array_equal(scales, codes.astype(np.uint8).view(layouts.SCALES["ue4m3"]).astype(np.float64))


def test_the_rows_of_a_quadrant_read_the_copy_there() -> None:
    rng = np.random.default_rng(7)
    words = np.zeros((512, 128), np.uint32)
    copies = [rng.integers(1, 255, (128, 2)) for _ in range(4)]
    for quadrant, codes in enumerate(copies):
        layouts.place_scales(words, 8, codes, 2, quadrants=(quadrant,))
    scales = scale_factors(8 | 2 << 30, 2, 2, "ue8m0").read_own(_memory(words), None, _SOME)
    own = np.concatenate([codes[32 * q : 32 * q + 32] for q, codes in enumerate(copies)])
    np.testing.assert_array_equal(scales, own.astype(np.uint8).view(layouts.SCALES["ue8m0"]).astype(np.float64))


@pytest.mark.parametrize("row", [5, 40])
def test_copies_that_differ(row: int) -> None:
    words = np.zeros((512, 128), np.uint32)
    layouts.place_scales(words, 0, np.full((48, 4), 0x38), 0)
    words[row // 32, 64 + row % 32] ^= 1 << 9
    with pytest.raises(MemoryFaultError, match="differ between the lane quadrants"):
        scale_factors(0, 4, 0, "ue4m3").read_copies(_memory(words), 48, range(4), None, _SOME)


@pytest.mark.parametrize(("address", "factors", "first"), [(16 << 16, 4, 0), (0, 2, 1), (0, 4, 2), (0, 6, 1)])
def test_impossible_places(address: int, factors: int, first: int) -> None:
    with pytest.raises(DescriptorFaultError):
        scale_factors(address, factors, first, "ue8m0")
