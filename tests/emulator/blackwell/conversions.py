"""Instructions on registers that are new with Blackwell, and ex2, on values that tell readings apart.

Whole sweeps of these instructions are in tests/emulator/sweeps.py.
"""

import ml_dtypes
import numpy as np

from cuda.emulator.errors import UnsupportedInstructionError
from tests.emulator.blackwell.probe import Probe, Question

_THREADS = 128
_SPECIAL = np.array([0.0, -0.0, np.nan, -np.nan, np.inf, -np.inf, 2.0**-140, -(2.0**-140)])


def _probe(
    name: str,
    inputs: tuple[np.ndarray, ...],
    apply: str,
    expected: np.ndarray,
    *,
    bound: np.ndarray | None = None,
    fault: type | None = None,
    alternatives: tuple[np.ndarray, ...] = (),
    target: str = "sm_100f",
) -> Probe:
    """One instruction on every thread; operand i is in %r<i> and %f<i>, or %q<i> if it has 64 bits."""
    result = np.zeros_like(expected if not alternatives else alternatives[0])
    loads = []
    for i, values in enumerate(inputs):
        wide = values.itemsize == 8
        register, bits = (f"%q{i}", 64) if wide else (f"%r{i}", 32)
        loads.append(f"ld.param.u64 %d0, [x{i}]; mul.wide.u32 %d1, %thread, {bits // 8}; add.u64 %d0, %d0, %d1;")
        loads.append(f"ld.global.b{bits} {register}, [%d0];" + ("" if wide else f" mov.b32 %f{i}, %r{i};"))
    bits = 8 * result.itemsize
    output = {16: "%h0", 32: "%r9", 64: "%q9"}[bits]
    parameters = ", ".join(f".param .u64 {n}" for n in [*(f"x{i}" for i in range(len(inputs))), "out"])
    newline = "\n"
    text = f"""
.version 8.8
.target {target}
.address_size 64
.visible .entry main({parameters})
.reqntid {_THREADS}, 1, 1
{{
.reg .b8 %b<4>; .reg .b16 %h0; .reg .b32 %r<16>, %thread; .reg .f32 %f<16>; .reg .b64 %d<4>, %q<16>;
mov.u32 %thread, %tid.x;
{newline.join(loads)}
{apply}
ld.param.u64 %d0, [out];
mul.wide.u32 %d1, %thread, {bits // 8};
add.u64 %d0, %d0, %d1;
st.global.b{bits} [%d0], {output};
ret;
}}
"""
    place = len(inputs)
    return Probe(
        name,
        text,
        (*inputs, result),
        {} if alternatives else {place: expected},
        shared_bytes=0,
        bounds={} if bound is None else {place: bound},
        fault=fault,
        alternatives={place: alternatives} if alternatives else {},
        target=target,
    )


def _floats(values: np.ndarray | list) -> np.ndarray:
    """Repeated to 128 float32."""
    return np.resize(np.asarray(values, np.float32), _THREADS)


def _e2m1(values: np.ndarray) -> np.ndarray:
    """Codes, to nearest even; NaN becomes +6 (ISA, cvt)."""
    codes = np.clip(values, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    return np.where(np.isnan(values), 7, codes)


# ---- small formats ----


def _to_e2m1() -> Probe:
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.5, 7.0, 1e30])
    near = np.concatenate([np.nextafter(np.float32(ties), np.float32(side)) for side in (0, 1e38)])
    a = _floats([*_SPECIAL, *ties, *-ties, *near, *-near])
    b = np.roll(a, 5)
    expected = (_e2m1(a).astype(np.uint32) << 4 | _e2m1(b)).astype(np.uint32)
    apply = "cvt.rn.satfinite.e2m1x2.f32 %b0, %f0, %f1; mov.b32 %r9, {%b0, %b0, %b0, %b0}; and.b32 %r9, %r9, 255;"
    return _probe("cvt.rn.satfinite.e2m1x2.f32", (a, b), apply, expected)


def _from_e2m1() -> Probe:
    codes = np.arange(_THREADS, dtype=np.uint32) * 2 + 1
    halves = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float16)
    values = halves.view(np.uint16).astype(np.uint32)
    expected = values[codes >> 4 & 15] << 16 | values[codes & 15]
    apply = "mov.b32 {%b1, %b2, %b3, %b0}, %r0; cvt.rn.f16x2.e2m1x2 %r9, %b1;"
    return _probe("cvt.rn.f16x2.e2m1x2", (codes,), apply, expected)


