"""Conversions: every half and bfloat16 value, middles between values, edges of the integer types, random words."""

from fractions import Fraction
from math import ceil, floor

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given

from cuda.emulator.arithmetic import formats
from cuda.emulator.arithmetic.operations import find
from cuda.emulator.errors import UnsupportedInstructionError
from tests.emulator.arithmetic import reference
from tests.emulator.arithmetic.reference import apply, assert_same_floats, signed, unsigned

EVERY = np.arange(1 << 16, dtype="u4")
# Every bfloat16 value, what is next to it, and the middles.
NEAR_BFLOAT16 = np.concatenate([(EVERY << 16) | low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)])
HALVES = EVERY.astype("u2").view("f2").astype("f4").view("u4")
NEAR_FLOAT16 = np.concatenate([HALVES + step for step in (0, 1, 0xFFF, 0x1000, 0x1001, 0x1FFF)])
INTEGERS = ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64")


def float32(bits) -> np.ndarray:
    return np.asarray(bits, "u4").view("f4")


def is_nan(bits) -> np.ndarray:
    return (bits & 0x7FFFFFFF) > 0x7F800000


class TestToHalves:
    def test_bfloat16_to_nearest(self):
        with np.errstate(invalid="ignore"):
            expected = float32(NEAR_BFLOAT16).astype(ml_dtypes.bfloat16).view("u2")
        expected = np.where(is_nan(NEAR_BFLOAT16), 0x7FFF, expected)
        np.testing.assert_array_equal(apply("cvt.rn.bf16.f32", NEAR_BFLOAT16), expected)
        packed = apply("cvt.rn.bf16x2.f32", NEAR_BFLOAT16, NEAR_BFLOAT16[::-1])
        np.testing.assert_array_equal(packed >> 16, expected)
        np.testing.assert_array_equal(packed & 0xFFFF, expected[::-1])

    def test_float16_to_nearest(self):
        with np.errstate(all="ignore"):
            expected = float32(NEAR_FLOAT16).astype("f2").view("u2")
        expected = np.where(is_nan(NEAR_FLOAT16), 0x7FFF, expected)
        np.testing.assert_array_equal(apply("cvt.rn.f16.f32", NEAR_FLOAT16), expected)
        packed = apply("cvt.rn.f16x2.f32", NEAR_FLOAT16, NEAR_FLOAT16[::-1])
        np.testing.assert_array_equal(packed >> 16, expected)
        np.testing.assert_array_equal(packed & 0xFFFF, expected[::-1])

    @pytest.mark.parametrize("rounding", ["rn", "rz", "rm", "rp"])
    @pytest.mark.parametrize("kind", ["f16", "bf16"])
    @given(columns=reference.lanes(reference.words("f32")))
    def test_every_rounding(self, kind, rounding, columns):
        expected = []
        for x in reference.values(columns[0], "f32"):
            y = reference.rounded(Fraction(x), kind, rounding) if np.isfinite(x) else x
            expected.append(reference.encoded(np.copysign(y, x), kind))
        np.testing.assert_array_equal(apply(f"cvt.{rounding}.{kind}.f32", *columns), expected)

    @pytest.mark.parametrize("kind", ["f16", "bf16"])
    def test_truncated_pairs(self, kind):
        x = NEAR_BFLOAT16[::7]
        single = apply(f"cvt.rz.{kind}.f32", x).astype("u4")
        packed = apply(f"cvt.rz.{kind}x2.f32", x, x[::-1])
        np.testing.assert_array_equal(packed, single << 16 | single[::-1])

    @pytest.mark.parametrize(("kind", "largest"), [("f16", 0x7BFF), ("bf16", 0x7F7F)])
    def test_satfinite_and_relu(self, kind, largest):
        x = np.array([np.inf, -np.inf, 3.4e38, -3.4e38, np.nan, -1.0, -0.0, 1.0], "f4")
        one = int(apply(f"cvt.rn.{kind}.f32", [0x3F800000])[0])
        saturated = [largest, largest | 0x8000, largest, largest | 0x8000, 0x7FFF, one | 0x8000, 0x8000, one]
        np.testing.assert_array_equal(apply(f"cvt.rn.satfinite.{kind}.f32", x), saturated)
        positive = [largest, 0, largest, 0, 0x7FFF, 0, 0, one]
        np.testing.assert_array_equal(apply(f"cvt.rn.relu.satfinite.{kind}.f32", x), positive)
        packed = apply(f"cvt.rn.relu.satfinite.{kind}x2.f32", x, x[::-1])
        np.testing.assert_array_equal(packed >> 16, positive)
        np.testing.assert_array_equal(packed & 0xFFFF, positive[::-1])

    def test_stochastic_bfloat16_adds_random_bits(self):
        x = np.uint32(0x3F804000)
        for random, up in ((0xBFFF, 0), (0xC000, 1)):
            assert apply("cvt.rs.bf16x2.f32", x, x, random << 16) == (0x3F80 + up) << 16 | 0x3F80
            assert apply("cvt.rs.bf16x2.f32", x, x, random) == 0x3F80 << 16 | 0x3F80 + up
        assert apply("cvt.rs.satfinite.bf16x2.f32", 0x7F7FFFFF, 0xFFFFFFFF, 0xFFFFFFFF) == 0x7F7F7FFF


