"""Comparisons against Python's, lane by lane."""

import math
import operator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuda.emulator.arithmetic.operations import find
from cuda.emulator.errors import UnsupportedInstructionError
from tests.emulator.arithmetic import reference
from tests.emulator.arithmetic.reference import apply, signed, unsigned

ORDERED = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
}  # fmt: skip
UNSIGNED = {"lo": operator.lt, "ls": operator.le, "hi": operator.gt, "hs": operator.ge}
FLOAT_NAMES = [*ORDERED, *(f"{name}u" for name in ORDERED), "num", "nan"]
BOOLEAN = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}


def holds(name: str, a: float, b: float) -> bool:
    unordered = math.isnan(a) or math.isnan(b)
    if name in ("num", "nan"):
        return unordered == (name == "nan")
    if len(name) == 3:
        return unordered or ORDERED[name[:2]](a, b)
    return not unordered and ORDERED[name](a, b)


def second(opcode: str, *operands) -> np.ndarray:
    operation = find(tuple(opcode.split(".")))
    arrays = [
        np.asarray(x, bool if code == "b1" else f"u{code[1]}").view("?" if code == "b1" else code)
        for x, code in zip(operands, operation.inputs, strict=True)
    ]
    with np.errstate(all="ignore"):
        return operation.second(*arrays)


def equal_sometimes(words):
    """Two operands, often the same one."""
    return st.one_of(st.tuples(words, words), words.map(lambda x: (x, x)))


def pairs(words, size: int = 12):
    return st.lists(equal_sometimes(words), min_size=size, max_size=size)


@pytest.mark.parametrize("kind", ["f16", "bf16", "f32", "f64"])
def test_floats(kind):
    @given(rows=pairs(reference.words(kind)))
    def check(rows):
        a, b = (list(column) for column in zip(*rows, strict=True))
        x, y = reference.values(a, kind).tolist(), reference.values(b, kind).tolist()
        for name in FLOAT_NAMES:
            opcode = f"setp.{name}.{kind}"
            expected = [holds(name, p, q) for p, q in zip(x, y, strict=True)]
            np.testing.assert_array_equal(apply(opcode, a, b), expected, err_msg=opcode)
            np.testing.assert_array_equal(second(opcode, a, b), np.logical_not(expected), err_msg=opcode)

    check()


@pytest.mark.parametrize("kind", ["u16", "s16", "u32", "s32", "u64", "s64"])
def test_integers(kind):
    width = int(kind[1:])

    @given(rows=pairs(unsigned(width)))
    def check(rows):
        a, b = (list(column) for column in zip(*rows, strict=True))
        meant = [[signed(x, width) if kind[0] == "s" else x for x in column] for column in (a, b)]
        for name, compare in (ORDERED | UNSIGNED).items():
            opcode = f"setp.{name}.{kind}"
            np.testing.assert_array_equal(apply(opcode, a, b), list(map(compare, *meant)), err_msg=opcode)

    check()


def test_untyped_words_have_no_order():
    assert apply("setp.eq.b64", 1 << 63, 1 << 63)
    with pytest.raises(UnsupportedInstructionError):
        find(("setp", "lt", "b32"))
    with pytest.raises(UnsupportedInstructionError):
        find(("setp", "ltu", "s32"))


@pytest.mark.parametrize("name", BOOLEAN)
def test_boolean_operators_join_both_results(name):
    a, b = [1, 1, 2, 2], [2, 2, 1, 1]
    c = np.array([0, 1, 0, 1], bool)
    less = np.array([1, 1, 0, 0], bool)
    np.testing.assert_array_equal(apply(f"setp.lt.{name}.s32", a, b, c), BOOLEAN[name](less, c))
    np.testing.assert_array_equal(second(f"setp.lt.{name}.s32", a, b, c), BOOLEAN[name](~less, c))


def test_flushed_operands_are_equal():
    assert apply("setp.lt.f32", 0, 1)
    assert apply("setp.eq.ftz.f32", 0, 1)
    assert apply("setp.eq.ftz.f16", 0x8000, 0x03FF)


@given(columns=reference.lanes(unsigned(32), unsigned(32)))
def test_packed_comparisons_give_both_halves(columns):
    low, high = ([[x >> n & 0xFFFF for x in column] for column in columns] for n in (0, 16))
    for kind in ("f16", "bf16"):
        for name in ("lt", "neu", "nan"):
            opcode = f"setp.{name}.{kind}"
            np.testing.assert_array_equal(apply(opcode + "x2", *columns), apply(opcode, *low))
            np.testing.assert_array_equal(second(opcode + "x2", *columns), apply(opcode, *high))
            both = [apply(opcode, *half) for half in (low, high)]
            ones = [np.where(x, np.uint32(0xFFFF), np.uint32(0)) for x in both]
            np.testing.assert_array_equal(apply(f"set.{name}.u32.{kind}x2", *columns), ones[0] | ones[1] << 16)
            one = np.uint32({"f16": 0x3C00, "bf16": 0x3F80}[kind])
            actual = apply(f"set.{name}.{kind}x2.{kind}x2", *columns)
            np.testing.assert_array_equal(actual, both[0] * one | both[1] * (one << 16))


def test_values_of_set():
    one, two, nan = np.float32(1), np.float32(2), np.float32(np.nan)
    assert apply("set.lt.u32.f32", one, two) == 0xFFFFFFFF
    assert apply("set.lt.s32.f32", two, one) == 0
    assert apply("set.lt.f32.f32", one, two).view("f4") == 1
    assert apply("set.ltu.and.f32.f32", one, nan, False) == 0
    assert apply("set.eq.f16.s32", 3, 3) == 0x3C00
    assert apply("set.eq.bf16.u32", 3, 3) == 0x3F80
    assert apply("set.ge.u16.bf16", 0x3F80, 0x3F80) == 0xFFFF


def test_selection_by_sign():
    assert apply("slct.u32.s32", 7, 8, 0) == 7
    assert apply("slct.b64.s32", 7, 8, 0xFFFFFFFF) == 8
    assert apply("slct.f32.f32", 7, 8, np.float32(-0.0)) == 7
    assert apply("slct.f32.f32", 7, 8, np.float32(np.nan)) == 8
    assert apply("slct.f32.f32", 7, 8, np.uint32(0x80000001)) == 8
    assert apply("slct.ftz.f32.f32", 7, 8, np.uint32(0x80000001)) == 7


TESTS = {
    "finite": [1, 1, 1, 0, 0],
    "infinite": [0, 0, 0, 1, 0],
    "number": [1, 1, 1, 1, 0],
    "notanumber": [0, 0, 0, 0, 1],
    "normal": [1, 0, 1, 0, 0],
    "subnormal": [0, 1, 0, 0, 0],
}


@pytest.mark.parametrize("name", TESTS)
@pytest.mark.parametrize("kind", ["f32", "f64"])
def test_properties_of_floats(kind, name):
    smallest = np.finfo("f4" if kind == "f32" else "f8").smallest_normal
    x = np.array([0, -smallest / 2, -smallest, -np.inf, np.nan], smallest.dtype)
    np.testing.assert_array_equal(apply(f"testp.{name}.{kind}", x), np.array(TESTS[name], bool))