def _to_ue8m0() -> Probe:
    tiny = [2.0**-126, 2.0**-127, 2.0**-128, 1.25 * 2.0**-127]
    a = _floats([*_SPECIAL, *tiny, 1.0, 1.5, 2.0, 3e38, -1.0, -3e38, 0.7, 6.0])
    b = np.roll(a, 3)

    def code(x: np.ndarray) -> np.ndarray:
        with np.errstate(all="ignore"):
            exponent = np.ceil(np.log2(np.abs(x.astype(np.float64))))
        positive = np.clip(np.where(np.isfinite(exponent), exponent, -127), -127, 127)
        result = np.where(np.isinf(x), 254, positive + 127)
        return np.where(np.isnan(x), 255, result).astype(np.uint16)

    apply = "cvt.rp.satfinite.ue8m0x2.f32 %h0, %f0, %f1;"
    return _probe("cvt.rp.satfinite.ue8m0x2.f32", (a, b), apply, code(a) << 8 | code(b))


def _stochastic_bf16() -> Probe:
    """The carry out of the low half word plus random bits rounds away from zero."""
    rng = np.random.default_rng(1)
    a, b = (rng.integers(0x00800000, 0x7F000000, _THREADS, np.uint32) for _ in range(2))
    random = rng.integers(0, 1 << 32, _THREADS, np.uint32)
    expected = (a + (random >> 16)) & 0xFFFF0000 | (b + (random & 0xFFFF)) >> 16
    apply = "cvt.rs.bf16x2.f32 %r9, %f0, %f1, %r2;"
    return _probe("cvt.rs.bf16x2.f32", (a, b, random), apply, expected, target="sm_100a")


def _stochastic_e2m1() -> Probe:
    """Four codes; each is one of the two neighbours of the value."""
    rng = np.random.default_rng(2)
    values = [rng.uniform(0.0, 6.0, _THREADS).astype(np.float32) for _ in range(4)]
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    down = [np.searchsorted(grid, x, "right") - 1 for x in values]
    choices = []
    for pattern in range(16):
        codes = [np.minimum(low + (pattern >> i & 1), 7) for i, low in enumerate(down)]
        choices.append((codes[0] << 12 | codes[1] << 8 | codes[2] << 4 | codes[3]).astype(np.uint16))
    random = rng.integers(0, 1 << 32, _THREADS, np.uint32)
    return _probe(
        "cvt.rs.satfinite.e2m1x4.f32",
        (*values, random),
        "cvt.rs.satfinite.e2m1x4.f32 %h0, {%f0, %f1, %f2, %f3}, %r4;",
        choices[0],
        fault=UnsupportedInstructionError,
        alternatives=tuple(choices),
        target="sm_100a",
    )


# ---- float32 ----


def _ex2(name: str, x: np.ndarray, exact: bool) -> Probe:
    """Subnormal results become +0."""
    true = np.exp2(x.astype(np.float64))
    expected = np.where(true < 2.0**-126, 0.0, true).astype(np.float32)
    bound = None if exact else 2 * np.spacing(expected).astype(np.float64)
    apply = "ex2.approx.ftz.f32 %f9, %f0; mov.b32 %r9, %f9;"
    return _probe(f"ex2.approx.ftz.f32, {name}", (x,), apply, expected, bound=bound)


def _pair(opcode: str, function, count: int) -> Probe:
    """Two independent float32 in 64 bits, with sums and products that cancel, round and underflow."""
    rng = np.random.default_rng(3)
    operands = []
    for i in range(count):
        values = rng.normal(size=2 * _THREADS) * 2.0 ** rng.integers(-70, 70, 2 * _THREADS)
        values[: len(_SPECIAL)] = np.roll(_SPECIAL, i)
        operands.append(values.astype(np.float32))
    if count == 3:
        operands[2][64:128] = -(operands[0] * operands[1])[64:128]
    if ".ftz" in opcode:
        flushed = [np.where(np.abs(x) < np.float32(2.0**-126), np.copysign(np.float32(0), x), x) for x in operands]
    else:
        flushed = operands
    with np.errstate(all="ignore"):
        expected = function(*(x.astype(np.longdouble) for x in flushed)).astype(np.float32)
    if ".ftz" in opcode:
        expected = np.where(np.abs(expected) < np.float32(2.0**-126), np.copysign(np.float32(0), expected), expected)
    arguments = ", ".join(f"%q{i}" for i in range(count))
    inputs = tuple(x.view(np.uint64) for x in operands)
    probe = _probe(opcode, inputs, f"{opcode} %q9, {arguments};", expected.view(np.uint64))
    return _as_floats(probe, count, expected)


