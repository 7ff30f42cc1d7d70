"""Sweeps: one instruction each, the values that it is tried on, and the PTX kernel that applies it to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cuda.emulator.arithmetic import approximate
from cuda.emulator.arithmetic.operations import Operation, find

TARGETS = {"sm_90": "8.1", "sm_100a": "8.8"}
BLOCK = 256
_RANDOM = 1 << 20


@dataclass(frozen=True)
class Sweep:
    """One instruction.

    Attributes:
      opcode: as written in PTX.
      domain: what its operands are tried on: a key of DOMAINS.
      literals: source operands behind the last input of its operation.
      target: the architecture that it needs.
      approximate: the hardware may differ from the emulator.
      operands: how many source operands, where the opcode does not say.
    """

    opcode: str
    domain: str
    literals: tuple[int, ...] = ()
    target: str = "sm_90"
    approximate: bool = False
    operands: int = 0

    @property
    def operation(self) -> Operation:
        parts = tuple(self.opcode.split("."))
        immediates: tuple[int | None, ...] = (None,) * self.operands
        if self.literals:
            immediates = (None,) * 3 + self.literals
        found = find(parts, immediates)
        assert found is not None, self.opcode
        return found

    @property
    def name(self) -> str:
        return self.opcode + "".join(f",{literal:#x}" for literal in self.literals)

    @property
    def result_type(self) -> str:
        """The PTX type of the result; "pred" of `setp` and `testp`."""
        parts = self.opcode.split(".")
        if parts[0] in ("setp", "testp"):
            return "pred"
        if parts[0] in ("cvt", "set"):
            types = [part for part in parts[1:] if part[0] in "usbfet" and any(c.isdigit() for c in part)]
            return types[0]
        return parts[-1] if "wide" not in parts else "b64"


# ---- kernels


def kernel(sweep: Sweep) -> str:
    """The PTX of a kernel: the number of elements, one pointer for each input, one for the output."""
    operation = sweep.operation
    names = [f"in{i}" for i in range(len(operation.inputs))]
    lines = [
        f".version {TARGETS[sweep.target]}",
        f".target {sweep.target}",
        ".address_size 64",
        ".visible .entry sweep(.param .u32 n, " + ", ".join(f".param .u64 {name}" for name in [*names, "out"]) + ") {",
        ".reg .pred %p<8>; .reg .b16 %h<16>; .reg .b32 %r<16>; .reg .b64 %d<16>; .reg .b8 %b<4>;",
        "mov.u32 %r0, %ctaid.x; mov.u32 %r1, %ntid.x; mov.u32 %r2, %tid.x; mad.lo.u32 %r0, %r0, %r1, %r2;",
        "ld.param.u32 %r1, [n]; setp.ge.u32 %p0, %r0, %r1; @%p0 ret;",
    ]
    sources = []
    for i, (name, code) in enumerate(zip(names, operation.inputs, strict=True)):
        bits = 16 if code == "b1" else 8 * int(code[1])
        register = f"%{ {16: 'h', 32: 'r', 64: 'd'}[bits] }{4 + i}"
        lines += _load(name, register, bits)
        if code == "b1":
            lines.append(f"setp.ne.b16 %p{4 + i}, {register}, 0;")
            register = f"%p{4 + i}"
        sources.append(register)
    lines += _apply(sweep, operation, sources)
    lines.append("ret; }")
    return "\n".join(lines) + "\n"


def _load(name: str, register: str, bits: int) -> list[str]:
    return [
        f"ld.param.u64 %d0, [{name}]; mul.wide.u32 %d1, %r0, {bits // 8}; add.s64 %d0, %d0, %d1;",
        f"ld.global.b{bits} {register}, [%d0];",
    ]


def _store(register: str, bits: int) -> list[str]:
    return [
        f"ld.param.u64 %d0, [out]; mul.wide.u32 %d1, %r0, {bits // 8}; add.s64 %d0, %d0, %d1;",
        f"st.global.b{bits} [%d0], {register};",
    ]


def _apply(sweep: Sweep, operation: Operation, sources: list[str]) -> list[str]:
    """The instruction, and the store of its result; predicates are stored as p + 2 q."""
    arguments = ", ".join([*sources, *map(str, sweep.literals)])
    if sweep.result_type == "pred":
        target = "%p2|%p3" if operation.second is not None else "%p2"
        second = "selp.b16 %h1, 2, 0, %p3; or.b16 %h0, %h0, %h1;" if operation.second is not None else ""
        return [f"{sweep.opcode} {target}, {arguments};", f"selp.b16 %h0, 1, 0, %p2; {second}", *_store("%h0", 16)]
    if sweep.result_type == "e2m1x2":
        lines = [f"{sweep.opcode} %b0, {arguments};", "mov.b32 %r3, {%b0, %b0, %b0, %b0}; and.b32 %r3, %r3, 255;"]
        return [*lines, "cvt.u16.u32 %h0, %r3;", *_store("%h0", 16)]
    if ".e2m1x2" in sweep.opcode:
        lines = [f"cvt.u32.u16 %r3, {sources[0]}; mov.b32 {{%b0, %b1, %b2, %b3}}, %r3;"]
        return [*lines, f"{sweep.opcode} %r4, %b0;", *_store("%r4", 32)]
    bits = 8 * int(operation.output[1])
    register = {16: "%h0", 32: "%r3", 64: "%d2"}[bits]
    return [f"{sweep.opcode} {register}, {arguments};", *_store(register, bits)]


# ---- values

_FLOAT32 = np.array(
    [0x00000000, 0x00000001, 0x00000002, 0x00400000, 0x007FFFFF, 0x00800000, 0x00800001, 0x00FFFFFF, 0x01000000,
     0x2E800000, 0x33000000, 0x33800000, 0x33800001, 0x34000000, 0x3EFFFFFF, 0x3F000000, 0x3F000001, 0x3F7FFFFF,
     0x3F800000, 0x3F800001, 0x3FC00000, 0x40000000, 0x40490FDB, 0x477FE000, 0x477FF000, 0x477FEFFF, 0x4B000001,
     0x4EFFFFFF, 0x4F000000, 0x4F7FFFFF, 0x4F800000, 0x5EFFFFFF, 0x5F000000, 0x5F800000, 0x7E7FFFFF, 0x7E800000,
     0x7E800001, 0x7F000000, 0x7F7F0000, 0x7F7F8000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF],
    "u4",
)  # fmt: skip
_FLOAT64 = np.array(
    [0, 1, 0xFFFFFFFFFFFFF, 0x10000000000000, 0x3FF0000000000000, 0x3FF0000000000001, 0x4000000000000000,
     0x7FEFFFFFFFFFFFFF, 0x7FF0000000000000, 0x7FF8000000000000],
    "u8",
)  # fmt: skip
_FLOAT16 = np.array(
    [0x0000, 0x0001, 0x03FF, 0x0400, 0x0401, 0x3BFF, 0x3C00, 0x3C01, 0x4000, 0x7800, 0x7BFF, 0x7C00, 0x7C01, 0x7E00],
    "u2",
)
_BFLOAT16 = np.array(
    [0x0000, 0x0001, 0x007F, 0x0080, 0x0081, 0x3F7F, 0x3F80, 0x3F81, 0x4000, 0x7F00, 0x7F7F, 0x7F80, 0x7F81, 0x7FC0],
    "u2",
)


def _both_signs(bits: np.ndarray) -> np.ndarray:
    return np.concatenate([bits, bits | bits.dtype.type(1 << (8 * bits.dtype.itemsize - 1))])


def _integers(rng: np.random.Generator, code: str, count: int) -> np.ndarray:
    """Integers of all magnitudes, and those at the ends of ranges."""
    bits = 8 * int(code[1])
    random = rng.integers(0, 1 << bits, count, dtype=f"u{code[1]}", endpoint=False)
    random = random >> rng.integers(0, bits, count).astype(random.dtype)
    random = np.where(rng.random(count) < 0.5, random, ~random + 1)
    edges = [(1 << n) + d for n in range(bits) for d in (-1, 0, 1)]
    edges = np.array([edge & (1 << bits) - 1 for edge in edges], random.dtype)
    return np.concatenate([edges, ~edges + edges.dtype.type(1), random])


def _float_bits(rng: np.random.Generator, code: str, count: int) -> np.ndarray:
    bits = 8 * int(code[1])
    return rng.integers(0, 1 << bits, count, dtype=f"u{code[1]}", endpoint=False)


def _specials(kind: str) -> np.ndarray:
    if kind == "f32":
        return _both_signs(_FLOAT32)
    if kind == "f64":
        narrow = _both_signs(_FLOAT32).view("f4").astype("f8")
        edges = [np.nextafter(x, y) for x in narrow[np.isfinite(narrow)] for y in (-np.inf, np.inf)]
        own = np.array([0x1, 0xFFFFFFFFFFFFF, 0x10000000000000, 0x7FEFFFFFFFFFFFFF], "u8")
        # Just below the smallest normal float32, by 2, 1 and 1/2 of the last place of 24 bits, and what is next to it.
        below = np.array([2.0**-126 * (1 - 2.0**-n) for n in (23, 24, 25)]).view("u8")
        own = np.concatenate([own, below - 1, below, below + 1])
        halves = np.arange(-1030, 1030) / 4
        return np.concatenate([narrow.view("u8"), np.array(edges).view("u8"), _both_signs(own), halves.view("u8")])
    return _both_signs(_FLOAT16 if kind == "f16" else _BFLOAT16)


def _grid(specials: Sequence[np.ndarray]) -> list[np.ndarray]:
    return [axis.ravel() for axis in np.meshgrid(*specials, indexing="ij")]


def float32_one(rng: np.random.Generator) -> list[np.ndarray]:
    """All exponents and both signs evenly; every bfloat16 and float16 value, what is next to it, and the middles."""
    top = np.arange(1 << 16, dtype="u4")
    bfloat16 = [(top << 16) | low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]
    half = top.astype("u2").view("f2").astype("f4").view("u4")
    float16 = [half + d for d in (1, 0xFFF, 0x1000, 0x1001, 0x1FFF)]
    halves = (np.arange(-1 << 12, 1 << 12, dtype="f4") / 8).view("u4")
    near_126 = (-126 + np.arange(-2048, 2048, dtype="f4") / 256).view("u4")
    random = _float_bits(rng, "f4", _RANDOM)
    return [np.concatenate([_specials("f32"), halves, near_126, *bfloat16, half, *float16, random])]


def float32_angles(rng: np.random.Generator) -> list[np.ndarray]:
    """Within [-pi, pi], and the special values."""
    angles = rng.uniform(-np.pi, np.pi, _RANDOM // 4).astype("f4").view("u4")
    return [np.concatenate([_specials("f32"), angles])]


def float32_two(rng: np.random.Generator) -> list[np.ndarray]:
    """All pairs of special values, random bits, neighbours of neighbouring exponents, quotients that are short."""
    special = _grid([_specials("f32")] * 2)
    a = _float_bits(rng, "f4", _RANDOM // 2)
    b = _float_bits(rng, "f4", _RANDOM // 2)
    close = _float_bits(rng, "f4", _RANDOM // 2)
    near = close + (rng.integers(-40, 40, len(close)) << rng.integers(0, 24, len(close))).astype("u4")
    near ^= (rng.integers(0, 2, len(close)) << 31).astype("u4")
    short = [_short(rng, _RANDOM // 4) for _ in range(2)]
    return [np.concatenate(parts) for parts in zip(special, (a, b), (close, near), short, strict=True)]


def _short(rng: np.random.Generator, count: int, spread: int = 30) -> np.ndarray:
    """float32 of few significant bits, so that sums and products often are ties."""
    mantissa = rng.integers(-(1 << 13), 1 << 13, count) | 1
    return np.ldexp(mantissa.astype("f8"), rng.integers(-spread, spread, count)).astype("f4").view("u4")


def float32_three(rng: np.random.Generator) -> list[np.ndarray]:
    """Special values, random bits, sums that nearly cancel, ties, ties that a tiny addend breaks, subnormal results."""
    few = _both_signs(_FLOAT32[[0, 1, 4, 5, 11, 18, 23, 40, 41, 44]])
    special = _grid([few] * 3)
    random = [_float_bits(rng, "f4", _RANDOM // 4) for _ in range(3)]
    x, y = (rng.standard_normal(_RANDOM // 8).astype("f4") for _ in range(2))
    cancel = [x.view("u4"), y.view("u4"), (-(x * y)).view("u4") + rng.integers(-2, 3, len(x)).astype("u4")]
    short = [_short(rng, _RANDOM // 8, 12) for _ in range(3)]
    tiny = np.ldexp(1 + rng.random(_RANDOM // 8), rng.integers(-149, -60, _RANDOM // 8))
    tiny = (tiny * rng.choice([-1, 1], len(tiny))).astype("f4").view("u4")
    broken = [_short(rng, _RANDOM // 8, 6), _short(rng, _RANDOM // 8, 6), tiny]
    scale = np.float32(2.0**-75)
    small = [(_short(rng, _RANDOM // 8, 6).view("f4") * scale).view("u4") for _ in range(2)]
    below = [*small, np.where(rng.random(_RANDOM // 8) < 0.5, 0, tiny)]
    edge_a = (np.float32(2.0**-63) * (1 + rng.integers(-64, 64, _RANDOM // 8) * 2.0**-23)).astype("f4")
    edge_b = (np.float32(2.0**-63) * (1 + rng.integers(-64, 64, _RANDOM // 8) * 2.0**-23)).astype("f4")
    edge = [edge_a.view("u4"), edge_b.view("u4"), np.zeros(len(edge_a), "u4")]
    return [np.concatenate(parts) for parts in zip(special, random, cancel, short, broken, below, edge, strict=True)]


def float32_pair(rng: np.random.Generator) -> list[np.ndarray]:
    """`float32_one`, twice, in different orders."""
    (a,) = float32_one(rng)
    return [a, rng.permutation(a)]


def float32_random_bits(rng: np.random.Generator) -> list[np.ndarray]:
    a, b = float32_pair(rng)
    return [a, b, _float_bits(rng, "u4", len(a))]


def half_one(rng: np.random.Generator) -> list[np.ndarray]:
    return [np.arange(1 << 16, dtype="u2")]


def words_one(rng: np.random.Generator) -> list[np.ndarray]:
    """Every half in the lower part, every half in the upper part."""
    low = np.arange(1 << 16, dtype="u4")
    return [low | (rng.permutation(low) << 16)]


def _half_many(kind: str, count: int):
    def values(rng: np.random.Generator) -> list[np.ndarray]:
        special = _grid([_specials(kind)] * count)
        every = np.tile(np.arange(1 << 16, dtype="u2"), 4)
        random = [every] + [rng.permutation(every) for _ in range(count - 1)]
        close = rng.permutation(every)
        near = [close] + [close + rng.integers(-300, 300, len(close)).astype("u2") for _ in range(count - 1)]
        return [np.concatenate(parts) for parts in zip(special, random, near, strict=True)]

    return values


def _words_many(kind: str, count: int):
    halves = _half_many(kind, count)

    def values(rng: np.random.Generator) -> list[np.ndarray]:
        low = halves(rng)
        order = rng.permutation(len(low[0]))
        return [x.astype("u4") | (x[order].astype("u4") << 16) for x in low]

    return values


def _ints(*codes: str):
    def values(rng: np.random.Generator) -> list[np.ndarray]:
        columns = [_integers(rng, code, 1 << 17) for code in codes]
        size = min(map(len, columns))
        return [rng.permutation(column)[:size] for column in columns]

    return values


def _field(code: str, words: int, amounts: int):
    """Words, then amounts, most of them within the width and the rest beyond."""

    def values(rng: np.random.Generator) -> list[np.ndarray]:
        size = 1 << 17
        amount = np.concatenate([np.arange(300), rng.integers(0, 70, size - 310), (1 << 32) - 1 - np.arange(10)])
        return [_float_bits(rng, code, size) for _ in range(words)] + [
            rng.permutation(amount).astype("u4") for _ in range(amounts)
        ]

    return values


def permutes(rng: np.random.Generator) -> list[np.ndarray]:
    """All selectors."""
    selector = np.arange(1 << 16, dtype="u4") | (_float_bits(rng, "u4", 1 << 16) & 0xFFFF0000)
    return [_float_bits(rng, "u4", 1 << 16), _float_bits(rng, "u4", 1 << 16), selector]


def float64_one(rng: np.random.Generator) -> list[np.ndarray]:
    scaled = np.ldexp(rng.standard_normal(1 << 17), rng.integers(-160, 160, 1 << 17)).view("u8")
    (narrow,) = float32_one(rng)
    middles = (narrow[: 1 << 17].view("f4").astype("f8").view("u8")) | (1 << 28)
    return [np.concatenate([_specials("f64"), scaled, middles, middles + 1, _float_bits(rng, "f8", 1 << 17)])]


def _floats64(count: int):
    def values(rng: np.random.Generator) -> list[np.ndarray]:
        special = _grid([_both_signs(_FLOAT64)] * count)
        random = [_float_bits(rng, "f8", 1 << 15) for _ in range(count)]
        normal = [rng.standard_normal(1 << 16).view("u8") for _ in range(count)]
        if count == 3:
            x, y = normal[0].view("f8"), normal[1].view("f8")
            normal[2] = (-(x * y)).view("u8") + rng.integers(-2, 3, len(x)).astype("u8")
        return [np.concatenate(parts) for parts in zip(special, random, normal, strict=True)]

    return values


def _with_predicate(domain):
    def values(rng: np.random.Generator) -> list[np.ndarray]:
        columns = domain(rng)
        return [*columns, rng.integers(0, 2, len(columns[0])).astype("u2")]

    return values


DOMAINS = {
    "float32": float32_one,
    "angles": float32_angles,
    "float32 two": float32_two,
    "float32 three": float32_three,
    "float32 pair": float32_pair,
    "float32 pair, random bits": float32_random_bits,
    "float32 two, predicate": _with_predicate(float32_two),
    "half": half_one,
    "words": words_one,
    "float16 two": _half_many("f16", 2),
    "float16 three": _half_many("f16", 3),
    "bfloat16 two": _half_many("bf16", 2),
    "bfloat16 three": _half_many("bf16", 3),
    "float16x2 two": _words_many("f16", 2),
    "float16x2 three": _words_many("f16", 3),
    "bfloat16x2 two": _words_many("bf16", 2),
    "bfloat16x2 three": _words_many("bf16", 3),
    "bfloat16x2 two, predicate": _with_predicate(_words_many("bf16", 2)),
    "int16": _ints("u2"),
    "int32": _ints("u4"),
    "int64": _ints("u8"),
    "int16 two": _ints("u2", "u2"),
    "int32 two": _ints("u4", "u4"),
    "int64 two": _ints("u8", "u8"),
    "int32 three": _ints("u4", "u4", "u4"),
    "int32 wide": _ints("u4", "u4", "u8"),
    "int64 three": _ints("u8", "u8", "u8"),
    "shift 32": _field("u4", 1, 1),
    "shift 64": _field("u8", 1, 1),
    "funnel": _field("u4", 2, 1),
    "field 32": _field("u4", 1, 2),
    "field 64": _field("u8", 1, 2),
    "insert 32": _field("u4", 2, 2),
    "insert 64": _field("u8", 2, 2),
    "permutes": permutes,
    "float64": float64_one,
    "float64 two": _floats64(2),
    "float64 three": _floats64(3),
}


def inputs(sweep: Sweep) -> list[np.ndarray]:
    """The operands, raw words of one length; the same ones every time."""
    rng = np.random.default_rng([ord(c) for c in sweep.opcode])
    with np.errstate(all="ignore"):
        return [np.ascontiguousarray(column) for column in DOMAINS[sweep.domain](rng)]


def emulated(sweep: Sweep, columns: Sequence[np.ndarray]) -> np.ndarray:
    """The emulator's results as raw words; predicates as p + 2 q."""
    operation = sweep.operation
    values = [
        column.astype(bool) if code == "b1" else column.view(code)
        for column, code in zip(columns, operation.inputs, strict=True)
    ]
    with np.errstate(all="ignore"):
        result = operation.function(*values)
        if operation.output != "b1":
            return np.ascontiguousarray(result).view(f"u{operation.output[1]}")
        second = 0 if operation.second is None else operation.second(*values).astype("u2") << 1
    return result.astype("u2") | second


