"""tcgen05.mma on operands laid out byte by byte, against NumPy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from cuda.emulator.errors import DescriptorFaultError, MemoryFaultError, UnsupportedInstructionError
from tests.emulator.instructions.bench import Bench, run_handler
from tests.emulator.tensor_core import layouts

_A, _B = 2048, 40960  # shared addresses
_K_MAJOR = {"none": (4096, 128), "32B": (0, 256), "64B": (0, 512), "128B": (0, 1024)}
_SIZES = {"tf32": 4, "bf16": 2, "f16": 2}


@dataclass
class Operand:
    """An operand in the shared memory of one or two CTAs.

    Attributes:
      values: (rows, K) of all CTAs.
      descriptor: of the matrix.
    """

    values: np.ndarray
    descriptor: int


def _place(
    bench: Bench, rng, element: str, rows: int, k: int, start: int, mode: str, transposed=False, packed=False
) -> Operand:
    """Random codes in shared memory, the rows divided among the CTAs."""
    codes = layouts.random_codes(rng, (rows, k), element)
    size = _SIZES.get(element, 1)
    own = rows // len(bench.ctas)
    leading, stride = _K_MAJOR.get(mode, (0, 0))
    if transposed:
        span = {"none": 16, "32B": 32, "64B": 64}.get(mode, 128)
        blocks, period = own * size // span, 4 if mode == "128B/32B" else 8
        # Blocks of M or N are next to each other, and groups of K behind all of them.
        near, far = span * period, span * period * max(1, blocks)
        leading, stride = (far, near) if mode == "none" else (near, far)
    for cta in range(len(bench.ctas)):
        part = codes[cta * own : cta * own + own]
        if transposed:
            addresses = layouts.mn_major(own, k, size, mode, start, leading, stride)
            bench.fill_shared(addresses, layouts.packed(part.T, element), cta)
        else:
            data = layouts.packed(part, element, dense=packed)
            bench.fill_shared(layouts.k_major(own, data.shape[1], mode, start, leading, stride), data, cta)
    return Operand(layouts.decoded(codes, element), layouts.matrix_descriptor(mode, start, leading, stride))


def _result(bench: Bench, columns: int, cta: int = 0) -> np.ndarray:
    """(128 lanes, columns) float32 of D at column 0."""
    return bench.ctas[cta].tensor.data[:columns].T.view(np.float32)


def _random_d(bench: Bench, rng, columns: int) -> list[np.ndarray]:
    """D at column 0 of each CTA, as (128, columns) float32."""
    everything = []
    for cta in range(len(bench.ctas)):
        values = (rng.integers(-99, 99, (128, columns)) / 8).astype(np.float32)
        bench.fill_tensor(0, np.ascontiguousarray(values.T).view(np.uint32), cta)
        everything.append(values)
    return everything


def _form(kind: str, ctas: int = 1, a: str = "%d1", more: str = "") -> str:
    return f"tcgen05.mma.cta_group::{ctas}.kind::{kind} [%r1], {a}, %d2, %r2, {more}%p1;"


_ELEMENTS = {"f16": ["f16", "bf16"], "tf32": ["tf32"], "f8f6f4": ["e4m3", "e5m2", "e2m3", "e3m2", "e2m1"]}
_KINDS = [
    (kind, a, b)
    for kind, elements in _ELEMENTS.items()
    for a, b in zip(elements, elements[1:] + elements[:1], strict=True)
]
_KINDS += [("f16", "bf16", "bf16"), ("f8f6f4", "e4m3", "e2m1")]


@pytest.mark.parametrize(("kind", "a", "b"), _KINDS)
@pytest.mark.parametrize("transpose", [(0, 0), (1, 0), (0, 1), (1, 1)])
def test_kinds_and_majors(kind: str, a: str, b: str, transpose: tuple[int, int]) -> None:
    rng, bench = np.random.default_rng(11), Bench()
    k = 32 // _SIZES.get(a, 1)
    left = _place(bench, rng, a, 128, k, _A, "128B", bool(transpose[0]))
    right = _place(bench, rng, b, 64, k, _B, "64B", bool(transpose[1]))
    (d,) = _random_d(bench, rng, 64)
    fields = layouts.FORMAT_FIELDS
    bits = layouts.instruction_descriptor(128, 64, fields[a], fields[b], transpose=transpose)
    bench.one(_form(kind), 0, left.descriptor, right.descriptor, bits, True)
    expected = (left.values @ right.values.T + d).astype(np.float32)
    np.testing.assert_array_equal(_result(bench, 64), expected)
    assert not bench.findings


_MODES = [(mode, transposed) for mode in _K_MAJOR for transposed in (False, True)]


@pytest.mark.parametrize(("mode", "transposed"), [*_MODES, ("128B/32B", True)])
def test_swizzles(mode: str, transposed: bool) -> None:
    rng, bench = np.random.default_rng(12), Bench()
    left = _place(bench, rng, "tf32", 128, 8, _A, mode, transposed)
    right = _place(bench, rng, "tf32", 32, 8, _B, mode, transposed)
    _random_d(bench, rng, 32)
    bits = layouts.instruction_descriptor(128, 32, 2, 2, transpose=(transposed, transposed))
    bench.one(_form("tf32"), 0, left.descriptor, right.descriptor, bits, False)
    np.testing.assert_array_equal(_result(bench, 32), (left.values @ right.values.T).astype(np.float32))


@pytest.mark.parametrize("lane", [0, 16])
def test_64_rows_in_half_quadrants(lane: int) -> None:
    rng, bench = np.random.default_rng(13), Bench()
    left = _place(bench, rng, "bf16", 64, 16, _A, "128B")
    right = _place(bench, rng, "bf16", 24, 16, _B, "128B")
    (d,) = _random_d(bench, rng, 24)
    before = d.copy()
    bits = layouts.instruction_descriptor(64, 24, 1, 1)
    bench.one(_form("f16"), lane << 16, left.descriptor, right.descriptor, bits, True)
    product = left.values @ right.values.T
    for row in range(64):
        before[row // 16 * 32 + lane + row % 16] += product[row].astype(np.float32)
    np.testing.assert_array_equal(_result(bench, 24), before)


@pytest.mark.parametrize("m", [64, 128])
@pytest.mark.parametrize(
    ("kind", "element"), [("f16", "bf16"), ("tf32", "tf32"), ("f8f6f4", "e4m3"), ("f8f6f4", "e2m1"), ("f8f6f4", "e3m2")]
)
def test_a_in_tensor_memory(m: int, kind: str, element: str) -> None:
    rng, bench = np.random.default_rng(14), Bench()
    k = 32 // _SIZES.get(element, 1)
    right = _place(bench, rng, element, 16, k, _B, "32B")
    codes = layouts.random_codes(rng, (m, k), element)
    if element == "e2m1":
        raw = (codes << 2).astype(np.uint8)
    else:
        raw = codes.astype(f"u{_SIZES.get(element, 1)}").view(np.uint8)
    words = np.zeros((8, 128), np.uint32)
    rows = np.arange(m)
    words[:, rows if m == 128 else rows // 16 * 32 + 16 + rows % 16] = raw.view(np.uint32).T
    _random_d(bench, rng, 16)
    bench.fill_tensor(100, words)
    bits = layouts.instruction_descriptor(m, 16, layouts.FORMAT_FIELDS[element], layouts.FORMAT_FIELDS[element])
    a = 100 if m == 128 else 16 << 16 | 100
    bench.one(_form(kind, a="[%r3]"), 0, a, right.descriptor, bits, False)
    expected = (layouts.decoded(codes, element) @ right.values.T).astype(np.float32)
    result = _result(bench, 16)
    np.testing.assert_array_equal(result if m == 128 else result[rows // 16 * 32 + rows % 16], expected)


def test_negation_scaled_accumulators_and_collectors() -> None:
    rng, bench = np.random.default_rng(15), Bench()
    left, right = (_place(bench, rng, "f16", n, 16, at, "32B") for n, at in ((128, _A), (16, _B)))
    (d,) = _random_d(bench, rng, 16)
    bits = layouts.instruction_descriptor(128, 16, 0, 0, negate=(0, 1))
    text = "tcgen05.mma.cta_group::1.kind::f16.collector::a::discard [%r1], %d1, %d2, %r2, %p1, 3;"
    bench.one(text, 0, left.descriptor, right.descriptor, bits, True)
    expected = (d / 8.0 - left.values @ right.values.T).astype(np.float32)
    np.testing.assert_array_equal(_result(bench, 16), expected)


def test_float16_accumulators() -> None:
    rng, bench = np.random.default_rng(16), Bench()
    left, right = (_place(bench, rng, "f16", n, 16, at, "32B") for n, at in ((128, _A), (16, _B)))
    old = rng.standard_normal((16, 128)).astype(np.float16)
    bench.fill_tensor(0, old.view(np.uint16).astype(np.uint32) | 0xFFFF0000)
    bits = layouts.instruction_descriptor(128, 16, 0, 0, d=0)
    bench.one(_form("f16"), 0, left.descriptor, right.descriptor, bits, True)
    expected = ((left.values @ right.values.T).T + old).astype(np.float16)
    np.testing.assert_array_equal(bench.ctas[0].tensor.data[:16], expected.view(np.uint16))


@pytest.mark.parametrize("saturate", [0, 1])
def test_integers(saturate: int) -> None:
    rng, bench = np.random.default_rng(17), Bench()
    left = _place(bench, rng, "s8", 128, 32, _A, "32B")
    right = _place(bench, rng, "u8", 16, 32, _B, "32B")
    old = rng.integers(-(2**31), 2**31, (16, 128))
    bench.fill_tensor(0, old.astype(np.int32).view(np.uint32))
    bits = layouts.instruction_descriptor(128, 16, 1, 0, d=2) | saturate << 3
    bench.one(_form("i8"), 0, left.descriptor, right.descriptor, bits, True)
    total = (left.values @ right.values.T).T.astype(np.int64) + old
    expected = np.clip(total, -(2**31), 2**31 - 1) if saturate else total
    np.testing.assert_array_equal(bench.ctas[0].tensor.data[:16], expected.astype(np.uint32))


@pytest.mark.parametrize("ctas", [1, 2])
def test_disabled_lanes_keep_their_values(ctas: int) -> None:
    rng, bench = np.random.default_rng(18), Bench(ctas)
    left = _place(bench, rng, "bf16", 128 * ctas, 16, _A, "32B")
    right = _place(bench, rng, "bf16", 16 * ctas, 16, _B, "32B")
    before = _random_d(bench, rng, 16 * ctas)
    words = rng.integers(0, 1 << 32, 4 * ctas)
    bits = layouts.instruction_descriptor(128 * ctas, 16 * ctas, 1, 1)
    masks = "{" + ", ".join(f"%r{i}" for i in range(10, 10 + 4 * ctas)) + "}, "
    bench.one(_form("f16", ctas, more=masks), 0, left.descriptor, right.descriptor, bits, True, *words.tolist())
    expected = np.concatenate(before) + left.values @ right.values.T
    for lane in range(128 * ctas):
        if words[lane // 32] >> lane % 32 & 1:
            expected[lane] = np.concatenate(before)[lane]
    result = np.concatenate([_result(bench, 16 * ctas, cta) for cta in range(ctas)])
    np.testing.assert_array_equal(result, expected.astype(np.float32))


def test_disabled_lanes_need_not_be_written() -> None:
    rng, bench = np.random.default_rng(19), Bench()
    left, right = (_place(bench, rng, "bf16", n, 16, at, "32B") for n, at in ((128, _A), (16, _B)))
    (d,) = _random_d(bench, rng, 16)
    bench.ctas[0].tensor.written[:, 5] = False
    bits = layouts.instruction_descriptor(128, 16, 1, 1)
    values = (0, left.descriptor, right.descriptor, bits, True)
    with pytest.raises(MemoryFaultError, match="lane 5, which was never written"):
        bench.one(_form("f16"), *values)
    bench.one(_form("f16", more="{%r10, %r11, %r12, %r13}, "), *values, 1 << 5, 0, 0, 0)
    np.testing.assert_array_equal(_result(bench, 16)[6], (d + left.values @ right.values.T).astype(np.float32)[6])


def test_a_pair_of_ctas_with_256_rows() -> None:
    rng, bench = np.random.default_rng(20), Bench(2)
    left = _place(bench, rng, "e4m3", 256, 32, _A, "128B")
    right = _place(bench, rng, "e5m2", 96, 32, _B, "128B")
    before = _random_d(bench, rng, 96)
    bits = layouts.instruction_descriptor(256, 96, 0, 1)
    bench.one(_form("f8f6f4", 2), 0, left.descriptor, right.descriptor, bits, True)
    expected = (np.concatenate(before) + left.values @ right.values.T).astype(np.float32)
    np.testing.assert_array_equal(np.concatenate([_result(bench, 96, cta) for cta in (0, 1)]), expected)


@pytest.mark.parametrize("in_tensor_memory", [False, True])
def test_a_pair_of_ctas_with_128_rows(in_tensor_memory: bool) -> None:
    rng, bench = np.random.default_rng(21), Bench(2)
    left = _place(bench, rng, "bf16", 128, 16, _A, "128B")
    right = _place(bench, rng, "bf16", 64, 16, _B, "128B")
    _random_d(bench, rng, 32)
    bits = layouts.instruction_descriptor(128, 64, 1, 1)
    if in_tensor_memory:
        for cta in (0, 1):
            rows = left.values[64 * cta : 64 * cta + 64].astype(layouts.TYPES["bf16"]).view(np.uint32)
            bench.fill_tensor(200, np.concatenate([rows, rows]).T, cta)
        bench.one(_form("f16", 2, a="[%r3]"), 0, 200, right.descriptor, bits, False)
    else:
        bench.one(_form("f16", 2), 0, left.descriptor, right.descriptor, bits, False)
    product = left.values @ right.values.T
    for cta in (0, 1):
        rows = product[64 * cta : 64 * cta + 64]
        folded = np.concatenate([rows[:, :32], rows[:, 32:]]).astype(np.float32)
        np.testing.assert_array_equal(_result(bench, 32, cta), folded)


def test_ashift_moves_the_rows_of_each_quadrant() -> None:
    rng, bench = np.random.default_rng(22), Bench()
    right = _place(bench, rng, "tf32", 16, 8, _B, "32B")
    _random_d(bench, rng, 16)
    a = rng.integers(-8, 8, (128, 8)).astype(np.float32)
    bench.fill_tensor(64, np.ascontiguousarray(a.T).view(np.uint32))
    bits = layouts.instruction_descriptor(128, 16, 2, 2)
    text = "tcgen05.mma.cta_group::1.kind::tf32.ashift [%r1], [%r3], %d2, %r2, %p1;"
    bench.one(text, 0, 64, right.descriptor, bits, False)
    np.testing.assert_array_equal(_result(bench, 16), (a @ right.values.T).astype(np.float32))
    moved = a.copy()
    for row in range(128):
        if row % 32 != 31:
            moved[row] = a[row + 1]
    np.testing.assert_array_equal(bench.ctas[0].tensor.data[64:72].T.view(np.float32), moved)


_SCALED = [
    ("mxf8f6f4", "scale_vec::1X", 32, 32, "ue8m0"),
    ("mxf8f6f4", "block32", 32, 32, "ue8m0"),
    ("mxf4", "scale_vec::2X", 64, 32, "ue8m0"),
    ("mxf4", "block32", 64, 32, "ue8m0"),
    ("mxf4nvf4", "scale_vec::2X", 64, 32, "ue8m0"),
    ("mxf4nvf4", "scale_vec::4X", 64, 16, "ue4m3"),
    ("mxf4nvf4", "block16", 64, 16, "ue4m3"),
    ("mxf4nvf4", "block16", 64, 16, "ue8m0"),
]


def _scale_codes(rng, rows: int, factors: int, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Codes and values, all rows and factors different from their neighbours."""
    low, high = (0x30, 0x48) if kind == "ue4m3" else (120, 134)
    codes = rng.integers(low, high, (rows, factors))
    return codes, codes.astype(np.uint8).view(layouts.SCALES[kind]).astype(np.float64)