def _as_floats(probe: Probe, place: int, expected: np.ndarray) -> Probe:
    """The same with an array of float32 for its result, so that any NaN is as good as another."""
    arguments = (*probe.arguments[:place], np.zeros_like(expected))
    return Probe(probe.name, probe.ptx, arguments, {place: expected}, shared_bytes=0)


def _three(opcode: str) -> Probe:
    rng = np.random.default_rng(4)
    values = rng.choice([*_SPECIAL, 1.0, -1.0, 2.0, -3.0], (3, _THREADS)).astype(np.float32)
    largest, propagate, absolute = opcode.startswith("max"), ".NaN" in opcode, ".abs" in opcode
    taken = np.abs(values) if absolute else values
    # -0 is less than +0.
    order = np.where(taken == 0, np.copysign(2.0**-150, taken.astype(np.float64)), taken.astype(np.float64))
    order = np.where(np.isnan(order), -np.inf if largest else np.inf, order)
    index = order.argmax(axis=0) if largest else order.argmin(axis=0)
    expected = np.take_along_axis(taken, index[None], axis=0)[0]
    nan = np.isnan(values)
    none = np.where(nan, -np.inf if largest else np.inf, taken)
    expected = np.where(np.isnan(expected), none.max(axis=0) if largest else none.min(axis=0), expected)
    expected = np.where(nan.any(axis=0) if propagate else nan.all(axis=0), np.nan, expected).astype(np.float32)
    apply = f"{opcode} %f9, %f0, %f1, %f2; mov.b32 %r9, %f9;"
    return _probe(f"{opcode} of three", tuple(values), apply, expected)


_INTEGERS = _floats(np.arange(-126, 2))
_BETWEEN = np.random.default_rng(5).uniform(-30, 4, _THREADS).astype(np.float32)

QUESTIONS = (
    Question(
        "How does cvt round to E2M1?",
        "To nearest, ties to the even code; magnitudes above 6 become 6, NaN +6, and -0 keeps its sign. The first "
        "operand is in the upper nibble.",
        "ISA, cvt: satfinite turns NaN into the positive maximum.",
        "The reference's codes of ties and of NaN inputs.",
        (_to_e2m1(), _from_e2m1()),
    ),
    Question(
        "How does cvt round to UE8M0?",
        "Up to the next power of two of the magnitude; zero and what is smaller give code 0, infinity 254, NaN 255.",
        "ISA, cvt; the sign and the subnormal numbers are reading alone.",
        "Scale factors of MXFP4 at the ends of the range.",
        (_to_ue8m0(),),
    ),
    Question(
        "Which bits does stochastic rounding add?",
        "BF16: the upper half word of random bits to the low half word of the first operand, the lower one to that of "
        "the second; the carry rounds. E2M1: the emulator refuses; the hardware must give one of the two neighbours.",
        "ISA, cvt .rs; the figures for E2M1 were not seen.",
        "Nothing: the recipes hash their own random bits.",
        (_stochastic_bf16(), _stochastic_e2m1()),
    ),
    Question(
        "How exact is ex2.approx.ftz.f32?",
        "Powers of integers are exact, all others within 2 ulp of the exact value; the emulator rounds correctly.",
        "ISA, ex2 (2 ulp); that powers of integers are exact is reading alone.",
        "P of a row's maximum is 1 only if ex2(0) is; error bounds of P.",
        (_ex2("integers", _INTEGERS, True), _ex2("between", _BETWEEN, False)),
    ),
    Question(
        "How do the operations on pairs of float32 round?",
        "Each half as the scalar instruction: to nearest even, fma with one rounding, .ftz on operands and results.",
        "ISA, add, mul and fma of .f32x2.",
        "The sums and scalings of the softmax and correction warps, if they were to equal the reference bit for bit.",
        (
            _pair("add.rn.f32x2", lambda a, b: a + b, 2),
            _pair("mul.rn.f32x2", lambda a, b: a * b, 2),
            _pair("fma.rn.f32x2", lambda a, b, c: a * b + c, 3),
            _pair("fma.rn.ftz.f32x2", lambda a, b, c: a * b + c, 3),
        ),
    ),
    Question(
        "What do min and max of three operands return?",
        "The least or greatest number; NaN only if all are, or with .NaN if any is; -0 is less than +0; .abs takes "
        "magnitudes.",
        "ISA, min and max with three operands.",
        "The running maximum of a row whose scores hold NaN.",
        (_three("max.f32"), _three("min.f32"), _three("max.NaN.f32"), _three("max.abs.f32")),
    ),
)