@pytest.mark.parametrize("rounding", ["rn", "rz", "rna"])
def test_tf32(rounding):
    x = np.concatenate([(EVERY << 13) | low for low in (0, 1, 0xFFF, 0x1000, 0x1001)])
    x = x[~is_nan(x)]
    kept, rest = x >> 13, x & 0x1FFF
    up = {"rn": (rest > 0x1000) | ((rest == 0x1000) & (kept % 2 == 1)), "rz": rest < 0, "rna": rest >= 0x1000}[rounding]
    up &= x < 0x7F800000
    np.testing.assert_array_equal(apply(f"cvt.{rounding}.tf32.f32", x), (kept + up) << 13)
    if rounding != "rna":
        np.testing.assert_array_equal(apply(f"cvt.{rounding}.tf32.f32", [0xFFFFFFFF, 0x7F800001]), [0x7FFFE000] * 2)


def test_tf32_rounded_away_is_what_ptxas_makes_of_it():
    nans = np.array([0x7F800001, 0x7F801FFF, 0x7F802000, 0x7FC00000, 0xFFFFFFFF], "u4")
    cut = [0x7F800000, 0x7F800000, 0x7F802000, 0x7FC00000, 0xFFFFE000]
    np.testing.assert_array_equal(apply("cvt.rna.tf32.f32", nans), cut)
    lower = [0x7F7FE000, 0x7F7FE000, 0x7F800000, 0x7FBFE000, 0xFFFFC000]
    np.testing.assert_array_equal(apply("cvt.rna.satfinite.tf32.f32", nans), lower)
    infinite = np.array([0x7F800000, 0xFF800000, 0x7F7FF000, 0xFF7FFFFF, 0x7F7FEFFF], "u4")
    largest = [0x7F7FE000, 0xFF7FE000, 0x7F7FE000, 0xFF7FE000, 0x7F7FE000]
    np.testing.assert_array_equal(apply("cvt.rna.satfinite.tf32.f32", infinite), largest)
    with pytest.raises(UnsupportedInstructionError):
        apply("cvt.rna.relu.tf32.f32", infinite)


def test_flushing_of_float64():
    smallest = 2.0**-126
    x = smallest * np.array([1, 1 - 2.0**-26, 1 - 2.0**-25, 1 - 2.0**-24, 1 - 2.0**-23, 2.0**-100, np.nan])
    kept = {"rn": [1, 1, 1, 0, 0, 0], "rz": [1, 0, 0, 0, 0, 0], "rm": [1, 0, 0, 0, 0, 0], "rp": [1, 1, 1, 0, 0, 0]}
    opposite = {"rn": "rn", "rz": "rz", "rm": "rp", "rp": "rm"}
    for rounding, expected in kept.items():
        result = apply(f"cvt.{rounding}.ftz.f32.f64", x).view("f4")
        np.testing.assert_array_equal(result[:-1], np.float32(smallest) * np.array(expected, "f4"))
        assert np.isnan(result[-1])
        mirrored = apply(f"cvt.{opposite[rounding]}.ftz.f32.f64", -x[:-1])
        np.testing.assert_array_equal(mirrored, result[:-1].view("u4") | 0x80000000)