def _scaled_text(kind: str, vector: str, ctas: int = 1, a: str = "%d1") -> str:
    return f"tcgen05.mma.cta_group::{ctas}.kind::{kind}.block_scale.{vector} [%r1], {a}, %d2, %r2, [%r3], [%r4], %p1;"


def _scaled(values: np.ndarray, scales: np.ndarray, block: int) -> np.ndarray:
    return values * np.repeat(scales, block, axis=1)


@pytest.mark.parametrize(("kind", "vector", "k", "block", "scale"), _SCALED)
@pytest.mark.parametrize("n", [24, 64, 256])
def test_block_scaled_kinds(kind: str, vector: str, k: int, block: int, scale: str, n: int) -> None:
    rng, bench = np.random.default_rng(30), Bench()
    packed = k == 64
    formats = ("e2m1", "e2m1") if packed else ("e4m3", "e3m2")
    left = _place(bench, rng, formats[0], 128, k, _A, "64B", packed=packed)
    right = _place(bench, rng, formats[1], n, k, _B, "32B", packed=packed)
    (d,) = _random_d(bench, rng, n)
    factors = k // block
    steps = 4 // factors
    ids = (int(rng.integers(steps)) * factors, int(rng.integers(steps)) * factors)
    words = np.zeros((512, 128), np.uint32)
    scales = []
    for column, rows, first in ((300, 128, ids[0]), (310, n, ids[1])):
        codes, values = _scale_codes(rng, rows, factors, scale)
        layouts.place_scales(words, column, codes, first)
        scales.append(values)
    bench.fill_tensor(300, words[300:320])
    fields = (1, 1) if packed else (layouts.FORMAT_FIELDS["e4m3"], layouts.FORMAT_FIELDS["e3m2"])
    bits = layouts.scaled_descriptor(128, n, *fields, scale=scale, ids=ids)
    # Compilers leave the scale factor id in the top bits of the address.
    addresses = (300 | ids[0] << 30, 310 | ids[1] << 30)
    bench.one(_scaled_text(kind, vector), 0, left.descriptor, right.descriptor, bits, *addresses, True)
    product = _scaled(left.values, scales[0], block) @ _scaled(right.values, scales[1], block).T
    np.testing.assert_array_equal(_result(bench, n), (product + d).astype(np.float32))


