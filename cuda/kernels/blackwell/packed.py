"""Blackwell's instructions on pairs of float32, on three operands, and to and from E2M1."""

import cutlass
from cutlass.experimental import primitives
from kernels import code_maps
from kernels.words import Float32, Uint32

Int32 = cutlass.Int32

_CHAIN = 32
_DOUBLED_VALUES = (0x03020100, 0x0C080604)  # of the non-negative E2M1 codes, as bytes


def _ptx(code: str, result: type, *operands: object) -> object:
    return primitives.inline_ptx(code, write_only_types=[result], read_only_args=list(operands))


def fused_pairs(values: list[Float32], factor: Float32, addend: Float32) -> list[Float32]:
    """``value * factor + addend`` of an even number of values, two in an instruction."""
    results: list[Float32] = []
    for i in range(0, len(values), 2):
        pair = (values[i], values[i + 1])
        results += primitives.fma_packed_f32x2(pair, (factor, factor), (addend, addend), rnd="rn")
    return results


def signed_squares_plus(values: list[Float32], addend: Float32) -> list[Float32]:
    """``value * abs(value) + addend`` of an even number of values, two in an instruction, which takes magnitudes."""
    magnitudes = [_ptx("abs.f32 {$w0}, {$r0};", Float32, value) for value in values]
    results: list[Float32] = []
    for i in range(0, len(values), 2):
        pairs = (values[i], values[i + 1]), (magnitudes[i], magnitudes[i + 1])
        results += primitives.fma_packed_f32x2(*pairs, (addend, addend), rnd="rn")
    return results


ARITHMETIC = code_maps.Arithmetic(fused_pairs, signed_squares_plus)


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
    """The maximum, or NaN if one is NaN, of an even number of values; each 32 are a chain of their own."""
    if len(values) > _CHAIN:
        return highest([highest(values[i : i + _CHAIN]) for i in range(0, len(values), _CHAIN)])
    result = _ptx("max.NaN.f32 {$w0}, {$r0}, {$r1};", Float32, *values[:2])
    for i in range(2, len(values), 2):
        result = _ptx("max.NaN.f32 {$w0}, {$r0}, {$r1}, {$r2};", Float32, result, *values[i : i + 2])
    return result


def eight_e2m1(values: list[Float32]) -> Uint32:
    """Eight float32 as E2M1 codes, lowest first: nearest even, at most 6, 0 for negative ones."""
    converted = [f"cvt.rn.satfinite.relu.e2m1x2.f32 b{i}, {{$r{2 * i + 1}}}, {{$r{2 * i}}};" for i in range(4)]
    code = "{ .reg .b8 b0, b1, b2, b3; " + " ".join(converted) + " mov.b32 {$w0}, {b0, b1, b2, b3}; }"
    return _ptx(code, Uint32, *values)


def tables_of_e2m1(row: Int32) -> list[Uint32]:
    """Twice the values of the non-negative codes, as bytes, in registers of each thread.

    The assembler would keep constants in registers that all threads share, and move them for every look-up. That the
    number of a row is never negative it does not know.
    """
    zero = Uint32(row) >> 31
    return [Uint32(table) | zero for table in _DOUBLED_VALUES]


def doubled_sum_of_e2m1(words: list[Uint32], tables: list[Uint32]) -> Int32:
    """Twice the sum of the values of the non-negative codes of up to ten words, whose sums by byte stay below 256."""
    parts = []
    for word in words:
        for codes in (word, word >> 16):
            parts.append(_ptx("prmt.b32 {$w0}, {$r1}, {$r2}, {$r0};", Uint32, codes, *tables))
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    code = "{ .reg .b32 o; mov.b32 o, 0x01010101; dp4a.u32.u32 {$w0}, {$r0}, o, 0; }"
    return _ptx(code, Int32, total)
