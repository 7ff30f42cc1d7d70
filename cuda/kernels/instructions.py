"""Single instructions on float32, and on words that hold two float16."""

import cutlass
from cutlass.experimental import primitives

Float32, Uint32, Int32 = cutlass.Float32, cutlass.Uint32, cutlass.Int32


def _ptx(code: str, result: type, *operands: object) -> object:
    return primitives.inline_ptx(code, write_only_types=[result], read_only_args=list(operands))


def fused(a: Float32, b: Float32, c: Float32) -> Float32:
    """``a * b + c``, rounded once."""
    return _ptx("fma.rn.f32 {$w0}, {$r0}, {$r1}, {$r2};", Float32, a, b, c)


def signed_square_plus(y: Float32, c: Float32) -> Float32:
    """``y * abs(y) + c``, rounded once."""
    return _ptx("{ .reg .f32 m; abs.f32 m, {$r0}; fma.rn.f32 {$w0}, {$r0}, m, {$r1}; }", Float32, y, c)


def exp2(x: Float32) -> Float32:
    """2**x by the hardware's table, 2 units in the last place; exact for whole numbers."""
    return _ptx("ex2.approx.ftz.f32 {$w0}, {$r0};", Float32, x)


def log2(x: Float32) -> Float32:
    """Base-2 logarithm of the hardware's table."""
    return _ptx("lg2.approx.ftz.f32 {$w0}, {$r0};", Float32, x)


def larger_or_nan(a: Float32, b: Float32) -> Float32:
    """Maximum, or NaN if one is NaN."""
    return _ptx("max.NaN.f32 {$w0}, {$r0}, {$r1};", Float32, a, b)


def smaller_or_nan(a: Float32, b: Float32) -> Float32:
    """Minimum, or NaN if one is NaN."""
    return _ptx("min.NaN.f32 {$w0}, {$r0}, {$r1};", Float32, a, b)


def sum_rounded_down(a: Float32, b: Float32) -> Float32:
    """Sum, rounded towards minus infinity."""
    return _ptx("add.rm.f32 {$w0}, {$r0}, {$r1};", Float32, a, b)


def truncated_pair(low: Float32, high: Float32) -> Uint32:
    """Two float32 cut to float16."""
    return _ptx("cvt.rz.f16x2.f32 {$w0}, {$r1}, {$r0};", Uint32, low, high)


def sum_clamped(a: Uint32, addend: Uint32, top: int) -> Uint32:
    """``a + addend`` of each half as a signed integer, kept between 0 and ``top``: one instruction on Hopper."""
    # The instructions take no immediate operands; the assembler folds the move.
    code = f"{{ .reg .b32 t, u; mov.b32 u, {top:#x}; add.s16x2 t, {{$r0}}, {{$r1}}; min.relu.s16x2 {{$w0}}, t, u; }}"
    return _ptx(code, Uint32, a, addend)


def product_of_halves(a: Uint32, b: Uint32) -> Uint32:
    """Product of each half in float16."""
    return _ptx("mul.rn.f16x2 {$w0}, {$r0}, {$r1};", Uint32, a, b)


def sum_of_halves(a: Uint32, b: Uint32) -> Uint32:
    """Sum of each half in float16."""
    return _ptx("add.rn.f16x2 {$w0}, {$r0}, {$r1};", Uint32, a, b)


def fused_halves(a: Uint32, b: Uint32, c: Uint32) -> Uint32:
    """``a * b + c`` of each half in float16, rounded once."""
    return _ptx("fma.rn.f16x2 {$w0}, {$r0}, {$r1}, {$r2};", Uint32, a, b, c)


def equal_halves(value: Float32) -> Uint32:
    """A float32, rounded to nearest even float16, in both halves."""
    return _ptx("cvt.rn.f16x2.f32 {$w0}, {$r0}, {$r0};", Uint32, value)


def values_of_halves(a: Uint32) -> tuple[Float32, Float32]:
    """The values of two float16, exactly."""
    return primitives.inline_ptx(
        "{ .reg .b16 l, h; mov.b32 {l, h}, {$r0}; cvt.f32.f16 {$w0}, l; cvt.f32.f16 {$w1}, h; }",
        write_only_types=[Float32, Float32],
        read_only_args=[a],
    )


def total_of_halves(a: Uint32) -> Float32:
    """The sum of the two halves, rounded to float16, as float32."""
    code = "{ .reg .b16 l, h; mov.b32 {l, h}, {$r0}; add.rn.f16 l, l, h; cvt.f32.f16 {$w0}, l; }"
    return _ptx(code, Float32, a)


def halves_of_e4m3(pair: Uint32) -> Uint32:
    """The values of the two E4M3 bytes in the low half as float16, exactly."""
    code = "{ .reg .b16 t; cvt.u16.u32 t, {$r0}; cvt.rn.f16x2.e4m3x2 {$w0}, t; }"
    return _ptx(code, Uint32, pair)


def four_e4m3(a: Float32, b: Float32, c: Float32, d: Float32) -> Uint32:
    """Four float32 as E4M3 bytes, lowest first: nearest even, saturating."""
    return _four_bytes("e4m3x2", a, b, c, d)


def four_e5m2(a: Float32, b: Float32, c: Float32, d: Float32) -> Uint32:
    """Four float32 as E5M2 bytes, lowest first: nearest even, saturating."""
    return _four_bytes("e5m2x2", a, b, c, d)


def _four_bytes(kind: str, *values: Float32) -> Uint32:
    low, high = (f"cvt.rn.satfinite.{kind}.f32 {name}, {{$r{i + 1}}}, {{$r{i}}};" for name, i in (("l", 0), ("h", 2)))
    return _ptx(f"{{ .reg .b16 l, h; {low} {high} mov.b32 {{$w0}}, {{l, h}}; }}", Uint32, *values)