@pytest.mark.parametrize(
    ("vector", "block", "scale", "ids"), [("block16", 16, "ue4m3", (2, 0)), ("block32", 32, "ue8m0", (3, 1))]
)
@pytest.mark.parametrize("ctas", [1, 2])
def test_96_elements_of_k(vector: str, block: int, scale: str, ids: tuple[int, int], ctas: int) -> None:
    rng, bench = np.random.default_rng(31), Bench(ctas)
    # 48 bytes a row that start at byte 96 of a row of 128, and go on in another buffer.
    values, descriptors = [], []
    for rows, start in ((128 * ctas, 2048), (64 * ctas, 36864)):
        codes = rng.integers(0, 16, (rows, 96))
        own = rows // ctas
        first = layouts.k_major(own, 128, "128B", start, 0, 1024)[:, 96:]
        second = layouts.k_major(own, 128, "128B", start + 16384, 0, 1024)[:, :16]
        for cta in range(ctas):
            data = layouts.packed(codes[cta * own : cta * own + own], "e2m1", dense=True)
            bench.fill_shared(np.concatenate([first, second], axis=1), data, cta)
        values.append(layouts.decoded(codes, "e2m1"))
        descriptors.append(layouts.matrix_descriptor("128B", start + 96, start + 16384, 1024, absolute=True))
    factors = 96 // block
    scales = [_scale_codes(rng, rows, factors, scale) for rows in (128 * ctas, 64 * ctas)]
    _random_d(bench, rng, 64 * ctas)
    for cta in range(ctas):
        words = np.zeros((512, 128), np.uint32)
        layouts.place_scales(words, 200, scales[0][0][128 * cta : 128 * cta + 128], ids[0])
        layouts.place_scales(words, 220, scales[1][0], ids[1])
        bench.fill_tensor(200, words[200:240], cta)
    bits = layouts.scaled_descriptor(128 * ctas, 64 * ctas, 1, 1, scale=scale, ids=ids, k96=1)
    bench.one(_scaled_text("mxf4nvf4", vector, ctas), 0, *descriptors, bits, 200, 220, False)
    product = _scaled(values[0], scales[0][1], block) @ _scaled(values[1], scales[1][1], block).T
    result = np.concatenate([_result(bench, 64 * ctas, cta) for cta in range(ctas)])
    np.testing.assert_array_equal(result, product.astype(np.float32))


