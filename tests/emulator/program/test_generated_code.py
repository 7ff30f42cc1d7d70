"""Random structured programs, executed by the emulator and by a plain interpreter of one thread at a time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cuda.emulator import Output, emulate
from cuda.emulator.front import program_of
from tests.emulator.text import module, store_words

_WORD = 0xFFFFFFFF
_REGISTERS = 6
_OPERATIONS = {
    "add.u32": lambda a, b: a + b & _WORD,
    "sub.s32": lambda a, b: a - b & _WORD,
    "mul.lo.u32": lambda a, b: a * b & _WORD,
    "xor.b32": lambda a, b: a ^ b,
    "and.b32": lambda a, b: a & b,
    "max.u32": max,
    "min.s32": lambda a, b: min(a, b, key=lambda x: (x ^ 0x80000000) - 0x80000000),
}
_COMPARISONS = {"lt.u32": lambda a, b: a < b, "eq.s32": lambda a, b: a == b, "ge.u32": lambda a, b: a >= b}


@dataclass(frozen=True)
class Step:
    """`target = operation(left, right)`, under a guard `%p{0,1}` if given. Operands: register numbers or literals."""

    operation: str
    target: int
    left: int
    right: int | str
    guard: int | None
    negated: bool


@dataclass(frozen=True)
class Move:
    """`target = source`."""

    target: int
    source: int


@dataclass(frozen=True)
class Compare:
    """`%p{target} = left compared with right`."""

    comparison: str
    target: int
    left: int
    right: int | str


@dataclass(frozen=True)
class If:
    predicate: int
    then: tuple
    otherwise: tuple


@dataclass(frozen=True)
class Loop:
    """Repeats its body until a counter of its own has reached `register & 3` (at least once)."""

    register: int
    body: tuple


_register = st.integers(0, _REGISTERS - 1)
_right = st.one_of(_register, st.integers(0, 200).map(str))
_steps = st.builds(
    Step,
    st.sampled_from(sorted(_OPERATIONS)),
    _register,
    _register,
    _right,
    st.sampled_from([None, None, 0, 1]),
    st.booleans(),
)
# Registers 2 to 4 start out the same in all threads, and steps among them alone keep them so.
_shared_register = st.integers(2, 4)
_shared_steps = st.builds(
    Step,
    st.sampled_from(sorted(_OPERATIONS)),
    _shared_register,
    _shared_register,
    st.integers(0, 200).map(str),
    st.none(),
    st.just(False),
)
_compares = st.builds(Compare, st.sampled_from(sorted(_COMPARISONS)), st.integers(0, 1), _register, _right)


_moves = st.builds(Move, _register, _register)


def _blocks(depth: int):
    simple = st.one_of(_shared_steps, _shared_steps, _steps, _compares, _moves, _moves)
    if depth == 0:
        return st.lists(simple, max_size=4).map(tuple)
    inner = _blocks(depth - 1)
    return st.lists(
        st.one_of(simple, st.builds(If, st.integers(0, 1), inner, inner), st.builds(Loop, _register, inner)), max_size=5
    ).map(tuple)


class _Writer:
    """The PTX of a program."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.labels = self.counters = 0

    def operand(self, value: int | str) -> str:
        return value if isinstance(value, str) else f"%r{value}"

    def block(self, statements: tuple) -> None:
        for statement in statements:
            getattr(self, type(statement).__name__.lower())(statement)

    def step(self, s: Step) -> None:
        guard = "" if s.guard is None else f"@{'!' if s.negated else ''}%p{s.guard} "
        self.lines.append(f"{guard}{s.operation} %r{s.target}, %r{s.left}, {self.operand(s.right)};")

    def move(self, s: Move) -> None:
        self.lines.append(f"mov.b32 %r{s.target}, %r{s.source};")

    def compare(self, s: Compare) -> None:
        self.lines.append(f"setp.{s.comparison} %p{s.target}, %r{s.left}, {self.operand(s.right)};")

    def _label(self) -> str:
        self.labels += 1
        return f"L{self.labels}"

    def loop(self, s: Loop) -> None:
        head = self._label()
        self.counters += 1
        counter, limit, predicate = f"%r{20 + self.counters}", f"%r{60 + self.counters}", f"%p{5 + self.counters}"
        self.lines += [f"mov.b32 {counter}, 0;", f"and.b32 {limit}, %r{s.register}, 3;", f"{head}:"]
        self.block(s.body)
        self.lines += [f"add.u32 {counter}, {counter}, 1;", f"setp.lt.u32 {predicate}, {counter}, {limit};"]
        self.lines.append(f"@{predicate} bra {head};")

    def __getattr__(self, name: str):
        if name == "if":
            return self._if
        raise AttributeError(name)

    def _if(self, s: If) -> None:
        other, end = self._label(), self._label()
        self.lines.append(f"@!%p{s.predicate} bra {other};")
        self.block(s.then)
        self.lines += [f"bra {end};", f"{other}:"]
        self.block(s.otherwise)
        self.lines.append(f"{end}:")


