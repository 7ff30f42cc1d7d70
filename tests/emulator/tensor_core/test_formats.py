"""Decoding of operands against ml_dtypes."""

import numpy as np
import pytest

from cuda.emulator.tensor_core.formats import SCALE_VALUES, decode
from tests.emulator.tensor_core import layouts


@pytest.mark.parametrize("element", ["bf16", "f16"])
def test_all_codes_of_16_bits(element: str) -> None:
    codes = np.arange(1 << 16, dtype=np.uint16)
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(decode(codes.view(np.uint8), element), layouts.decoded(codes, element))


@pytest.mark.parametrize("element", ["e4m3", "e5m2", "s8", "u8"])
def test_all_codes_of_8_bits(element: str) -> None:
    codes = np.arange(256, dtype=np.uint8)
    np.testing.assert_array_equal(decode(codes, element), layouts.decoded(codes, element))


@pytest.mark.parametrize("element", ["e2m3", "e3m2", "e2m1"])
@pytest.mark.parametrize("packing", ["chunks", "bytes"])
def test_all_codes_of_4_and_6_bits(element: str, packing: str) -> None:
    width = 4 if element == "e2m1" else 6
    codes = np.arange(1 << width)
    if packing == "chunks":
        raw = layouts.packed(codes[None], element)[0]
    else:
        raw = (codes << (2 if width == 4 else 0)).astype(np.uint8)
    np.testing.assert_array_equal(decode(raw, element, packing), layouts.decoded(codes, element))


def test_packed_4_bits_have_the_low_nibble_first() -> None:
    np.testing.assert_array_equal(decode(np.array([0x72, 0xF1], np.uint8), "e2m1"), [1.0, 6.0, 0.5, -6.0])


def test_tf32_drops_the_low_bits() -> None:
    raw = np.array([1.0 + 2.0**-10 + 2.0**-11], np.float32).view(np.uint8)
    assert decode(raw, "tf32").tolist() == [1.0 + 2.0**-10]


@pytest.mark.parametrize("kind", ["ue4m3", "ue8m0"])
def test_scale_factors(kind: str) -> None:
    codes = np.arange(128 if kind == "ue4m3" else 256, dtype=np.uint8)
    expected = codes.view(layouts.SCALES[kind]).astype(np.float64)
    np.testing.assert_array_equal(SCALE_VALUES[kind][: len(codes)], expected)