def test_block_scaled_a_in_tensor_memory_with_scales_of_its_own_quadrants() -> None:
    rng, bench = np.random.default_rng(32), Bench()
    right = _place(bench, rng, "e2m1", 32, 64, _B, "32B", packed=True)
    codes = rng.integers(0, 16, (128, 64))
    _random_d(bench, rng, 32)
    bench.fill_tensor(100, layouts.packed(codes, "e2m1", dense=True).view(np.uint32).T)
    words = np.zeros((512, 128), np.uint32)
    a_codes, a_scales = _scale_codes(rng, 128, 4, "ue4m3")
    b_codes, b_scales = _scale_codes(rng, 32, 4, "ue4m3")
    # Warp w stores the scale factors of its rows in column w of its own quadrant.
    for quadrant in range(4):
        image = np.zeros((512, 128), np.uint32)
        layouts.place_scales(image, 120, a_codes, 0, quadrants=(quadrant,))
        words[120 + quadrant, 32 * quadrant : 32 * quadrant + 32] = image[
            120 + quadrant, 32 * quadrant : 32 * quadrant + 32
        ]
    layouts.place_scales(words, 130, b_codes, 0)
    bench.fill_tensor(120, words[120:132])
    bits = layouts.scaled_descriptor(128, 32, 1, 1, scale="ue4m3")
    bench.one(_scaled_text("mxf4nvf4", "block16", a="[%r5]"), 0, 100, right.descriptor, bits, 120, 130, False)
    product = _scaled(layouts.decoded(codes, "e2m1"), a_scales, 16) @ _scaled(right.values, b_scales, 16).T
    np.testing.assert_array_equal(_result(bench, 32), product.astype(np.float32))
    (shown,) = bench.shown
    assert (shown.cta, shown.kind, shown.column, shown.accumulates) == ((0, 0, 0), "mxf4nvf4", 0, False)
    np.testing.assert_array_equal(shown.a, layouts.decoded(codes, "e2m1"))
    np.testing.assert_array_equal(shown.a_scales, a_scales)
    np.testing.assert_array_equal(shown.d.view(np.float32), product.T.astype(np.float32))