class _Thread:
    """A plain interpreter of one thread."""

    def __init__(self, registers: list[int]) -> None:
        self.registers, self.predicates = registers, [registers[0] < 13, False]

    def value(self, operand: int | str) -> int:
        return int(operand) if isinstance(operand, str) else self.registers[operand]

    def run(self, statements: tuple) -> None:
        for s in statements:
            if isinstance(s, Step):
                if s.guard is None or self.predicates[s.guard] != s.negated:
                    self.registers[s.target] = _OPERATIONS[s.operation](self.registers[s.left], self.value(s.right))
            elif isinstance(s, Move):
                self.registers[s.target] = self.registers[s.source]
            elif isinstance(s, Compare):
                self.predicates[s.target] = _COMPARISONS[s.comparison](self.registers[s.left], self.value(s.right))
            elif isinstance(s, If):
                self.run(s.then if self.predicates[s.predicate] else s.otherwise)
            else:
                limit, count = self.registers[s.register] & 3, 0
                while True:
                    self.run(s.body)
                    count += 1
                    if count >= limit:
                        break


def _text(program: tuple) -> str:
    writer = _Writer()
    writer.block(program)
    start = [
        "mov.u32 %r0, %tid.x;",
        "setp.lt.u32 %p0, %r0, 13;",
        "setp.ne.u32 %p1, 0, 0;",
        "mul.lo.u32 %r1, %r0, 2654435761;",
        "mov.u32 %r2, %ctaid.x;",
        "mov.b32 %r3, 7;",
        "mov.b32 %r4, 0x80000003;",
        "shr.u32 %r5, %r0, 3;",
    ]
    registers = [f"%r{i}" for i in range(_REGISTERS)]
    return module("\n".join([*start, *writer.lines]) + store_words(registers), "p", threads=40)


@settings(max_examples=150)
@given(_blocks(2), st.integers(0, 3))
def test_random_programs(program, seed):
    threads = 40
    (arrays,) = emulate(_text(program), [Output(np.zeros((_REGISTERS, threads), np.uint32))], 1, seeds=[seed]).arrays
    for tid in range(threads):
        thread = _Thread([tid, tid * 2654435761 & _WORD, 0, 7, 0x80000003, tid >> 3])
        thread.run(program)
        assert arrays[0][:, tid].tolist() == thread.registers, f"thread {tid}"


def test_values_of_all_lanes_are_ints():
    program = program_of(
        module("mov.u32 %r1, %ctaid.x; add.u32 %r2, %r1, 3; mov.u32 %r3, %tid.x; add.u32 %r4, %r3, %r2;")
    )
    assert {"%r1", "%r2"}.isdisjoint(program.varying) and {"%r3", "%r4"} <= program.varying