class TestSmallFormats:
    @pytest.mark.parametrize("name", ["e4m3", "e5m2", "e2m1", "e2m3", "e3m2"])
    def test_from_float32(self, name):
        rng = np.random.default_rng(0)
        x = np.concatenate([NEAR_BFLOAT16[::3], rng.integers(0, 1 << 32, 20000, dtype="u4")])
        expected = formats.encode(name, reference.values(x, "f32")).astype("u2")
        step = 4 if name == "e2m1" else 8
        packed = apply(f"cvt.rn.satfinite.{name}x2.f32", x, x[::-1])
        np.testing.assert_array_equal(packed, expected << step | expected[::-1])
        positive = np.where((x >> 31 == 1) & ~is_nan(x), 0, expected)
        packed = apply(f"cvt.rn.satfinite.relu.{name}x2.f32", x, x[::-1])
        np.testing.assert_array_equal(packed, positive << step | positive[::-1])

    @pytest.mark.parametrize("name", ["e4m3", "e5m2"])
    def test_from_pairs_of_halves(self, name):
        word = EVERY | EVERY[::-1] << 16
        for source, wide in (("f16x2", HALVES), ("bf16x2", EVERY << 16)):
            expected = apply(f"cvt.rn.satfinite.{name}x2.f32", wide[::-1], wide)
            np.testing.assert_array_equal(apply(f"cvt.rn.satfinite.{name}x2.{source}", word), expected)

    @pytest.mark.parametrize("name", ["e4m3", "e5m2", "e2m1", "e2m3", "e3m2"])
    def test_to_pairs_of_halves(self, name):
        table = formats.values(name)
        step = 4 if name == "e2m1" else 8
        codes = np.arange(1 << 2 * step) if name == "e2m1" else EVERY
        low, high = (table[codes >> n & len(table) - 1] for n in (0, step))
        packed = apply(f"cvt.rn.f16x2.{name}x2", codes)
        assert_same_floats(packed & 0xFFFF, low.astype("f2").view("u2"), "f16")
        assert_same_floats(packed >> 16, high.astype("f2").view("u2"), "f16")
        assert set((packed & 0xFFFF)[np.isnan(low)]) <= {0x7FFF}
        packed = apply(f"cvt.rn.relu.f16x2.{name}x2", codes)
        with np.errstate(invalid="ignore"):
            assert_same_floats(packed & 0xFFFF, np.where(low < 0, 0, np.abs(low)).astype("f2").view("u2"), "f16")

    def test_high_byte_of_a_register_is_ignored_by_e2m1(self):
        assert apply("cvt.rn.f16x2.e2m1x2", 0xAB21) == apply("cvt.rn.f16x2.e2m1x2", 0x21) == 0x3C003800

    def test_ue8m0(self):
        codes = np.arange(256, dtype="u4")
        packed = apply("cvt.rn.bf16x2.ue8m0x2", codes << 8 | codes)
        expected = formats.values("ue8m0").astype("f4").view("u4") >> 16
        expected = np.where(codes == 255, 0x7FFF, expected)
        np.testing.assert_array_equal(packed, expected << 16 | expected)
        for rounding in ("rz", "rp"):
            back = apply(f"cvt.{rounding}.satfinite.ue8m0x2.bf16x2", packed)
            np.testing.assert_array_equal(back, codes << 8 | codes)
        above = np.float32(1) + np.float32(2.0**-23)
        assert apply("cvt.rp.satfinite.ue8m0x2.f32", above, np.float32(1)) == 0x807F
        assert apply("cvt.rz.satfinite.ue8m0x2.f32", above, np.float32(-4)) == 0x7F81

    def test_random_bits_are_unsupported_where_the_isa_is_silent(self):
        for opcode in ("cvt.rs.satfinite.e2m1x4.f32", "cvt.rs.satfinite.e4m3x4.f32", "cvt.rs.f16x2.f32"):
            with pytest.raises(UnsupportedInstructionError):
                find(tuple(opcode.split(".")))