@pytest.mark.parametrize("m", [128, 256])
def test_block_scaled_pairs(m: int) -> None:
    rng, bench = np.random.default_rng(33), Bench(2)
    n, own = 128, m // 2
    left = _place(bench, rng, "e2m1", m, 64, _A, "128B", packed=True)
    right = _place(bench, rng, "e2m1", n, 64, _B, "128B", packed=True)
    _random_d(bench, rng, n)
    a_codes, a_scales = _scale_codes(rng, m, 4, "ue4m3")
    b_codes, b_scales = _scale_codes(rng, n, 4, "ue4m3")
    for cta in (0, 1):
        words = np.zeros((512, 128), np.uint32)
        layouts.place_scales(words, 200, a_codes[own * cta : own * cta + own], 0)
        if m == 256:
            layouts.place_scales(words, 220, b_codes, 0)
        else:
            layouts.place_scales(words, 220, b_codes[:64], 0, quadrants=(0, 1))
            layouts.place_scales(words, 220, b_codes[64:], 0, quadrants=(2, 3))
        bench.fill_tensor(200, words[200:230], cta)
    bits = layouts.scaled_descriptor(m, n, 1, 1, scale="ue4m3")
    bench.one(_scaled_text("mxf4nvf4", "block16", 2), 0, left.descriptor, right.descriptor, bits, 200, 220, False)
    product = _scaled(left.values, a_scales, 16) @ _scaled(right.values, b_scales, 16).T
    for cta in (0, 1):
        rows = product[own * cta : own * cta + own]
        expected = rows if m == 256 else np.concatenate([rows[:, :64], rows[:, 64:]])
        np.testing.assert_array_equal(_result(bench, expected.shape[1], cta), expected.astype(np.float32))


