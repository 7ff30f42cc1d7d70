"""Instructions on 32-bit words that hold two bfloat16 or two 16-bit integers, the first in the low half."""

import cutlass
from cutlass.cutlass_dsl import select_
from cutlass.experimental import primitives

Uint8, Uint16, Uint32 = cutlass.Uint8, cutlass.Uint16, cutlass.Uint32
Float32 = cutlass.Float32

MAGNITUDES = 0x7FFF7FFF


def _ptx(code: str, result: type, *operands: object) -> object:
    return primitives.inline_ptx(code, write_only_types=[result], read_only_args=list(operands))


def larger_of_pairs(a: Uint32, b: Uint32) -> Uint32:
    """Maximum of each half as an unsigned integer; the order of magnitudes of bfloat16, with NaN above infinity."""
    return _ptx("max.u16x2 {$w0}, {$r0}, {$r1};", Uint32, a, b)


def at_least(a: Uint32, b: Uint32) -> Uint32:
    """0xFFFF in each half where the bfloat16 of ``a`` is at least that of ``b``, else 0."""
    # The instruction takes no immediate operand.
    return _ptx("{ .reg .b32 t; mov.b32 t, {$r1}; set.ge.u32.bf16x2 {$w0}, {$r0}, t; }", Uint32, a, b)


def product_of_pairs(a: Uint32, b: Uint32) -> Uint32:
    """Product of each half in bfloat16, rounded to nearest even."""
    return _ptx("mul.rn.bf16x2 {$w0}, {$r0}, {$r1};", Uint32, a, b)


def bytes_of(a: Uint32, b: Uint32, selector: int | Uint32) -> Uint32:
    """Picks four of the eight bytes of ``b:a``; the lowest nibble of the selector picks the lowest byte."""
    if isinstance(selector, int):
        return _ptx(f"prmt.b32 {{$w0}}, {{$r0}}, {{$r1}}, {selector:#x};", Uint32, a, b)
    return _ptx("prmt.b32 {$w0}, {$r0}, {$r1}, {$r2};", Uint32, a, b, selector)


def view(pointer: cutlass.Pointer, dtype: type) -> cutlass.Pointer:
    """The pointer with another element type, in which it is counted."""
    return cutlass.Pointer(pointer, dtype=dtype)


def words_at(array: cutlass.Array, index: cutlass.Int32, count: int) -> cutlass.Vector:
    """Consecutive words of shared memory, aligned to their size."""
    return view(array.data_ptr(index), Uint32).load(count=count, alignment=4 * count)


def when(condition: cutlass.Boolean, a: cutlass.Numeric, b: cutlass.Numeric) -> cutlass.Numeric:
    """``a`` where the condition holds and ``b`` elsewhere, of which both are computed."""
    return type(a)(select_(condition, a, b))


def multiply_add(a: Uint32, b: Uint32, c: Uint32) -> Uint32:
    """``a * b + c``, modulo 2**32."""
    return _ptx("mad.lo.u32 {$w0}, {$r0}, {$r1}, {$r2};", Uint32, a, b, c)


def choose(mask: Uint32, a: Uint32, b: Uint32) -> Uint32:
    """Bits of ``a`` where the mask is set and of ``b`` elsewhere."""
    return _ptx("lop3.b32 {$w0}, {$r0}, {$r1}, {$r2}, 0xCA;", Uint32, mask, a, b)


def low_value(pair: Uint32) -> Float32:
    """The first of a pair of bfloat16."""
    return as_float(pair << 16)


def high_value(pair: Uint32) -> Float32:
    """The second of a pair of bfloat16."""
    return as_float(pair & Uint32(0xFFFF0000))


def larger(a: Float32, b: Float32) -> Float32:
    """Maximum of two numbers."""
    return _ptx("max.f32 {$w0}, {$r0}, {$r1};", Float32, a, b)