class TestFloats:
    def test_widening_is_exact(self):
        every = EVERY.astype("u2")
        assert_same_floats(apply("cvt.f32.f16", every), HALVES, "f32")
        assert_same_floats(apply("cvt.f32.bf16", every), EVERY << 16, "f32")
        assert_same_floats(apply("cvt.f64.bf16", every), reference.values(every, "bf16").view("u8"), "f64")
        assert_same_floats(apply("cvt.f64.f32", NEAR_FLOAT16), reference.values(NEAR_FLOAT16, "f32").view("u8"), "f64")

    @pytest.mark.parametrize("rounding", ["rn", "rz", "rm", "rp"])
    @given(columns=reference.lanes(reference.words("f64")))
    def test_from_float64(self, rounding, columns):
        x = reference.values(columns[0], "f64")
        for kind in ("f32", "f16", "bf16"):
            expected = []
            for value in x:
                y = reference.rounded(Fraction(value), kind, rounding) if np.isfinite(value) else value
                with np.errstate(all="ignore"):
                    expected.append(reference.encoded(np.copysign(y, value), kind))
            assert_same_floats(apply(f"cvt.{rounding}.{kind}.f64", *columns), expected, kind)

    def test_float64_is_rounded_once(self):
        # The middle between two bfloat16 values, and what float32 cannot tell from it.
        middle = 1 + 2.0**-8
        x = np.array([middle, middle + 2.0**-40, middle - 2.0**-40])
        np.testing.assert_array_equal(apply("cvt.rn.bf16.f64", x), [0x3F80, 0x3F81, 0x3F80])

    def test_between_halves(self):
        every = EVERY.astype("u2")
        assert_same_floats(apply("cvt.rn.bf16.f16", every), apply("cvt.rn.bf16.f32", HALVES), "bf16")
        assert_same_floats(apply("cvt.rm.f16.bf16", every), apply("cvt.rm.f16.f32", EVERY << 16), "f16")

    def test_to_integral_values(self):
        x = np.array([2.5, -2.5, 3.5, -0.25, np.inf], "f4")
        for rounding, expected in {
            "rni": [2, -2, 4, -0.0, np.inf],
            "rzi": [2, -2, 3, -0.0, np.inf],
            "rmi": [2, -3, 3, -1, np.inf],
            "rpi": [3, -2, 4, -0.0, np.inf],
        }.items():
            np.testing.assert_array_equal(apply(f"cvt.{rounding}.f32.f32", x), np.array(expected, "f4").view("u4"))
            np.testing.assert_array_equal(
                apply(f"cvt.{rounding}.bf16.bf16", x.astype(ml_dtypes.bfloat16).view("u2")),
                np.array(expected, ml_dtypes.bfloat16).view("u2"),
            )

    def test_saturation_and_flushing(self):
        x = np.array([-1.0, 0.5, 2.0, np.nan, 2.0**-130, -(2.0**-130)], "f4")
        np.testing.assert_array_equal(apply("cvt.sat.f32.f32", x).view("f4")[:4], [0, 0.5, 1, 0])
        np.testing.assert_array_equal(apply("cvt.ftz.f32.f32", x)[4:], [0, 0x80000000])
        assert apply("cvt.rpi.s32.f32", x[4]) == 1
        assert apply("cvt.rpi.ftz.s32.f32", x[4]) == 0
        assert apply("cvt.rp.ftz.f16.f32", x[4]) == 0
        assert apply("cvt.rp.f16.f32", x[4]) == 1

    def test_a_rounding_is_needed_to_narrow(self):
        for opcode in ("cvt.f16.f32", "cvt.bf16.f64", "cvt.f32.s32", "cvt.s32.f32", "cvt.rn.satfinite.s8.f32"):
            with pytest.raises(UnsupportedInstructionError):
                find(tuple(opcode.split(".")))


INTEGRAL = {"rni": round, "rzi": int, "rmi": floor, "rpi": ceil}


def bounds(kind: str) -> tuple[int, int]:
    width = int(kind[1:])
    return (-(1 << width - 1), (1 << width - 1) - 1) if kind[0] == "s" else (0, (1 << width) - 1)


def held(value: int, kind: str, code: str) -> int:
    """An integer in its register: eight-bit ones are extended to 16 bits."""
    return value & (1 << 8 * int(code[1])) - 1


