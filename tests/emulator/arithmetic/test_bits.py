"""Logic, shifts, fields and permutations, bit by bit in Python, as the ISA writes them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuda.emulator.errors import UnsupportedInstructionError
from tests.emulator.arithmetic import reference
from tests.emulator.arithmetic.reference import apply, signed, unsigned

AMOUNTS = st.one_of(st.integers(0, 70), st.sampled_from([127, 128, 255, 256, 300, 1 << 31, (1 << 32) - 1]))


def check(opcode: str, columns, function, code: str = "u4", immediates: tuple = ()) -> None:
    expected = [function(*row) for row in zip(*columns, strict=True)]
    count = len(columns) - len([value for value in immediates if value is not None])
    actual = apply(opcode, *columns[:count], immediates=immediates)
    np.testing.assert_array_equal(actual, np.array(expected, code))


@pytest.mark.parametrize("width", [16, 32, 64])
def test_shifts(width):
    ones = (1 << width) - 1

    @given(columns=reference.lanes(unsigned(width), AMOUNTS))
    def run(columns):
        code = f"u{width // 8}"
        check(f"shl.b{width}", columns, lambda a, n: (a << min(n, 64)) & ones, code)
        check(f"shr.u{width}", columns, lambda a, n: a >> n, code)
        check(f"shr.b{width}", columns, lambda a, n: a >> n, code)
        check(f"shr.s{width}", columns, lambda a, n: (signed(a, width) >> min(n, 64)) & ones, code)

    run()


@given(columns=reference.lanes(unsigned(32), unsigned(32), AMOUNTS))
def test_funnel_shifts(columns):
    for limit, amount in (("wrap", lambda n: n & 31), ("clamp", lambda n: min(n, 32))):
        check(f"shf.l.{limit}.b32", columns, lambda a, b, c, n=amount: ((b << 32 | a) << n(c)) >> 32 & 0xFFFFFFFF)
        check(f"shf.r.{limit}.b32", columns, lambda a, b, c, n=amount: (b << 32 | a) >> n(c) & 0xFFFFFFFF)


def extracted(a: int, b: int, c: int, width: int, is_signed: bool) -> int:
    """As the ISA writes it, except that the whole registers give the position and the length of 64 bits."""
    top, position, length = width - 1, *((b, c) if width == 64 else (b & 0xFF, c & 0xFF))
    sign = 0 if not is_signed or length == 0 else a >> min(position + length - 1, top) & 1
    return sum(((a >> (position + i) & 1) if i < length and position + i <= top else sign) << i for i in range(width))


@pytest.mark.parametrize("width", [32, 64])
def test_bit_fields(width):
    @given(columns=reference.lanes(unsigned(width), AMOUNTS, AMOUNTS))
    def extract(columns):
        code = f"u{width // 8}"
        check(f"bfe.u{width}", columns, lambda a, b, c: extracted(a, b, c, width, False), code)
        check(f"bfe.s{width}", columns, lambda a, b, c: extracted(a, b, c, width, True), code)

    @given(columns=reference.lanes(unsigned(width), unsigned(width), AMOUNTS, AMOUNTS))
    def insert(columns):
        def inserted(a, b, c, d):
            position, length = (c, d) if width == 64 else (c & 0xFF, d & 0xFF)
            for i in range(min(length, max(width - position, 0))):
                b = b & ~(1 << (position + i)) | (a >> i & 1) << (position + i)
            return b

        check(f"bfi.b{width}", columns, inserted, f"u{width // 8}")

    extract()
    insert()


@pytest.mark.parametrize("width", [32, 64])
def test_counting(width):
    @given(columns=reference.lanes(unsigned(width)))
    def run(columns):
        check(f"clz.b{width}", columns, lambda a: width - a.bit_length())
        check(f"popc.b{width}", columns, lambda a: a.bit_count())
        check(f"brev.b{width}", columns, lambda a: int(f"{a:0{width}b}"[::-1], 2), f"u{width // 8}")

        def magnitude(a):
            return ~a & (1 << width) - 1 if a >> (width - 1) else a

        check(f"bfind.u{width}", columns, lambda a: (a.bit_length() - 1) & 0xFFFFFFFF)
        check(f"bfind.s{width}", columns, lambda a: (magnitude(a).bit_length() - 1) & 0xFFFFFFFF)
        check(
            f"bfind.shiftamt.s{width}",
            columns,
            lambda a: width - magnitude(a).bit_length() if magnitude(a) else 0xFFFFFFFF,
        )

    run()


@given(columns=reference.lanes(*[unsigned(32)] * 3, size=4))
def test_lop3_with_every_table(columns):
    for table in range(256):

        def looked_up(a, b, c, table=table):
            bits = ((table >> ((a >> i & 1) << 2 | (b >> i & 1) << 1 | (c >> i & 1)) & 1) << i for i in range(32))
            return sum(bits)

        expected = [looked_up(*row) for row in zip(*columns, strict=True)]
        actual = apply("lop3.b32", *columns, immediates=(None, None, None, table))
        np.testing.assert_array_equal(actual, np.array(expected, "u4"), err_msg=hex(table))


def test_lop3_needs_its_table():
    with pytest.raises(UnsupportedInstructionError, match="table"):
        apply("lop3.b32", 1, 2, 3)


MODES = {
    "f4e": lambda control, i: control + i,
    "b4e": lambda control, i: (control - i) & 7,
    "rc8": lambda control, i: control,
    "ecl": lambda control, i: max(control, i),
    "ecr": lambda control, i: min(control, i),
    "rc16": lambda control, i: (control & 1) * 2 + (i & 1),
}


def permuted(a: int, b: int, c: int, mode: str = "") -> int:
    both, result = b << 32 | a, 0
    for i in range(4):
        control = MODES[mode](c & 3, i) if mode else c >> (4 * i) & 15
        byte = both >> (8 * (control & 7)) & 0xFF
        if not mode and control & 8:
            byte = 0xFF if byte & 0x80 else 0
        result |= byte << (8 * i)
    return result


@given(columns=reference.lanes(*[unsigned(32)] * 3))
def test_permutation(columns):
    check("prmt.b32", columns, permuted)
    for mode in MODES:
        check(f"prmt.b32.{mode}", columns, lambda a, b, c, mode=mode: permuted(a, b, c, mode))


@given(columns=reference.lanes(unsigned(32), unsigned(32)), selector=unsigned(16))
def test_permutation_by_a_literal(columns, selector):
    expected = [permuted(a, b, selector) for a, b in zip(*columns, strict=True)]
    np.testing.assert_array_equal(apply("prmt.b32", *columns, immediates=(None, None, selector)), expected)
    for mode in MODES:
        expected = [permuted(a, b, selector, mode) for a, b in zip(*columns, strict=True)]
        np.testing.assert_array_equal(apply(f"prmt.b32.{mode}", *columns, immediates=(None, None, selector)), expected)


def test_logic():
    assert apply("and.b16", 0xF0F0, 0xFF00) == 0xF000
    assert apply("or.b64", 1 << 63, 1) == (1 << 63) + 1
    assert apply("xor.b32", 5, 3) == 6
    assert apply("not.b32", 0) == 0xFFFFFFFF
    assert apply("cnot.b32", 0) == 1 and apply("cnot.b32", 7) == 0
    assert apply("xor.pred", True, False) and not apply("and.pred", True, False) and not apply("not.pred", True)