def smaller(a: Float32, b: Float32) -> Float32:
    """Minimum of two numbers."""
    return _ptx("min.f32 {$w0}, {$r0}, {$r1};", Float32, a, b)


def rounded_product(a: Float32, b: Float32) -> Float32:
    """A product that is never contracted into an addition."""
    return _ptx("mul.rn.f32 {$w0}, {$r0}, {$r1};", Float32, a, b)


def reciprocal(a: Float32) -> Float32:
    """The reciprocal, to one unit in the last place."""
    return _ptx("rcp.approx.ftz.f32 {$w0}, {$r0};", Float32, a)


def as_float(bits: Uint32) -> Float32:
    """The float32 with these bits."""
    return _ptx("mov.b32 {$w0}, {$r0};", Float32, bits)


def as_bits(value: Float32) -> Uint32:
    """The bits of a float32."""
    return _ptx("mov.b32 {$w0}, {$r0};", Uint32, value)


def pair_of(low: Float32, high: Float32) -> Uint32:
    """Two float32, rounded to nearest even bfloat16."""
    return _ptx("cvt.rn.bf16x2.f32 {$w0}, {$r1}, {$r0};", Uint32, low, high)


def to_e4m3(low: Float32, high: Float32) -> Uint32:
    """Two float32 as E4M3 bytes in the low half: nearest even, saturating, 0x7F for NaN."""
    return _to_bytes("e4m3x2", low, high)


def to_e5m2(low: Float32, high: Float32) -> Uint32:
    """Two float32 as E5M2 bytes in the low half: nearest even, saturating, 0x7F for NaN."""
    return _to_bytes("e5m2x2", low, high)


def _to_bytes(kind: str, low: Float32, high: Float32) -> Uint32:
    convert = f"cvt.rn.satfinite.{kind}.f32 t, {{$r1}}, {{$r0}};"
    return _ptx(f"{{ .reg .b16 t; {convert} cvt.u32.u16 {{$w0}}, t; }}", Uint32, low, high)


def from_e4m3(code: Uint32) -> Float32:
    """The value of an E4M3 byte, exactly."""
    halves = "cvt.u16.u32 c, {$r0}; cvt.rn.f16x2.e4m3x2 p, c; mov.b32 {h, t}, p; cvt.f32.f16 {$w0}, h;"
    return _ptx("{ .reg .b16 c, h, t; .reg .b32 p; " + halves + " }", Float32, code)


def from_e5m2(pair: Uint32) -> tuple[Float32, Float32]:
    """The values of two E5M2 bytes in the low half, exactly."""
    halves = "cvt.u16.u32 c, {$r0}; cvt.rn.f16x2.e5m2x2 p, c; mov.b32 {l, h}, p;"
    return primitives.inline_ptx(
        "{ .reg .b16 c, l, h; .reg .b32 p; " + halves + " cvt.f32.f16 {$w0}, l; cvt.f32.f16 {$w1}, h; }",
        write_only_types=[Float32, Float32],
        read_only_args=[pair],
    )


def load_if(condition: cutlass.Boolean, source: cutlass.Pointer, words: int) -> list[Uint32]:
    """Words at an aligned address that no kernel writes to, or zeros, without access, where the condition fails."""
    results = ", ".join(f"{{$w{i}}}" for i in range(words))
    zeros = " ".join(f"mov.b32 {{$w{i}}}, 0;" for i in range(words))
    load = (
        f"ld.global.nc.v{words}.b32 {{{results}}}, [{{$r0}}];"
        if words > 1
        else f"ld.global.nc.b32 {results}, [{{$r0}}];"
    )
    loaded = primitives.inline_ptx(
        "{ .reg .pred p; setp.ne.b32 p, {$r1}, 0; " + zeros + " @p " + load + " }",
        write_only_types=[Uint32] * words,
        read_only_args=[source, cutlass.Int32(condition)],
    )
    return list(loaded) if words > 1 else [loaded]