def _scale_case(bench: Bench) -> tuple:
    rng = np.random.default_rng(34)
    left = _place(bench, rng, "e2m1", 128, 64, _A, "32B", packed=True)
    right = _place(bench, rng, "e2m1", 32, 64, _B, "32B", packed=True)
    bench.fill_tensor(0, np.full((64, 128), 0x38383838, np.uint32))
    bits = layouts.scaled_descriptor(128, 32, 1, 1, scale="ue4m3")
    return 0, left.descriptor, right.descriptor, bits, 40, 50, False


def test_copies_of_the_scales_of_b_that_differ() -> None:
    bench = Bench()
    values = _scale_case(bench)
    bench.ctas[0].tensor.data[50, 70] ^= 1
    with pytest.raises(MemoryFaultError, match="copies of the scale factors at column 50 differ"):
        bench.one(_scaled_text("mxf4nvf4", "block16"), *values)


def test_what_was_never_written_or_allocated() -> None:
    bench = Bench()
    values = _scale_case(bench)
    bench.ctas[0].tensor.written[41, 40] = False
    with pytest.raises(MemoryFaultError, match="column 41, lane 40, which was never written"):
        bench.one(_scaled_text("mxf4nvf4", "block16"), *values)
    bench.ctas[0].tensor.written[41, 40] = True
    bench.ctas[0].shared.written[_B] = 0
    with pytest.raises(MemoryFaultError, match="shared memory"):
        bench.one(_scaled_text("mxf4nvf4", "block16"), *values)
    bench.ctas[0].shared.written[_B] = 1
    with pytest.raises(MemoryFaultError, match="not all allocated"):
        bench.one(_scaled_text("mxf4nvf4", "block16"), 500, *values[1:])