@pytest.mark.parametrize("rounding", INTEGRAL)
@pytest.mark.parametrize("source", ["f32", "f64", "f16", "bf16"])
def test_float_to_integer(source, rounding):
    @given(columns=reference.lanes(reference.words(source)))
    def check(columns):
        edges = [-0.5, 0.5, 1.5, 127.5, 255.5, -128.5, 32767.5, 65535.5, 2.0**31, 2.0**32, 2.0**63, -(2.0**63), 2.0**64]
        finite = [x for x in edges if abs(x) < 60000 or source != "f16"]
        words = [*columns[0], *(reference.encoded(x, source) for x in finite if source not in ("f64", "bf16"))]
        for kind in INTEGERS:
            low, high = bounds(kind)
            operation = find(("cvt", rounding, kind, source))
            expected = []
            for x in reference.values(words, source):
                if np.isnan(x):
                    wide = source == "f64" or kind in ("u64", "s64")
                    value = 1 << int(kind[1:]) - 1 if wide else 0
                    value = signed(value, int(kind[1:])) if kind[0] == "s" else value
                elif np.isinf(x):
                    value = high if x > 0 else low
                else:
                    value = min(max(INTEGRAL[rounding](Fraction(x)), low), high)
                expected.append(held(value, kind, operation.output))
            actual = apply(f"cvt.{rounding}.{kind}.{source}", words)
            np.testing.assert_array_equal(actual, np.array(expected, actual.dtype), err_msg=kind)

    check()


@pytest.mark.parametrize("rounding", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("source", INTEGERS)
def test_integer_to_float(source, rounding):
    width = int(source[1:])

    @given(columns=reference.lanes(unsigned(width)))
    def check(columns):
        values = [signed(x, width) if source[0] == "s" else x for x in columns[0]]
        for kind in ("f16", "bf16", "f32", "f64"):
            expected = [reference.rounded(Fraction(x), kind, rounding) for x in values]
            actual = apply(f"cvt.{rounding}.{kind}.{source}", *columns)
            np.testing.assert_array_equal(reference.values(actual, kind), expected, err_msg=kind)

    check()


@pytest.mark.parametrize("source", INTEGERS)
def test_integer_to_integer(source):
    width = int(source[1:])

    @given(columns=reference.lanes(unsigned(width)))
    def check(columns):
        values = [signed(x, width) if source[0] == "s" else x for x in columns[0]]
        for kind in INTEGERS:
            code = find(("cvt", kind, source)).output
            low, high = bounds(kind)
            wrapped = [x & (1 << int(kind[1:])) - 1 for x in values]
            wrapped = [signed(x, int(kind[1:])) if kind[0] == "s" else x for x in wrapped]
            expected = [held(x, kind, code) for x in wrapped]
            actual = apply(f"cvt.{kind}.{source}", *columns)
            np.testing.assert_array_equal(actual, np.array(expected, actual.dtype), err_msg=kind)
            expected = [held(min(max(x, low), high), kind, code) for x in values]
            actual = apply(f"cvt.sat.{kind}.{source}", *columns)
            np.testing.assert_array_equal(actual, np.array(expected, actual.dtype), err_msg=f"sat {kind}")

    check()


def test_eight_bit_sources_are_the_low_byte_of_their_register():
    assert apply("cvt.u32.u8", 0xAB80) == 0x80
    assert apply("cvt.s32.s8", 0xAB80) == 0xFFFFFF80
    assert apply("cvt.rn.f32.s8", 0x01FF).view("f4") == -1


def test_pack():
    a, b = 70000, (-5) & 0xFFFFFFFF
    assert apply("cvt.pack.sat.s16.s32", a, b) == 0x7FFF << 16 | 0xFFFB
    assert apply("cvt.pack.sat.u16.s32", a, b) == 0xFFFF << 16
    assert apply("cvt.pack.sat.s8.s32.b32", a, b, 0x12345678) == 0x5678 << 16 | 0x7F << 8 | 0xFB
    assert apply("cvt.pack.sat.u4.s32.b32", 9, 20, 0x12345678) == 0x345678 << 8 | 0x9F
    assert apply("cvt.pack.sat.s2.s32.b32", 1, b, 0x12345678) == 0x12345678 << 4 & 0xFFFFFFFF | 0b0110
