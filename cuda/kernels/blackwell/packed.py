"""Blackwell's instructions on pairs of float32, on three operands, and to and from E2M1."""

import cutlass
from cutlass.experimental import primitives
from kernels.words import Float32, Uint32

Int32 = cutlass.Int32

# Twice the values of the non-negative E2M1 codes, as bytes.
_LOW_VALUES, _HIGH_VALUES = 0x03020100, 0x0C080604


def _ptx(code: str, result: type, *operands: object) -> object:
    return primitives.inline_ptx(code, write_only_types=[result], read_only_args=list(operands))


def fused_pairs(values: list[Float32], factor: Float32, addend: Float32) -> list[Float32]:
    """``value * factor + addend`` of an even number of values, two in an instruction."""
    results: list[Float32] = []
    for i in range(0, len(values), 2):
        pair = (values[i], values[i + 1])
        results += primitives.fma_packed_f32x2(pair, (factor, factor), (addend, addend), rnd="rn")
    return results


def products_of_pairs(values: list[Float32], factor: Float32) -> list[Float32]:
    """``value * factor`` of an even number of values, two in an instruction."""
    results: list[Float32] = []
    for i in range(0, len(values), 2):
        results += primitives.mul_packed_f32x2((values[i], values[i + 1]), (factor, factor), rnd="rn")
    return results


def sum_of_all(values: list[Float32]) -> Float32:
    """The sum of a power of two of values, two in an instruction, of neighbours last."""
    while len(values) > 2:
        half = len(values) // 2
        sums: list[Float32] = []
        for i in range(0, half, 2):
            sums += primitives.add_packed_f32x2(
                (values[i], values[i + 1]), (values[half + i], values[half + i + 1]), rnd="rn"
            )
        values = sums
    return values[0] + values[1]


def highest(values: list[Float32]) -> Float32:
    """The maximum, or NaN if one is NaN, of an even number of values."""
    result = _ptx("max.NaN.f32 {$w0}, {$r0}, {$r1};", Float32, *values[:2])
    for i in range(2, len(values), 2):
        result = _ptx("max.NaN.f32 {$w0}, {$r0}, {$r1}, {$r2};", Float32, result, *values[i : i + 2])
    return result


def eight_e2m1(values: list[Float32]) -> Uint32:
    """Eight float32 as E2M1 codes, lowest first: nearest even, at most 6, 0 for negative ones."""
    converted = [f"cvt.rn.satfinite.relu.e2m1x2.f32 b{i}, {{$r{2 * i + 1}}}, {{$r{2 * i}}};" for i in range(4)]
    code = "{ .reg .b8 b0, b1, b2, b3; " + " ".join(converted) + " mov.b32 {$w0}, {b0, b1, b2, b3}; }"
    return _ptx(code, Uint32, *values)


def doubled_sum_of_e2m1(words: list[Uint32]) -> Int32:
    """Twice the sum of the values of the non-negative codes of up to ten words, whose sums by byte stay below 256."""
    parts = []
    for word in words:
        for codes in (word, word >> 16):
            lookup = f"{{ .reg .b32 l, h; mov.b32 l, {_LOW_VALUES:#x}; mov.b32 h, {_HIGH_VALUES:#x};"
            parts.append(_ptx(lookup + " prmt.b32 {$w0}, l, h, {$r0}; }", Uint32, codes))
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    code = "{ .reg .b32 o; mov.b32 o, 0x01010101; dp4a.u32.u32 {$w0}, {$r0}, o, 0; }"
    return _ptx(code, Int32, total)
