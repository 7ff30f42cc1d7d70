"""Code tables and encoders of the small formats against ml_dtypes and against nearest-value search."""

import ml_dtypes
import numpy as np
import pytest

from cuda.emulator.arithmetic import formats

ML_DTYPES = {
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "ue8m0": ml_dtypes.float8_e8m0fnu,
}
SIGNED = ("e2m1", "e2m3", "e3m2", "e4m3", "e5m2")


def finite_codes(name: str) -> np.ndarray:
    table = formats.values(name)
    return np.flatnonzero(np.isfinite(table[: len(table) // 2]))


@pytest.mark.parametrize("name", ML_DTYPES)
def test_values_of_all_codes(name):
    table = formats.values(name)
    expected = np.arange(len(table), dtype="u1").view(ML_DTYPES[name]).astype("f8")
    np.testing.assert_array_equal(table, expected)
    np.testing.assert_array_equal(np.signbit(table)[~np.isnan(table)], np.signbit(expected)[~np.isnan(table)])


def test_unsigned_e4m3_has_the_values_of_e4m3():
    np.testing.assert_array_equal(formats.values("ue4m3"), formats.values("e4m3")[:128])


@pytest.mark.parametrize("name", SIGNED)
def test_every_value_is_encoded_as_its_code(name):
    table = formats.values(name)
    codes = np.flatnonzero(np.isfinite(table))
    np.testing.assert_array_equal(formats.encode(name, table[codes]), codes)


@pytest.mark.parametrize("name", SIGNED)
def test_ties_go_to_even_codes_and_their_neighbours_to_the_nearest(name):
    codes = finite_codes(name)
    x = formats.values(name)[codes]
    middle = (x[:-1] + x[1:]) / 2
    even = np.where(codes[:-1] % 2 == 0, codes[:-1], codes[1:])
    np.testing.assert_array_equal(formats.encode(name, middle), even)
    np.testing.assert_array_equal(formats.encode(name, np.nextafter(middle, 0)), codes[:-1])
    np.testing.assert_array_equal(formats.encode(name, np.nextafter(middle, np.inf)), codes[1:])


@pytest.mark.parametrize("name", SIGNED)
def test_encoding_saturates_and_has_one_nan(name):
    last = finite_codes(name)[-1]
    sign = len(formats.values(name)) // 2
    nan = {"e4m3": 0x7F, "e5m2": 0x7F}.get(name, last)
    actual = formats.encode(name, np.array([1e30, -1e30, np.inf, -np.inf, np.nan, -np.nan, -0.0]))
    np.testing.assert_array_equal(actual, [last, sign + last, last, sign + last, nan, nan, sign])


@pytest.mark.parametrize("name", SIGNED)
def test_all_bfloat16_values_and_middles_agree_with_ml_dtypes(name):
    bits = np.arange(1 << 16, dtype="u4") << 16
    x = np.concatenate([bits | low for low in (0, 1, 0x8000, 0xFFFF)]).view("f4")
    largest = formats.values(name)[finite_codes(name)[-1]]
    with np.errstate(all="ignore"):
        expected = np.clip(x, -largest, largest).astype(ML_DTYPES[name]).view("u1")
        actual = formats.encode_table(name, False, 0, "u2").take(formats.sticky_bfloat16(x.view("u4")))
    number = ~np.isnan(x)
    np.testing.assert_array_equal(actual[number], expected[number])
    assert set(actual[~number]) == {formats.FORMATS[name].nan}


def test_relu_leaves_no_sign():
    x = np.array([-1.0, -0.0, -np.inf, 1.0, np.nan])
    np.testing.assert_array_equal(formats.encode("e4m3", x, relu=True), [0, 0, 0, 0x38, 0x7F])


@pytest.mark.parametrize("rounding", ["rz", "rp"])
def test_ue8m0_is_the_power_of_two_below_or_above(rounding):
    rng = np.random.default_rng(0)
    bits = np.concatenate([np.arange(1 << 16) << 16, (np.arange(1 << 16) << 16) | 1, rng.integers(0, 1 << 32, 4096)])
    x = bits.astype("u4").view("f4")
    with np.errstate(all="ignore"):
        magnitude = np.abs(x.astype("f8"))
    mantissa, exponent = np.frexp(magnitude)
    power = np.where((mantissa == 0.5) | (rounding == "rz"), exponent - 1, exponent)
    expected = np.clip(power + 127, 0, 254)
    expected[magnitude == 0] = 0
    expected[np.isinf(magnitude)] = 254
    expected[np.isnan(magnitude)] = 255
    table = formats.ue8m0_table(rounding, True, 0)
    np.testing.assert_array_equal(table.take(formats.sticky_bfloat16(x.view("u4"))), expected)


def test_ue8m0_without_saturation_overflows_to_nan():
    largest, infinite = np.uint16(0x7F7F), np.uint16(0x7F80)
    assert formats.ue8m0_table("rp", False, 0)[largest] == 0xFF
    assert formats.ue8m0_table("rz", False, 0)[largest] == 0xFE
    assert formats.ue8m0_table("rz", False, 0)[infinite] == 0xFF


@pytest.mark.parametrize("rounding", ["rn", "rz", "rm", "rp"])
def test_bfloat16_rounding_of_all_values_and_middles(rounding):
    bits = np.concatenate(
        [(np.arange(0x7F80, dtype="u4") << 16) | low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]
    )
    bits = np.concatenate([bits, bits | np.uint32(1 << 31)])
    actual = (formats.round_bfloat16(bits, rounding) >> 16).astype("u2")
    below, rest, negative = (bits >> 16) & 0x7FFF, bits & 0xFFFF, bits >> 31
    up = {
        "rn": (rest > 0x8000) | ((rest == 0x8000) & (below % 2 == 1)),
        "rz": np.zeros(len(bits), bool),
        "rm": (rest > 0) & (negative == 1),
        "rp": (rest > 0) & (negative == 0),
    }[rounding]
    np.testing.assert_array_equal(actual, (below + up) | (negative << 15))