# ---- comparison


def canonical_nans(raw: np.ndarray, kind: str) -> np.ndarray:
    """Raw words of a PTX type, every NaN replaced by the same one."""
    exponents = {"f16": 0x7C00, "bf16": 0x7F80, "f32": 0x7F800000, "f64": 0x7FF0000000000000}
    single = kind.removesuffix("x2")
    if single not in exponents:
        return raw
    code = {"f16": "u2", "bf16": "u2", "f32": "u4", "f64": "u8"}[single]
    parts = raw.view(code)
    magnitude = (1 << (8 * int(code[1]) - 1)) - 1
    return np.where((parts & magnitude) > exponents[single], magnitude, parts).astype(code).view(raw.dtype)


def ulp_distance(a: np.ndarray, b: np.ndarray, kind: str) -> np.ndarray:
    """How many values of the type apart the words are."""
    code = {"f16": "i2", "bf16": "i2", "f32": "i4", "f64": "i8"}[kind.removesuffix("x2")]
    lowest = np.iinfo(code).min

    def ordered(x):
        x = x.view(code).astype("i8")
        return np.where(x < 0, lowest - x, x)

    a, b = ordered(a), ordered(b)
    # Modulo 2**64 the difference of float64 words is right too.
    return np.maximum(a, b).view("u8") - np.minimum(a, b).view("u8")


