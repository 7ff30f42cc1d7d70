"""float32 and float64 arithmetic against rational numbers."""

from fractions import Fraction
from math import isqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.emulator.arithmetic import reference
from tests.emulator.arithmetic.reference import apply, assert_same_floats

ROUNDINGS = ("rn", "rz", "rm", "rp")


def finite(*columns):
    """The rows in which every operand is finite."""
    x = [reference.values(column, "f32") for column in columns]
    keep = np.logical_and.reduce([np.isfinite(column) for column in x])
    return [np.asarray(column, "u4")[keep] for column in columns], [column[keep] for column in x]


def exactly(function, columns, rounding: str) -> list[int]:
    results = []
    for row in zip(*columns, strict=True):
        exact = function(*map(Fraction, row))
        results.append(reference.encoded(reference.rounded(exact, "f32", rounding), "f32"))
    return results


def same_but_for_the_sign_of_zero(actual, expected):
    actual, expected = np.asarray(actual), np.asarray(expected, "u4")
    np.testing.assert_array_equal(np.where(actual << 1 == 0, 0, actual), np.where(expected << 1 == 0, 0, expected))


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("name", ["add", "sub", "mul"])
@given(columns=reference.lanes(reference.words("f32"), reference.words("f32")))
def test_sums_and_products(name, rounding, columns):
    function = {"add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b}[name]
    words, x = finite(*columns)
    same_but_for_the_sign_of_zero(apply(f"{name}.{rounding}.f32", *words), exactly(function, x, rounding))


@pytest.mark.parametrize("rounding", ROUNDINGS)
@given(columns=reference.lanes(*[reference.words("f32")] * 3, size=20))
def test_fma(rounding, columns):
    words, x = finite(*columns)
    expected = exactly(lambda a, b, c: a * b + c, x, rounding)
    same_but_for_the_sign_of_zero(apply(f"fma.{rounding}.f32", *words), expected)


@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_fma_rounds_once(sign):
    # a * b lies in the middle between two float32 values; c is beyond the reach of float64.
    a, b = np.float32(1 + 2.0**-12), np.float32(1 + 2.0**-12)
    middle = float(a) * float(b)
    assert (np.float64(middle) + np.float64(sign * 2.0**-60)) == middle
    result = apply("fma.rn.f32", a, b, np.float32(sign * 2.0**-60))
    exact = Fraction(middle) + Fraction(sign * 2.0**-60)
    assert result == reference.encoded(reference.rounded(exact, "f32"), "f32")


def test_fma_rounds_subnormal_results_once():
    rng = np.random.default_rng(0)
    a = np.ldexp(1 + rng.integers(0, 16, 200) / 16, rng.integers(-80, -70, 200)).astype("f4")
    b = np.ldexp(1 + rng.integers(0, 16, 200) / 16, rng.integers(-76, -66, 200)).astype("f4")
    c = rng.integers(-4, 5, 200).astype("i4").astype("f4") * np.float32(2.0**-149)
    expected = exactly(lambda a, b, c: a * b + c, [x.astype("f8") for x in (a, b, c)], "rn")
    same_but_for_the_sign_of_zero(apply("fma.rn.f32", a, b, c), expected)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@given(columns=reference.lanes(reference.words("f32"), reference.words("f32")))
def test_quotients(rounding, columns):
    words, x = finite(*columns)
    keep = x[1] != 0
    words, x = [word[keep] for word in words], [column[keep] for column in x]
    expected = exactly(lambda a, b: a / b, x, rounding)
    same_but_for_the_sign_of_zero(apply(f"div.{rounding}.f32", *words), expected)
    expected = exactly(lambda b: 1 / b, x[1:], rounding)
    same_but_for_the_sign_of_zero(apply(f"rcp.{rounding}.f32", words[1]), expected)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@given(columns=reference.lanes(reference.words("f32")))
def test_roots(rounding, columns):
    ((word,), (x,)) = finite(*columns)
    word, x = word[x >= 0], x[x >= 0]
    # A root of 200 correct bits, its last bit set if it is not exact, rounds as the root does.
    roots = []
    for value in map(Fraction, x.tolist()):
        scaled = value * 2**600
        root = isqrt(int(scaled))
        roots.append(Fraction(2 * root + (root * root != scaled), 2**301))
    expected = [reference.encoded(reference.rounded(root, "f32", rounding), "f32") for root in roots]
    same_but_for_the_sign_of_zero(apply(f"sqrt.{rounding}.f32", word), expected)


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_overflow_is_infinite_or_the_largest_value(rounding):
    largest = np.array([0x7F7FFFFF, 0xFF7FFFFF], "u4")
    expected = [
        0x7F800000 if rounding in ("rn", "rp") else 0x7F7FFFFF,
        0xFF800000 if rounding in ("rn", "rm") else 0xFF7FFFFF,
    ]
    for opcode, operands in {
        "add": [largest, largest],
        "mul": [largest, np.full(2, 0x7F7FFFFF, "u4")],
        "fma": [largest, np.full(2, 0x3F800000, "u4"), largest],
        "div": [largest, np.full(2, 0x3F000000, "u4")],
    }.items():
        np.testing.assert_array_equal(apply(f"{opcode}.{rounding}.f32", *operands), expected, err_msg=opcode)


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_infinities_and_nan_are_no_overflow(rounding):
    inf, nan, one = np.float32(np.inf), np.float32(np.nan), np.float32(1)
    assert apply(f"add.{rounding}.f32", -inf, one) == 0xFF800000
    assert apply(f"add.{rounding}.f32", inf, one) == 0x7F800000
    assert apply(f"fma.{rounding}.f32", inf, one, -one) == 0x7F800000
    assert apply(f"div.{rounding}.f32", one, np.float32(0)) == 0x7F800000
    assert apply(f"div.{rounding}.f32", one, -inf) == 0x80000000
    assert apply(f"sqrt.{rounding}.f32", inf) == 0x7F800000
    for opcode, operands in [("add", (inf, -inf)), ("add", (nan, one)), ("mul", (inf, one * 0)), ("sqrt", (-one,))]:
        assert np.isnan(reference.values(apply(f"{opcode}.{rounding}.f32", *operands), "f32"))


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_the_zero_of_a_cancellation_is_negative_only_when_rounding_down(rounding):
    one, zero = np.float32(1), np.float32(0)
    expected = 0x80000000 if rounding == "rm" else 0
    assert apply(f"add.{rounding}.f32", one, -one) == expected
    assert apply(f"sub.{rounding}.f32", one, one) == expected
    assert apply(f"fma.{rounding}.f32", one, one, -one) == expected
    assert apply(f"add.{rounding}.f32", zero, -zero) == expected
    assert apply(f"add.{rounding}.f32", zero, zero) == 0
    assert apply(f"add.{rounding}.f32", -zero, -zero) == 0x80000000


def flushed(word: int) -> int:
    return word & 0x80000000 if word & 0x7F800000 == 0 else word


@pytest.mark.parametrize("opcode", ["add.ftz.f32", "mul.ftz.f32", "fma.rn.ftz.f32", "fma.rm.ftz.f32", "div.rn.ftz.f32"])
@given(columns=reference.lanes(*[reference.words("f32")] * 3))
def test_flushing(opcode, columns):
    columns = columns[: 3 if opcode.startswith("fma") else 2]
    plain = apply(opcode.replace(".ftz", ""), *[[flushed(word) for word in column] for column in columns])
    results = apply(opcode, *columns)
    # Of results at the edge, see below.
    away = np.logical_or((plain & 0x7FFFFFFF) != 0x00800000, results & 0x7FFFFFFF != 0)
    assert_same_floats(results[away], np.array([flushed(int(word)) for word in plain], "u4")[away], "f32")


UP = 0x00800000  # the smallest normal value
EDGE = {
    "mul.ftz.f32": (UP, 0x3F7FFFFF),
    "mul.rp.ftz.f32": (UP, 0x3F7FFFFF),
    "mul.ftz.sat.f32": (UP, 0x3F7FFFFF),
    "div.rn.ftz.f32": (0x00FFFFFF, 0x40000000),
    "div.rp.ftz.f32": (UP, 0x3F800001),
    "rcp.rp.ftz.f32": (0x7E800001,),
    "fma.rp.ftz.f32": (UP, 0xB3800000, UP),
    "fma.rn.ftz.f32": (0x80800000, 0x33800000, UP),
}


@pytest.mark.parametrize("opcode", EDGE)
def test_underflow_is_judged_before_subnormal_values_are_spaced_wider(opcode):
    """Exactly 2**-126 (1 - 2**-24) or what it would be in 24 bits, of which 2**-126 is the nearest subnormal place."""
    assert apply(opcode.replace(".ftz", ""), *EDGE[opcode]) == UP
    assert apply(opcode, *EDGE[opcode]) == 0


def test_what_24_bits_round_to_the_smallest_normal_value_does_not_underflow():
    # 2**-126 (1 - 2**-46)
    assert apply("mul.ftz.f32", 0x20000001, 0x1FFFFFFE) == UP
    assert apply("fma.rn.ftz.f32", 0x20000001, 0x9FFFFFFE, 0) == UP | 0x80000000
    assert apply("mul.rz.ftz.f32", 0x20000001, 0x1FFFFFFE) == 0
    # Operands that overflow when the result is scaled.
    assert apply("mul.ftz.f32", 0x7F000000, 0x00800000) == 0x40000000
    assert apply("div.rn.ftz.f32", 0x7F000000, 0x7F000000) == 0x3F800000


def test_flushing_keeps_the_sign():
    x = np.array([0x00000001, 0x807FFFFF, 0x80000000, 0x00800000], "u4")
    np.testing.assert_array_equal(apply("abs.ftz.f32", x), [0, 0, 0, 0x00800000])
    np.testing.assert_array_equal(apply("neg.ftz.f32", x), [0x80000000, 0, 0, 0x80800000])
    np.testing.assert_array_equal(
        apply("mul.ftz.f32", x, np.full(4, 0x3F800000)), [0, 0x80000000, 0x80000000, 0x00800000]
    )


def test_saturation():
    x = np.array([-1.0, -0.0, 0.25, 1.5, np.inf, -np.inf, np.nan], "f4")
    assert apply("cvt.sat.f32.f32", 0x7F800001) == 0
    zero = np.full(7, -0.0, "f4")
    np.testing.assert_array_equal(apply("add.sat.f32", x, zero).view("f4"), [0, 0, 0.25, 1, 1, 0, 0])
    np.testing.assert_array_equal(apply("add.sat.f32", x, zero) >> 31, 0)


class TestExtremum:
    WORDS = st.one_of(reference.words("f32"), st.sampled_from([0, 0x80000000, 0x7FC00000, 0xFFC00001]))

    @staticmethod
    def chosen(a: int, b: int, name: str, propagate: bool) -> int:
        nan = [word & 0x7FFFFFFF > 0x7F800000 for word in (a, b)]
        if all(nan) or (propagate and any(nan)):
            return 0x7FFFFFFF
        if any(nan):
            return b if nan[0] else a
        ordered = sorted((a, b), key=lambda word: 0x7FFFFFFF - word if word >> 31 else word)
        return ordered[0] if name == "min" else ordered[1]

    @pytest.mark.parametrize("propagate", [False, True])
    @pytest.mark.parametrize("name", ["min", "max"])
    @given(columns=reference.lanes(WORDS, WORDS, WORDS))
    def test_two_and_three_operands(self, name, propagate, columns):
        nan = ".NaN" if propagate else ""
        two = [self.chosen(a, b, name, propagate) for a, b in zip(*columns[:2], strict=True)]
        np.testing.assert_array_equal(apply(f"{name}{nan}.f32", *columns[:2]), two)
        three = [self.chosen(a, b, name, propagate) for a, b in zip(two, columns[2], strict=True)]
        np.testing.assert_array_equal(apply(f"{name}{nan}.f32", *columns, immediates=(None,) * 3), three)

    @given(columns=reference.lanes(WORDS, WORDS))
    def test_xorsign(self, columns):
        expected = []
        for a, b in zip(*columns, strict=True):
            word = self.chosen(a & 0x7FFFFFFF, b & 0x7FFFFFFF, "max", False)
            expected.append(word if word == 0x7FFFFFFF else word | ((a ^ b) & 0x80000000))
        np.testing.assert_array_equal(apply("max.xorsign.abs.f32", *columns), expected)

    def test_absolute_values_of_three(self):
        x = [np.float32(v) for v in (-3, 2, -1)]
        assert apply("max.abs.f32", *x, immediates=(None,) * 3).view("f4") == 3
        assert apply("min.abs.f32", *x, immediates=(None,) * 3).view("f4") == 1

    def test_float64_orders_zeros(self):
        zeros = np.array([0.0, -0.0]), np.array([-0.0, 0.0])
        np.testing.assert_array_equal(np.signbit(apply("min.f64", *zeros).view("f8")), [True, True])
        np.testing.assert_array_equal(np.signbit(apply("max.f64", *zeros).view("f8")), [False, False])


def test_copysign_takes_the_sign_of_the_first():
    assert apply("copysign.f32", np.float32(-1), np.float32(3)).view("f4") == -3


@given(columns=reference.lanes(*[reference.words("f64")] * 3, size=8))
def test_fma_float64(columns):
    x = [reference.values(column, "f64") for column in columns]
    actual = apply("fma.rn.f64", *columns)
    for row, word in zip(zip(*x, strict=True), actual, strict=True):
        if not all(map(np.isfinite, row)):
            continue
        exact = Fraction(row[0]) * Fraction(row[1]) + Fraction(row[2])
        assert word.view("f8") == reference.rounded(exact, "f64"), row


def test_fma_float64_special_values():
    inf, zero, one = np.float64(np.inf), np.float64(0), np.float64(1)
    assert np.isnan(apply("fma.rn.f64", inf, zero, one).view("f8"))
    assert apply("fma.rn.f64", inf, one, one).view("f8") == inf
    assert apply("fma.rn.f64", -zero, one, -zero) == np.uint64(1 << 63)


@given(columns=reference.lanes(reference.words("bf16"), reference.words("bf16"), reference.words("f32")))
def test_mixed_precision(columns):
    a, b, c = columns
    wide = [word << 16 for word in a], [word << 16 for word in b]
    assert_same_floats(apply("add.rn.f32.bf16", a, c), apply("add.rn.f32", wide[0], c), "f32")
    assert_same_floats(apply("fma.rz.f32.bf16", a, b, c), apply("fma.rz.f32", *wide, c), "f32")


def test_a_product_that_overflows_is_finite_inside_of_a_float64_fma():
    a, b, c = np.array([[1e300, 1e300, 1e300], [1e300, -1e300, 1e300], [-np.inf, np.inf, 0]])
    np.testing.assert_array_equal(apply("fma.rn.f64", a, b, c).view("f8"), [-np.inf, np.inf, np.inf])
