"""Integer arithmetic against Python integers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.emulator.arithmetic import reference
from tests.emulator.arithmetic.reference import apply, signed, unsigned

KINDS = ("u16", "s16", "u32", "s32", "u64", "s64")


def meaning(word: int, kind: str) -> int:
    width = int(kind[1:])
    return signed(word, width) if kind[0] == "s" else word


def word(value: int, width: int) -> int:
    return value & (1 << width) - 1


def clamped(value: int, kind: str) -> int:
    width = int(kind[1:])
    low, high = (-(1 << width - 1), (1 << width - 1) - 1) if kind[0] == "s" else (0, (1 << width) - 1)
    return min(max(value, low), high)


def truncated(a: int, b: int) -> int:
    quotient = abs(a) // abs(b)
    return -quotient if (a < 0) != (b < 0) else quotient


BINARY = {
    "add": lambda a, b, width: a + b,
    "sub": lambda a, b, width: a - b,
    "mul.lo": lambda a, b, width: a * b,
    "mul.hi": lambda a, b, width: (a * b) >> width,
    "min": lambda a, b, width: min(a, b),
    "max": lambda a, b, width: max(a, b),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", BINARY)
def test_two_operands(name, kind):
    width = int(kind[1:])

    @given(columns=reference.lanes(unsigned(width), unsigned(width)))
    def check(columns):
        pairs = zip(*columns, strict=True)
        expected = [word(BINARY[name](meaning(a, kind), meaning(b, kind), width), width) for a, b in pairs]
        np.testing.assert_array_equal(apply(f"{name}.{kind}", *columns), np.array(expected, f"u{width // 8}"))

    check()


@pytest.mark.parametrize("kind", KINDS)
def test_division_truncates(kind):
    width = int(kind[1:])

    @given(columns=reference.lanes(unsigned(width), unsigned(width).filter(bool)))
    def check(columns):
        pairs = [(meaning(a, kind), meaning(b, kind)) for a, b in zip(*columns, strict=True)]
        code = f"u{width // 8}"
        quotients = [word(truncated(a, b), width) for a, b in pairs]
        remainders = [word(a - b * truncated(a, b), width) for a, b in pairs]
        np.testing.assert_array_equal(apply(f"div.{kind}", *columns), np.array(quotients, code))
        np.testing.assert_array_equal(apply(f"rem.{kind}", *columns), np.array(remainders, code))

    check()


def test_division_by_zero_sets_all_bits():
    assert apply("div.s32", 5, 0) == 0xFFFFFFFF
    assert apply("rem.u32", 5, 0) == 5


@pytest.mark.parametrize("kind", ["u16", "s16", "u32", "s32"])
def test_wide_products(kind):
    width = int(kind[1:])
    code = f"u{width // 4}"

    @given(columns=reference.lanes(unsigned(width), unsigned(width), unsigned(2 * width)))
    def check(columns):
        rows = [(meaning(a, kind) * meaning(b, kind), c) for a, b, c in zip(*columns, strict=True)]
        products = np.array([word(product, 2 * width) for product, _ in rows], code)
        sums = np.array([word(product + c, 2 * width) for product, c in rows], code)
        np.testing.assert_array_equal(apply(f"mul.wide.{kind}", *columns[:2]), products)
        np.testing.assert_array_equal(apply(f"mad.wide.{kind}", *columns), sums)

    check()


@pytest.mark.parametrize("kind", KINDS)
def test_multiply_and_add(kind):
    width = int(kind[1:])

    @given(columns=reference.lanes(*[unsigned(width)] * 3))
    def check(columns):
        rows = [[meaning(x, kind) for x in row] for row in zip(*columns, strict=True)]
        code = f"u{width // 8}"
        low = [word(a * b + c, width) for a, b, c in rows]
        high = [word((a * b >> width) + c, width) for a, b, c in rows]
        differences = [word(c + abs(a - b), width) for a, b, c in rows]
        np.testing.assert_array_equal(apply(f"mad.lo.{kind}", *columns), np.array(low, code))
        np.testing.assert_array_equal(apply(f"mad.hi.{kind}", *columns), np.array(high, code))
        np.testing.assert_array_equal(apply(f"sad.{kind}", *columns), np.array(differences, code))

    check()


@given(columns=reference.lanes(*[unsigned(32)] * 3))
def test_saturating_forms(columns):
    rows = [[signed(x, 32) for x in row] for row in zip(*columns, strict=True)]

    def low24(x):
        return signed(x & 0xFFFFFF, 24)

    for opcode, count, function in [
        ("add.sat.s32", 2, lambda a, b, c: a + b),
        ("sub.sat.s32", 2, lambda a, b, c: a - b),
        ("mad.hi.sat.s32", 3, lambda a, b, c: (a * b >> 32) + c),
        ("mad24.hi.sat.s32", 3, lambda a, b, c: signed(word(low24(a) * low24(b) >> 16, 32), 32) + c),
    ]:
        expected = [word(clamped(function(*row), "s32"), 32) for row in rows]
        np.testing.assert_array_equal(apply(opcode, *columns[:count]), np.array(expected, "u4"), err_msg=opcode)


@given(columns=reference.lanes(*[unsigned(32)] * 3))
def test_products_of_24_bits(columns):
    for kind in ("u32", "s32"):
        rows = [
            (*((signed(x & 0xFFFFFF, 24) if kind == "s32" else x & 0xFFFFFF) for x in row[:2]), row[2])
            for row in zip(*columns, strict=True)
        ]
        for part, shift in (("lo", 0), ("hi", 16)):
            products = [word(a * b >> shift, 32) for a, b, _ in rows]
            sums = [word((a * b >> shift) + c, 32) for a, b, c in rows]
            np.testing.assert_array_equal(apply(f"mul24.{part}.{kind}", *columns[:2]), products)
            np.testing.assert_array_equal(apply(f"mad24.{part}.{kind}", *columns), sums)


@pytest.mark.parametrize("kind", ["s16", "s32", "s64"])
def test_one_operand(kind):
    width = int(kind[1:])

    @given(columns=reference.lanes(unsigned(width)))
    def check(columns):
        values = [signed(a, width) for a in columns[0]]
        code = f"u{width // 8}"
        np.testing.assert_array_equal(apply(f"abs.{kind}", *columns), np.array([abs(a) for a in values], code))
        np.testing.assert_array_equal(apply(f"neg.{kind}", *columns), np.array([word(-a, width) for a in values], code))

    check()


def test_relu_of_extrema():
    a, b = [5, 2**32 - 3, 2**32 - 3], [7, 4, 2**32 - 1]
    np.testing.assert_array_equal(apply("min.relu.s32", a, b), [5, 0, 0])
    np.testing.assert_array_equal(apply("max.relu.s32", a, b), [7, 4, 0])
    assert apply("max.relu.s16x2", 0xFFFF0002, 0xFFFE0001) == 0x00000002


@pytest.mark.parametrize("opcode", ["add.u16x2", "add.s16x2", "sub.u16x2", "min.u16x2", "max.s16x2", "min.relu.s16x2"])
@given(columns=reference.lanes(unsigned(32), unsigned(32)))
def test_pairs(opcode, columns):
    single = opcode.replace("x2", "").replace(".relu", "")
    halves = [
        apply(single, [x >> n & 0xFFFF for x in columns[0]], [x >> n & 0xFFFF for x in columns[1]]) for n in (0, 16)
    ]
    if "relu" in opcode:
        halves = [np.where(half >> 15, 0, half) for half in halves]
    expected = halves[0].astype("u4") | halves[1].astype("u4") << 16
    np.testing.assert_array_equal(apply(opcode, *columns), expected)


SIGNS = st.sampled_from(["u32", "s32"])


@given(columns=reference.lanes(*[unsigned(32)] * 3), a_kind=SIGNS, b_kind=SIGNS)
def test_dot_products(columns, a_kind, b_kind):
    def parts(x, width, kind):
        pieces = [x >> n & (1 << width) - 1 for n in range(0, 32, width)]
        return [signed(piece, width) if kind == "s32" else piece for piece in pieces]

    rows = list(zip(*columns, strict=True))
    fours = [
        word(sum(x * y for x, y in zip(parts(a, 8, a_kind), parts(b, 8, b_kind), strict=True)) + c, 32)
        for a, b, c in rows
    ]
    np.testing.assert_array_equal(apply(f"dp4a.{a_kind}.{b_kind}", *columns), fours)
    for part, first in (("lo", 0), ("hi", 2)):
        twos = []
        for a, b, c in rows:
            chosen = parts(b, 8, b_kind)[first : first + 2]
            twos.append(word(sum(x * y for x, y in zip(parts(a, 16, a_kind), chosen, strict=True)) + c, 32))
        np.testing.assert_array_equal(apply(f"dp2a.{part}.{a_kind}.{b_kind}", *columns), twos)
