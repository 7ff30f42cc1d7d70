"""float16 and bfloat16 arithmetic: pairs of values exhaustively per operand, results against rational numbers."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given

from cuda.emulator.arithmetic.operations import find
from tests.emulator.arithmetic import reference
from tests.emulator.arithmetic.reference import apply, assert_same_floats

KINDS = ("f16", "bf16")
NAN = 0x7FFF


def expected(function, columns, kind: str, relu: bool = False) -> list[int]:
    """Results of finite operands; others are taken from float64."""
    results = []
    for row in zip(*(reference.values(column, kind) for column in columns), strict=True):
        if all(map(np.isfinite, row)):
            value = reference.rounded(function(*map(Fraction, row)), kind)
        else:
            with np.errstate(all="ignore"):
                value = float(function(*map(np.float64, row)))
        results.append(reference.encoded(max(value, 0.0) if relu and value == value else value, kind))
    return results


def without_zero_signs(bits) -> np.ndarray:
    bits = np.asarray(bits, "u2")
    return np.where(bits & 0x7FFF == 0, 0, bits)


BINARY = {"add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", BINARY)
def test_sums_and_products(name, kind):
    @given(columns=reference.lanes(*[reference.words(kind)] * 2))
    def check(columns):
        wanted = expected(BINARY[name], columns, kind)
        actual = apply(f"{name}.rn.{kind}", *columns)
        np.testing.assert_array_equal(without_zero_signs(actual), without_zero_signs(wanted))

    check()


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_fma(kind, relu):
    @given(columns=reference.lanes(*[reference.words(kind)] * 3))
    def check(columns):
        wanted = expected(lambda a, b, c: a * b + c, columns, kind, relu)
        actual = apply(f"fma.rn{'.relu' if relu else ''}.{kind}", *columns)
        np.testing.assert_array_equal(without_zero_signs(actual), without_zero_signs(wanted))

    check()


def test_bfloat16_fma_rounds_once():
    # The product lies in the middle between two bfloat16 values, and the addend is beyond the reach of float64.
    a, b = 0x3F81, 0x3FC0
    product = Fraction(129, 128) * Fraction(3, 2)
    for addend, sign in ((0x2000, 1), (0xA000, -1)):
        tiny = Fraction(float(reference.values([addend], "bf16")[0]))
        assert tiny * sign > 0 and abs(tiny) < Fraction(2) ** -60
        wanted = reference.encoded(reference.rounded(product + tiny, "bf16"), "bf16")
        assert apply("fma.rn.bf16", a, b, addend) == wanted


def test_float16_flushing():
    smallest, one = 0x0001, 0x3C00
    assert apply("add.ftz.f16", smallest, 0) == 0
    assert apply("add.f16", smallest, 0) == smallest
    assert apply("mul.ftz.f16", 0x8400, 0x3800) == 0x8000
    assert apply("fma.rn.ftz.f16", smallest, one, 0x8001) == 0
    assert apply("fma.rn.ftz.f16", 0x0400, one, 0) == 0x0400


def test_float16_underflow_is_judged_before_subnormal_values_are_spaced_wider():
    smallest, one, below_one = 0x0400, 0x3C00, 0x3BFF
    assert apply("mul.f16", smallest, below_one) == smallest
    assert apply("mul.ftz.f16", smallest, below_one) == 0
    assert apply("fma.rn.ftz.f16", smallest | 0x8000, below_one, 0x8000) == 0x8000
    assert apply("mul.ftz.f16x2", 0x6B1B0400, 0xD4703BFF) == 0xFC000000
    # 2**-14 (1 - 2**-20) is 2**-14 in 11 bits of any exponent.
    assert apply("mul.ftz.f16", 0x1401, 0x2BFE) == apply("mul.f16", 0x1401, 0x2BFE) == smallest
    assert apply("fma.rn.ftz.f16", smallest, one, 0) == smallest


def test_saturation_and_relu_of_special_values():
    nan, minus, zero, one = 0x7E01, 0xBC00, 0x8000, 0x3C00
    assert apply("add.sat.f16", nan, 0) == 0
    assert apply("mul.sat.f16", 0x4400, one) == one
    assert apply("fma.rn.relu.f16", nan, one, 0) == NAN
    assert apply("fma.rn.relu.f16", minus, one, 0) == 0
    assert apply("fma.rn.relu.f16", zero, one, zero) == 0
    assert apply("fma.rn.relu.bf16", 0xFFC1, 0x3F80, 0) == NAN
    assert apply("fma.rn.relu.bf16", 0xBF80, 0x3F80, 0) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_results_are_the_canonical_nan(kind):
    infinity = {"f16": 0x7C00, "bf16": 0x7F80}[kind]
    for opcode, operands in [
        ("add", (infinity, infinity | 0x8000)),
        ("mul", (infinity, 0)),
        ("fma.rn", (infinity, 0, infinity)),
        ("min", (infinity + 1, infinity + 2)),
        ("max.NaN", (infinity + 1, 0)),
    ]:
        assert apply(f"{opcode}.{kind}", *operands) == NAN, opcode


@pytest.mark.parametrize("kind", KINDS)
def test_extremum_of_every_value_with_special_ones(kind):
    every = np.arange(1 << 16, dtype="u2")
    infinity = {"f16": 0x7C00, "bf16": 0x7F80}[kind]
    for other in (0, 0x8000, 0x3C00, infinity, infinity | 0x8000, infinity + 1):
        order = np.where(every >> 15, 0x7FFF - every.astype("i4"), every)
        other_order = 0x7FFF - other if other >> 15 else other
        nan, other_nan = (every & 0x7FFF) > infinity, (other & 0x7FFF) > infinity
        for name, smaller in (("min", True), ("max", False)):
            take_other = (other_order < order) == smaller
            wanted = np.where(nan | (take_other & ~np.bool_(other_nan)), other, every)
            wanted = np.where(nan & other_nan, NAN, wanted)
            np.testing.assert_array_equal(apply(f"{name}.{kind}", every, np.full_like(every, other)), wanted)
            wanted = np.where(nan | other_nan, NAN, wanted)
            np.testing.assert_array_equal(apply(f"{name}.NaN.{kind}", every, np.full_like(every, other)), wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_sign_changes_are_of_bits(kind):
    every = np.arange(1 << 16, dtype="u2")
    np.testing.assert_array_equal(apply(f"neg.{kind}", every), every ^ 0x8000)
    np.testing.assert_array_equal(apply(f"abs.{kind}", every), every & 0x7FFF)


def test_xorsign_of_bfloat16():
    assert apply("min.xorsign.abs.bf16", 0xC040, 0x3F80) == 0xBF80
    assert apply("max.xorsign.abs.bf16", 0xC040, 0xBF80) == 0x4040


PAIRED = [
    "add.{}x2", "sub.rn.{}x2", "mul.{}x2", "fma.rn.{}x2", "fma.rn.relu.{}x2", "min.{}x2", "max.NaN.{}x2", "neg.{}x2",
    "abs.{}x2", "min.xorsign.abs.{}x2",
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("opcode", PAIRED)
def test_pairs_are_two_values(opcode, kind):
    rng = np.random.default_rng(1)
    opcode = opcode.format(kind)
    count = len(find(tuple(opcode.split("."))).inputs)
    operands = [rng.integers(0, 1 << 32, (3, 32), dtype="u4") for _ in range(count)]
    actual = apply(opcode, *operands)
    single = opcode.replace("x2", "")
    low = apply(single, *[x & 0xFFFF for x in operands])
    high = apply(single, *[x >> 16 for x in operands])
    assert_same_floats(actual & 0xFFFF, low, kind)
    assert_same_floats(actual >> 16, high, kind)