def errors(sweep: Sweep, columns: Sequence[np.ndarray], actual: np.ndarray) -> np.ndarray:
    """How far the results of an approximate function are from the true ones, in units of the ISA's bound.

    One number for each word, of packed halves the larger one. Infinite where one result is NaN or infinite and the
    other is not; zero where the ISA promises nothing.
    """
    kind = sweep.result_type.removesuffix("x2")
    code = {"f16": "u2", "bf16": "u2", "f32": "u4"}[kind]
    ftz = ".ftz" in sweep.opcode
    operands = [_exact_values(column.view(code), kind, ftz) for column in columns]
    got, emulation = (_exact_values(x.view(code), kind) for x in (actual, emulated(sweep, columns)))
    name = sweep.opcode.split(".")[0]
    with np.errstate(all="ignore"):
        exact = operands[0] / operands[1] if name == "div" else approximate.FUNCTIONS[name](operands[0])
        ratio = _ratio(sweep.opcode.replace(".ftz", "").removesuffix("x2"), kind, np.abs(operands[-1]), exact, got)
        if ftz:
            flushed = np.abs(exact) < 2.0**-126 * (1 + 2.0**-20)
            ratio = np.where(flushed, np.minimum(ratio, np.abs(got - exact) / 2.0**-126), ratio)
        same = (got == emulation) | (np.isnan(got) & np.isnan(emulation))
        odd = (~np.isfinite(got) | ~np.isfinite(emulation)) & ~np.isnan(ratio)
    ratio = np.where(same | np.isnan(ratio), 0.0, np.where(odd, np.inf, ratio))
    return ratio.reshape(len(actual), -1).max(axis=1)