@pytest.mark.parametrize(
    "body, register, varies",
    [
        # Lanes carry different definitions to where they meet.
        ("mov.b32 %r2, 1; @%p1 bra A; mov.b32 %r2, 2; A: add.u32 %r3, %r2, 0;", "%r3", True),
        # One definition, on one side only.
        ("@%p1 bra A; mov.b32 %r2, 2; add.u32 %r3, %r2, 1; A:", "%r3", False),
        # A loop that lanes leave at different times: its counter afterwards, and within.
        (
            "mov.b32 %r2, 0; L: add.u32 %r2, %r2, 1; setp.lt.u32 %p2, %r2, %r1; @%p2 bra L; add.u32 %r3, %r2, 0;",
            "%r3",
            True,
        ),
        # What a loop sets anew each time, read by lanes that left it at different times.
        (
            "mov.b32 %r4, 0; L: mov.u32 %r2, %clock; add.u32 %r4, %r4, 1; setp.lt.u32 %p2, %r4, %r1; @%p2 bra L; "
            "add.u32 %r3, %r2, 0;",
            "%r3",
            True,
        ),
        # A counter of the lanes of one side, who are together in it.
        (
            "@%p1 bra A; mov.b32 %r2, 0; L: add.u32 %r2, %r2, 1; setp.lt.u32 %p2, %r2, 5; @%p2 bra L; A:",
            "%r2",
            False,
        ),
        # A guard that differs between lanes.
        ("mov.b32 %r2, 1; @%p1 mov.b32 %r2, 3;", "%r2", True),
        # The same loop for all lanes.
        (
            "mov.b32 %r2, 0; L: add.u32 %r2, %r2, 1; setp.lt.u32 %p2, %r2, 5; @%p2 bra L; add.u32 %r3, %r2, 0;",
            "%r3",
            False,
        ),
        # Both ways lead through the same block, at different times.
        (
            "@%p1 bra A; mov.b32 %r5, 1; @%p3 bra B; bra C; A: mov.b32 %r6, 1; B: ld.shared.b32 %r2, [buffer]; C:",
            "%r2",
            True,
        ),
    ],
)
def test_which_components_vary(body, register, varies):
    text = module("mov.u32 %r1, %tid.x; setp.lt.u32 %p1, %r1, 7; setp.ne.u32 %p3, 0, 0;" + body, shared=16)
    assert (register in program_of(text).varying) is varies


def test_like_operations_become_one():
    lines = [f"add.f32 %f{i}, %f{i - 1}, 0f3F800000;" for i in range(1, 2)]
    lines = ["mov.u32 %r1, %tid.x; cvt.rn.f32.u32 %f0, %r1;"]
    lines += [f"mul.f32 %f{i}, %f0, 0f{0x40000000 + (i << 20):08X};" for i in range(1, 33)]
    lines += [f"add.f32 %f{i + 32}, %f{i}, %f0;" for i in range(1, 33)]
    text = module("\n".join(lines) + store_words([f"%f{i + 32}" for i in range(1, 33)]), "p")
    (arrays,) = emulate(text, [Output(np.zeros((32, 32), np.float32))], 1).arrays
    x = np.arange(32, dtype=np.float32)
    factors = np.array([0x40000000 + (i << 20) for i in range(1, 33)], np.uint32).view(np.float32)
    np.testing.assert_array_equal(arrays[0], factors[:, None] * x + x)
    source = program_of(text).function(0, False).source
    # One multiplication and one addition, besides the address arithmetic of the stores.
    assert sum(line.strip().startswith("g") for line in source.splitlines()) == 2


def test_packed_arithmetic_on_pairs():
    body = """
    mov.u32 %r1, %tid.x; cvt.rn.f32.u32 %f1, %r1; mov.f32 %f2, 0f3F000000;
    mov.b64 %d1, {%f1, %f2}; mov.b64 %d2, {%f2, %f1};
    fma.rn.f32x2 %d3, %d1, %d2, %d1;
    mov.b64 {%f3, %f4}, %d3;
    shl.b64 %d4, %d3, 32;
    shr.u64 %d4, %d4, 32;
    cvt.u32.u64 %r5, %d4;
    """
    text = module(body + store_words(["%f3", "%f4", "%r5"]), "p", target="sm_100a")
    (arrays,) = emulate(text, [Output(np.zeros((3, 32), np.float32))], 1).arrays
    x, half = np.arange(32, dtype=np.float32), np.float32(0.5)
    np.testing.assert_array_equal(arrays[0], np.stack([x * half + x, half * x + half, x * half + x]))


def test_a_copy_keeps_what_its_source_held():
    # Both are written back at the end of the block, where the source has a new value.
    body = """
    mov.u32 %r0, %tid.x; mov.b32 %r2, 7; mov.b32 %r5, 0; mov.b32 %r8, 0;
    L: mov.b32 %r3, %r2; add.u32 %r5, %r5, 1; mul.lo.u32 %r2, %r5, 10; setp.lt.u32 %p1, %r5, 3; @%p1 bra L;
    mov.b32 %r4, %r0;
    N: mov.b32 %r6, %r4; add.u32 %r8, %r8, 1; mul.lo.u32 %r4, %r8, %r0; setp.lt.u32 %p1, %r8, 3; @%p1 bra N;
    """
    (arrays,) = emulate(
        module(body + store_words(["%r3", "%r6"]), "p"), [Output(np.zeros((2, 32), np.uint32))], 1
    ).arrays
    np.testing.assert_array_equal(arrays[0], [[20] * 32, 2 * np.arange(32)])