def test_a_whole_warp_that_issues() -> None:
    bench = Bench()
    values = _scale_case(bench)
    bench.run(_scaled_text("mxf4nvf4", "block16"), *values)
    assert [kind for kind, _ in bench.findings] == ["issue"]


_GOOD = layouts.instruction_descriptor(128, 64, 1, 1)


@pytest.mark.parametrize(
    ("kind", "ctas", "bits"),
    [
        ("f16", 1, layouts.instruction_descriptor(256, 64, 1, 1)),
        ("f16", 2, layouts.instruction_descriptor(64, 64, 1, 1)),
        ("f16", 1, layouts.instruction_descriptor(128, 24, 1, 1)),
        ("f16", 1, layouts.instruction_descriptor(128, 0, 1, 1)),
        ("f16", 1, layouts.instruction_descriptor(128, 64, 2, 2)),
        ("f16", 1, layouts.instruction_descriptor(128, 64, 1, 1, d=2)),
        ("f16", 1, _GOOD | 1 << 2),
        ("f8f6f4", 1, layouts.instruction_descriptor(128, 64, 2, 0)),
        ("i8", 1, layouts.instruction_descriptor(128, 64, 1, 1, d=2, negate=(1, 0))),
    ],
)
def test_impossible_instruction_descriptors(kind: str, ctas: int, bits: int) -> None:
    with pytest.raises(DescriptorFaultError, match=r"line \d+.*instruction descriptor"):
        Bench(2).one(_form(kind, ctas), 0, 1 << 46, 1 << 46, bits, False)