def _exact_values(bits: np.ndarray, kind: str, ftz: bool = False) -> np.ndarray:
    """float64 values of words of a float type."""
    with np.errstate(all="ignore"):
        if kind == "bf16":
            x = (bits.astype("u4") << 16).view("f4").astype("f8")
        else:
            x = bits.view("f2" if kind == "f16" else "f4").astype("f8")
        return np.where(np.abs(x) < 2.0**-126, np.copysign(0, x), x) if ftz else x


def _ratio(opcode: str, kind: str, operand: np.ndarray, exact: np.ndarray, got: np.ndarray) -> np.ndarray:
    """The error by the ISA's bound for the operand, NaN where there is none."""
    precision, smallest = {"f16": (11, -14), "bf16": (8, -126), "f32": (24, -126)}[kind]
    # Subnormal results are no nearer than their spacing.
    spacing = np.ldexp(1.0, smallest - precision + 1)
    ratio = np.full(exact.shape, np.nan)
    done = np.zeros(exact.shape, bool)
    for bound in approximate.BOUNDS[opcode]:
        if bound.kind == "ulp":
            assert kind == "f32"
            error = ulp_distance(exact.astype("f4"), got.astype("f4"), kind) / bound.amount
        else:
            unit = np.abs(exact) if bound.kind == "relative" else 1.0
            error = np.abs(got - exact) / np.maximum(bound.amount * unit, spacing)
        inside = (operand >= bound.low) & (operand <= bound.high) & ~done
        ratio = np.where(inside, error, ratio)
        done |= inside
    return ratio