def test_the_second_predicate_is_of_the_old_values():
    body = """
    mov.u32 %r1, %tid.x; setp.lt.u32 %p1, %r1, 8; setp.lt.and.u32 %p1|%p2, %r1, 4, %p1;
    selp.u32 %r2, 1, 0, %p1; selp.u32 %r3, 1, 0, %p2;
    """
    (arrays,) = emulate(
        module(body + store_words(["%r2", "%r3"]), "p"), [Output(np.zeros((2, 32), np.uint32))], 1
    ).arrays
    t = np.arange(32)
    np.testing.assert_array_equal(arrays[0], [t < 4, (t >= 4) & (t < 8)])


@pytest.mark.parametrize(
    "opcode, expected",
    [
        ("cvt.u32.u16", 0x8680),
        ("cvt.s32.s16", 0xFFFF8680),
        ("cvt.u32.u8", 0x80),
        ("cvt.s32.s8", 0xFFFFFF80),
        ("cvt.rn.f32.u8", 0x43000000),
        ("cvt.rn.f32.s8", 0xC3000000),
    ],
)
def test_conversions_read_the_low_bits_of_wider_registers(opcode, expected):
    body = (
        f"mov.b32 %r1, 0x92348680; {opcode} %r2, %r1; mov.u32 %r3, %tid.x; xor.b32 %r4, %r3, %r3; or.b32 %r4, %r4, %r1;"
    )
    text = module(body + f"{opcode} %r5, %r4;" + store_words(["%r2", "%r5"]), "p")
    (arrays,) = emulate(text, [Output(np.zeros((2, 32), np.uint32))], 1).arrays
    assert (arrays[0] == expected).all()


# Each was once taken to be the same in all lanes: a definition on one side that lanes take in different rounds, a
# counter of one side that is reset for all, a loop inside a loop that lanes leave at different times, and one that is
# entered at two places.
@pytest.mark.parametrize(
    "body, expected",
    [
        (
            "mov.b32 %r5, 0; mov.b32 %r3, 0; L: add.u32 %r5, %r5, 1; and.b32 %r6, %r1, 1; setp.eq.u32 %p1, %r6, 0; "
            "setp.gt.u32 %p2, %r5, 1; @%p2 bra K; mul.lo.u32 %r4, %r5, 0; K: @%p1 bra S; mul.lo.u32 %r4, %r5, 10; S: "
            "setp.lt.u32 %p3, %r5, 1; @%p3 bra L; add.u32 %r3, %r4, 0;",
            [0, 10] * 16,
        ),
        (
            "mov.b32 %r5, 0; mov.b32 %r2, 0; L: and.b32 %r6, %r1, 1; setp.eq.u32 %p1, %r6, %r5; @!%p1 bra S; "
            "add.u32 %r2, %r2, 7; S: add.u32 %r5, %r5, 1; setp.lt.u32 %p2, %r5, 3; @%p2 bra L; add.u32 %r3, %r2, 0;",
            [7] * 32,
        ),
        (
            "mov.b32 %r7, 0; mov.b32 %r2, 0; mov.b32 %r3, 0; and.b32 %r6, %r1, 3; O: mov.b32 %r5, 0; "
            "L: add.u32 %r2, %r2, 1; add.u32 %r5, %r5, 1; setp.le.u32 %p1, %r5, %r6; @%p1 bra L; "
            "add.u32 %r7, %r7, 1; setp.lt.u32 %p2, %r7, 2; @%p2 bra O; add.u32 %r3, %r2, 0;",
            [2 * (t % 4 + 1) for t in range(32)],
        ),
    ],
)
def test_what_lanes_do_at_different_times_is_kept_apart(body, expected):
    text = module("mov.u32 %r1, %tid.x;" + body + store_words(["%r3"]), "p")
    for seed in range(4):
        (arrays,) = emulate(text, [Output(np.zeros((1, 32), np.uint32))], 1, seeds=[seed]).arrays
        np.testing.assert_array_equal(arrays[0][0], expected)