@pytest.mark.parametrize(
    ("kind", "vector", "bits"),
    [
        ("mxf4nvf4", "block32", layouts.scaled_descriptor(128, 64, 1, 1, scale="ue4m3")),
        ("mxf8f6f4", "block32", layouts.scaled_descriptor(128, 64, 0, 0, scale="ue4m3")),
        ("mxf4", "block32", layouts.scaled_descriptor(128, 64, 1, 1, scale="ue8m0", ids=(1, 0))),
        ("mxf4nvf4", "block16", layouts.scaled_descriptor(128, 64, 1, 1, scale="ue4m3", ids=(0, 2))),
        ("mxf4nvf4", "block16", layouts.scaled_descriptor(128, 64, 1, 1, scale="ue4m3", transpose=(1, 0))),
        ("mxf4nvf4", "block16", layouts.scaled_descriptor(64, 64, 1, 1, scale="ue4m3")),
        ("mxf4nvf4", "block16", layouts.scaled_descriptor(128, 64, 5, 5, scale="ue4m3")),
    ],
)
def test_impossible_block_scaled_descriptors(kind: str, vector: str, bits: int) -> None:
    with pytest.raises(DescriptorFaultError):
        Bench().one(_scaled_text(kind, vector), 0, 1 << 46, 1 << 46, bits, 0, 0, False)


def test_the_reserved_bit_of_the_fp4_descriptor_is_ignored() -> None:
    bench = Bench()
    values = list(_scale_case(bench))
    values[3] |= 1 << 12
    bench.one(_scaled_text("mxf4nvf4", "block16"), *values)


@pytest.mark.parametrize(
    "text",
    [
        "tcgen05.mma.ws.cta_group::1.kind::f16 [%r1], %d1, %d2, %r2, %p1;",
        "tcgen05.mma.sp.cta_group::1.kind::f16 [%r1], %d1, %d2, [%r3], %r2, %p1;",
        "tcgen05.mma.cta_group::1.kind::f16.ashift [%r1], %d1, %d2, %r2, %p1;",
        "tcgen05.mma.cta_group::1.kind::f8f6f4 [%r1], %d1, %d2, %r2, %p1, 1;",
        "tcgen05.mma.cta_group::1.kind::mxf4.block_scale.block16 [%r1], %d1, %d2, %r2, [%r3], [%r4], %p1;",
        "tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale [%r1], %d1, %d2, %r2, [%r3], [%r4], %p1;",
        "tcgen05.mma.cta_group::2.kind::f16 [%r1], %d1, %d2, %r2, {%r3, %r4, %r5, %r6}, %p1;",
    ],
)
def test_unsupported_forms(text: str) -> None:
    with pytest.raises(UnsupportedInstructionError):
        run_handler(text)