# ---- the instructions


def _many(domain: str, *opcodes: str, **options) -> list[Sweep]:
    return [Sweep(opcode, domain, **options) for opcode in opcodes]


def _spell(text: str) -> list[str]:
    return text.split()


ROUNDINGS = ("rn", "rz", "rm", "rp")
SWEEPS: list[Sweep] = [
    # float32 arithmetic
    *_many("float32 two", *(f"{name}.{r}{z}.f32" for name in ("add", "sub", "mul", "div") for r in ROUNDINGS
                            for z in ("", ".ftz"))),
    *_many("float32 three", *(f"fma.{r}{z}.f32" for r in ROUNDINGS for z in ("", ".ftz")), "fma.rn.sat.f32"),
    *_many("float32", *(f"{name}.{r}{z}.f32" for name in ("rcp", "sqrt") for r in ROUNDINGS for z in ("", ".ftz"))),
    *_many("float32 two", "add.sat.f32", "mul.ftz.sat.f32"),
    *_many("float32 two", *(f"{name}{m}.f32" for name in ("min", "max")
                            for m in ("", ".NaN", ".ftz", ".xorsign.abs", ".NaN.xorsign.abs")), "copysign.f32"),
    *_many("float32 three", *(f"{name}{m}.f32" for name in ("min", "max") for m in ("", ".NaN", ".abs")),
           target="sm_100a", operands=3),
    *_many("float32", *_spell("abs.f32 abs.ftz.f32 neg.f32 neg.ftz.f32")),
    *_many("float32", *(f"testp.{t}.f32" for t in ("finite", "infinite", "number", "notanumber", "normal",
                                                   "subnormal"))),
    *_many("float64", "testp.normal.f64", "testp.subnormal.f64"),
    # approximate functions
    *_many("float32", *(f"{name}.approx{z}.f32" for name in ("ex2", "lg2", "rcp", "sqrt", "rsqrt")
                        for z in ("", ".ftz")), "tanh.approx.f32", approximate=True),
    *_many("angles", "sin.approx.f32", "cos.approx.f32", approximate=True),
    *_many("float32 two", "div.approx.f32", "div.approx.ftz.f32", "div.full.f32", "div.full.ftz.f32", approximate=True),
    *_many("half", *_spell("ex2.approx.f16 ex2.approx.ftz.bf16 tanh.approx.f16 tanh.approx.bf16"),
           approximate=True),
    *_many("words", *_spell("ex2.approx.f16x2 ex2.approx.ftz.bf16x2 tanh.approx.f16x2 tanh.approx.bf16x2"),
           approximate=True),
    # float64
    *_many("float64 two", *_spell("add.f64 sub.f64 mul.f64 div.rn.f64 min.f64 max.f64 copysign.f64")),
    *_many("float64 three", "fma.rn.f64"),
    *_many("float64", *_spell("sqrt.rn.f64 rcp.rn.f64 abs.f64 neg.f64")),
    # float16 and bfloat16
    *_many("float16 two", *_spell("add.f16 sub.f16 mul.f16 add.ftz.f16 mul.ftz.f16 mul.sat.f16 min.f16 max.NaN.f16 "
                                  "max.ftz.f16 min.xorsign.abs.f16")),
    *_many("float16 three", *_spell("fma.rn.f16 fma.rn.ftz.f16 fma.rn.sat.f16 fma.rn.relu.f16")),
    *_many("float16x2 two", *_spell("add.f16x2 sub.f16x2 mul.f16x2 mul.ftz.f16x2 min.f16x2 max.f16x2 max.NaN.f16x2")),
    *_many("float16x2 three", *_spell("fma.rn.f16x2 fma.rn.relu.f16x2")),
    *_many("bfloat16 two", *_spell("add.bf16 sub.bf16 mul.bf16 min.bf16 max.NaN.bf16")),
    *_many("bfloat16 three", *_spell("fma.rn.bf16 fma.rn.relu.bf16")),
    *_many("bfloat16x2 two", *_spell("add.bf16x2 sub.bf16x2 mul.bf16x2 min.bf16x2 max.bf16x2 max.NaN.bf16x2 "
                                     "min.xorsign.abs.bf16x2")),
    *_many("bfloat16x2 three", *_spell("fma.rn.bf16x2 fma.rn.relu.bf16x2")),
    *_many("words", *_spell("neg.f16x2 abs.f16x2 neg.bf16x2 abs.bf16x2 neg.ftz.f16x2 abs.ftz.f16x2")),
    # comparisons
    *_many("float32 two", *(f"setp.{c}.f32" for c in _spell("eq ne lt le gt ge equ neu ltu leu gtu geu num nan")),
           "setp.lt.ftz.f32"),
    *_many("float32 two, predicate", *(f"setp.{c}.f32" for c in _spell("lt.and geu.or nan.xor"))),
    *_many("int32 two", *(f"setp.{c}" for c in _spell("eq.b32 ne.s32 lt.s32 le.u32 gt.s32 ge.u32 lo.u32 hs.u32"))),
    *_many("int64 two", "setp.lt.s64", "setp.hi.u64"),
    *_many("int16 two", "setp.lt.s16", "setp.ge.u16"),
    *_many("bfloat16x2 two", *_spell("setp.lt.bf16x2 setp.neu.bf16x2 setp.nan.bf16x2 set.ge.u32.bf16x2 "
                                     "set.lt.bf16x2.bf16x2 set.equ.bf16x2.bf16x2")),
    *_many("bfloat16x2 two, predicate", "setp.gt.or.bf16x2"),
    *_many("float16x2 two", *_spell("setp.ge.f16x2 setp.lt.ftz.f16x2 set.le.f16x2.f16x2 set.gtu.u32.f16x2")),
    *_many("float32 two", *_spell("set.ge.u32.f32 set.lt.f32.f32 set.num.ftz.s32.f32")),
    *_many("int32 three", "slct.u32.s32", "slct.f32.f32", "slct.ftz.f32.f32"),
    # integers
    *_many("int32 two", *_spell("add.s32 add.sat.s32 sub.s32 sub.sat.s32 mul.lo.s32 mul.hi.s32 mul.hi.u32 mul.wide.s32 "
                                "mul.wide.u32 mul24.lo.s32 mul24.lo.u32 mul24.hi.s32 mul24.hi.u32 min.s32 max.u32 "
                                "min.relu.s32 max.relu.s32 add.u16x2 add.s16x2 min.u16x2 max.s16x2 min.relu.s16x2 "
                                "and.b32 or.b32 xor.b32")),
    *_many("int64 two", *_spell("add.s64 sub.u64 mul.lo.u64 mul.hi.s64 mul.hi.u64 min.s64 max.u64 xor.b64")),
    *_many("int16 two", *_spell("add.s16 mul.lo.u16 mul.hi.s16 mul.hi.u16 mul.wide.s16 mul.wide.u16 min.s16 max.u16 "
                                "and.b16")),
    *_many("int32 three", *_spell("mad.lo.s32 mad.hi.s32 mad.hi.sat.s32 mad.hi.u32 mad24.lo.s32 "
                                  "mad24.hi.sat.s32 sad.s32 sad.u32 "
                                  "dp4a.s32.s32 dp4a.u32.s32 dp4a.u32.u32 dp2a.lo.s32.u32 dp2a.hi.s32.s32")),
    *_many("int32 wide", "mad.wide.s32", "mad.wide.u32"),
    *_many("int64 three", *_spell("mad.lo.s64 mad.hi.s64 mad.hi.u64 sad.s64")),
    *_many("int32", *_spell("abs.s32 neg.s32 not.b32 cnot.b32 clz.b32 popc.b32 brev.b32 bfind.s32 bfind.u32 "
                            "bfind.shiftamt.s32")),
    *_many("int64", *_spell("abs.s64 neg.s64 clz.b64 popc.b64 brev.b64 bfind.s64 bfind.shiftamt.u64")),
    *_many("shift 32", *_spell("shl.b32 shr.u32 shr.s32")),
    *_many("shift 64", *_spell("shl.b64 shr.u64 shr.s64")),
    *_many("funnel", *(f"shf.{side}.{limit}.b32" for side in "lr" for limit in ("wrap", "clamp"))),
    *_many("field 32", "bfe.u32", "bfe.s32"),
    *_many("field 64", "bfe.u64", "bfe.s64"),
    *_many("insert 32", "bfi.b32"),
    *_many("insert 64", "bfi.b64"),
    *_many("permutes", "prmt.b32", *(f"prmt.b32.{m}" for m in _spell("f4e b4e rc8 ecl ecr rc16"))),
    *(Sweep("lop3.b32", "int32 three", literals=(table,)) for table in (0x96, 0xF8, 0xCA, 0x2D, 0x01, 0xE8, 0x00)),
    # conversions to and from float32
    *_many("float32", *(f"cvt.{r}{z}.{t}.f32" for t in ("s8", "u8", "s16", "u16", "s32", "u32", "s64", "u64")
                        for r in ("rni", "rzi") for z in ("", ".ftz"))),
    *_many("float32", *_spell("cvt.rmi.s32.f32 cvt.rpi.s32.f32 cvt.rpi.ftz.u32.f32 cvt.rni.f32.f32 cvt.rzi.f32.f32 "
                              "cvt.rmi.ftz.f32.f32 cvt.rpi.f32.f32 cvt.sat.f32.f32 cvt.ftz.f32.f32 cvt.f64.f32")),
    *_many("float32", *_spell("cvt.rn.f16.f32 cvt.rz.f16.f32 cvt.rm.f16.f32 cvt.rp.f16.f32 cvt.rn.ftz.f16.f32 "
                              "cvt.rn.relu.f16.f32 cvt.rn.satfinite.f16.f32 cvt.rn.bf16.f32 cvt.rz.bf16.f32 "
                              "cvt.rm.bf16.f32 cvt.rp.bf16.f32 cvt.rn.relu.bf16.f32 cvt.rn.satfinite.bf16.f32 "
                              "cvt.rn.tf32.f32 cvt.rz.tf32.f32 cvt.rna.tf32.f32 cvt.rn.relu.tf32.f32 "
                              "cvt.rna.satfinite.tf32.f32")),
    *_many("float32 pair", *_spell("cvt.rn.bf16x2.f32 cvt.rz.bf16x2.f32 cvt.rn.relu.bf16x2.f32 "
                                   "cvt.rn.satfinite.bf16x2.f32 cvt.rz.relu.satfinite.bf16x2.f32 cvt.rn.f16x2.f32 "
                                   "cvt.rz.f16x2.f32 cvt.rn.relu.f16x2.f32 cvt.rn.satfinite.f16x2.f32 "
                                   "cvt.rn.satfinite.e4m3x2.f32 cvt.rn.satfinite.e5m2x2.f32 "
                                   "cvt.rn.satfinite.relu.e4m3x2.f32 cvt.rn.satfinite.relu.e5m2x2.f32")),
    *_many("float32 pair", *_spell("cvt.rn.satfinite.e2m1x2.f32 cvt.rn.satfinite.relu.e2m1x2.f32 "
                                   "cvt.rn.satfinite.e2m3x2.f32 cvt.rn.satfinite.e3m2x2.f32 "
                                   "cvt.rz.satfinite.ue8m0x2.f32 cvt.rp.satfinite.ue8m0x2.f32 cvt.rz.ue8m0x2.f32 "
                                   "cvt.rp.ue8m0x2.f32"), target="sm_100a"),
    *_many("float32 pair, random bits", "cvt.rs.bf16x2.f32", target="sm_100a"),
    # conversions of halves and small formats
    *_many("half", *_spell("cvt.f32.bf16 cvt.f32.f16 cvt.ftz.f32.f16 cvt.f64.f16 cvt.f64.bf16 cvt.rn.bf16.f16 "
                           "cvt.rn.f16.bf16 cvt.rz.f16.bf16 cvt.rni.f16.f16 cvt.rzi.f16.f16 cvt.rni.bf16.bf16 "
                           "cvt.rpi.bf16.bf16 cvt.sat.f16.f16 cvt.rzi.s32.f16 cvt.rni.u32.bf16 cvt.rzi.s64.bf16 "
                           "cvt.rni.s16.f16")),
    *_many("half", *_spell("cvt.rn.f16x2.e4m3x2 cvt.rn.f16x2.e5m2x2 cvt.rn.relu.f16x2.e4m3x2")),
    *_many("words", *_spell("cvt.rn.satfinite.e4m3x2.f16x2 cvt.rn.satfinite.e5m2x2.f16x2 "
                            "cvt.rn.satfinite.relu.e5m2x2.f16x2")),
    *_many("half", *_spell("cvt.rn.f16x2.e2m1x2 cvt.rn.f16x2.e2m3x2 cvt.rn.f16x2.e3m2x2 cvt.rn.bf16x2.ue8m0x2"),
           target="sm_100a"),
    *_many("words", *_spell("cvt.rz.satfinite.ue8m0x2.bf16x2 cvt.rp.satfinite.ue8m0x2.bf16x2"), target="sm_100a"),
    # conversions of integers
    *_many("int32", *(f"cvt.{r}.{t}.{s}" for t in ("f32", "f16", "bf16") for r in ROUNDINGS for s in ("s32", "u32"))),
    *_many("int64", *(f"cvt.{r}.{t}.{s}" for t in ("f32", "f64", "f16", "bf16") for r in ROUNDINGS
                      for s in ("s64", "u64"))),
    *_many("int16", *_spell("cvt.rn.f32.s16 cvt.rn.f16.u16 cvt.rn.bf16.s16 cvt.rn.f32.u8 cvt.rn.f32.s8 cvt.u32.u8 "
                            "cvt.s32.s8 cvt.s64.s16 cvt.sat.u8.s16 cvt.sat.s8.u16 cvt.u32.s16")),
    *_many("int32", *_spell("cvt.s64.s32 cvt.u64.u32 cvt.u16.u32 cvt.s8.s32 cvt.u8.u32 cvt.sat.s8.s32 cvt.sat.u8.s32 "
                            "cvt.sat.s16.s32 cvt.sat.u16.s32 cvt.sat.u32.s32 cvt.sat.s32.u32 cvt.u64.s32")),
    *_many("int64", *_spell("cvt.u32.u64 cvt.s32.s64 cvt.sat.s32.s64 cvt.sat.u32.s64 cvt.sat.u64.s64 cvt.u16.u64")),
    *_many("int32 two", "cvt.pack.sat.s16.s32", "cvt.pack.sat.u16.s32"),
    *_many("int32 three", *(f"cvt.pack.sat.{t}.s32.b32" for t in ("u8", "s8", "u4", "s4", "u2", "s2"))),
    # conversions of float64
    *_many("float64", *(f"cvt.{r}.f32.f64" for r in ROUNDINGS), "cvt.rn.f16.f64", "cvt.rn.bf16.f64",
           *(f"cvt.{r}.ftz.f32.f64" for r in ROUNDINGS)),
    *_many("float64", *(f"cvt.{r}.{t}.f64" for t in ("s32", "u32", "s64", "u64")
                        for r in ("rni", "rzi", "rmi", "rpi"))),
    *_many("float64", *_spell("cvt.rzi.s16.f64 cvt.rzi.u8.f64 cvt.rni.f64.f64 cvt.sat.f64.f64")),
]  # fmt: skip
