"""Single warpgroup products on all shared layouts, which the descriptors of hand-made images name."""

import dataclasses
from collections.abc import Iterator

import ml_dtypes
import numpy as np

from tests.emulator.kernels.case import Case, copy_to_shared, entry
from tests.emulator.kernels.tensor_copies import swizzled
from tests.emulator.tensor_core.truncated_sums import truncated_sums

_M, _THREADS = 64, 128
_LAYOUT_CODES = {0: 0, 128: 1, 64: 2, 32: 3}


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where an operand lies in shared memory.

    Attributes:
      swizzle: 0, 32, 64 or 128.
      k_major: Whether neighbouring elements are neighbours in K.
      leading: Leading byte offset.
      stride: Stride byte offset.
      start: Byte offset of the first element, a multiple of 16.
    """

    swizzle: int
    k_major: bool
    leading: int
    stride: int
    start: int = 0

    def offset(self, row: int, k: int, element_bytes: int) -> int:
        """Byte offset of an element; the canonical layouts of cute/arch/mma_sm90_desc.hpp."""
        if self.k_major:
            byte = k * element_bytes
            if self.swizzle == 0:
                unswizzled = row % 8 * 16 + row // 8 * self.stride + byte // 16 * self.leading + byte % 16
            else:
                unswizzled = row % 8 * self.swizzle + row // 8 * self.stride + byte
        else:
            byte = row * element_bytes
            span = self.swizzle or 16
            chunk, group = (self.stride, self.leading) if self.swizzle == 0 else (self.leading, self.stride)
            unswizzled = byte % span + byte // span * chunk + k % 8 * span + k // 8 * group
        return swizzled(self.start + unswizzled, self.swizzle)

    def descriptor(self, place: int) -> int:
        """All but the address of shared memory, for an image at a byte offset in it."""
        return (
            (place + self.start) >> 4
            | (self.leading >> 4) << 16
            | (self.stride >> 4) << 32
            | _LAYOUT_CODES[self.swizzle] << 62
        )


@dataclasses.dataclass(frozen=True)
class Kind:
    """Types of an instruction: PTX and NumPy types of a and b, PTX type of d, extent of K."""

    a: str
    b: str
    d: str
    k: int

    @property
    def element_bytes(self) -> int:
        return 32 // self.k


DTYPES = {
    "bf16": ml_dtypes.bfloat16,
    "f16": np.float16,
    "tf32": np.float32,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "s8": np.int8,
    "u8": np.uint8,
}
ACCUMULATORS = {"f32": np.float32, "f16": np.float16, "s32": np.int32}


def _image(matrix: np.ndarray, layout: Layout, rng: np.random.Generator) -> np.ndarray:
    nbytes = matrix.itemsize
    places = np.array([[layout.offset(r, k, nbytes) for k in range(matrix.shape[1])] for r in range(len(matrix))])
    assert np.unique(places).size == places.size, "elements overlap"
    image = rng.integers(0, 256, (places.max() + nbytes + 1023) // 1024 * 1024, np.uint8)
    for byte in range(nbytes):
        image[places + byte] = np.ascontiguousarray(matrix).view(np.uint8).reshape(*matrix.shape, nbytes)[..., byte]
    return image


def _accumulator_places(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Row and column of every float32 accumulator, [128 threads, n / 2]."""
    thread, i = np.arange(_THREADS)[:, None], np.arange(n // 2)
    row = thread // 32 * 16 + thread % 32 // 4 + i % 4 // 2 * 8
    return row, i // 4 * 8 + thread % 4 * 2 + i % 2


def _small(rng: np.random.Generator, shape: tuple[int, int], kind: str) -> np.ndarray:
    """Integers so small that every sum is exact."""
    low = 0 if kind == "u8" else -4
    return rng.integers(low, 5, shape).astype(DTYPES[kind])


def _opcode(kind: Kind, n: int) -> str:
    return f"wgmma.mma_async.sync.aligned.m64n{n}k{kind.k}.{kind.d}.{kind.a}.{kind.b}"


def _ptx(kind: Kind, n: int, a: Layout, b: Layout, a_bytes: int, b_bytes: int, add: int, signs: tuple[int, int]) -> str:
    count = n // 4 if kind.d == "f16" else n // 2
    registers = [f"%{'f' if kind.d == 'f32' else 'r'}{20 + i}" for i in range(count)]
    size = 4 * count
    flags = "" if kind.d == "s32" else f", {signs[0]}, {signs[1]}"
    if kind.k == 16:
        flags += f", {int(not a.k_major)}, {int(not b.k_major)}"
    loads = "".join(f"ld.global.b32 {register}, [%d10+{4 * i}];\n" for i, register in enumerate(registers))
    stores = "".join(f"st.global.b32 [%d10+{4 * i}], {register};\n" for i, register in enumerate(registers))
    body = f"""
{copy_to_shared("a", 0, a_bytes, _THREADS)}
{copy_to_shared("b", a_bytes, b_bytes, _THREADS)}
mul.wide.u32 %d10, %r0, {size};
add.u64 %d10, %d, %d10;
{loads}
fence.proxy.async.shared::cta;
bar.sync 0;
shr.u32 %r10, %r1, 4;
cvt.u64.u32 %d11, %r10;
add.u64 %d12, %d11, {a.descriptor(0)};
add.u64 %d13, %d11, {b.descriptor(a_bytes)};
setp.ne.u32 %p1, {add}, 0;
wgmma.fence.sync.aligned;
{_opcode(kind, n)} {{{", ".join(registers)}}}, %d12, %d13, %p1{flags};
wgmma.commit_group.sync.aligned;
wgmma.wait_group.sync.aligned 0;
{stores}
"""
    return entry({"a": "pointer", "b": "pointer", "d": "pointer"}, body, version="8.4")


@dataclasses.dataclass(frozen=True, eq=False)
class Product:
    """Operands of one instruction.

    Attributes:
      kind: Types.
      a: [64, k].
      b: [n, k].
      start: Accumulators, [64, n].
    """

    kind: Kind
    a: np.ndarray
    b: np.ndarray
    start: np.ndarray


def launch(
    name: str,
    product: Product,
    layouts: tuple[Layout, Layout],
    rng: np.random.Generator,
    add: int = 1,
    signs: tuple[int, int] = (1, 1),
) -> Case:
    """The instruction on matrices, with the exact sum, rounded once, as what is expected.

    Args:
      name: Of the case.
      product: Operands.
      layouts: Of a and b.
      rng: For the bytes around the operands.
      add: Whether the accumulators are added.
      signs: 1 or -1 for a and for b.
    """
    a, b = product.a, product.b
    image_a, image_b = (_image(matrix, layout, rng) for matrix, layout in zip((a, b), layouts, strict=True))
    place = _accumulator_places(len(b))
    start = product.start[place].astype(ACCUMULATORS[product.kind.d])
    total = signs[0] * signs[1] * (a.astype(np.float64) @ b.astype(np.float64).T)[place] + add * start
    return Case(
        name,
        _ptx(product.kind, len(b), *layouts, image_a.size, image_b.size, add, signs),
        (image_a, image_b, start),
        {2: total.astype(start.dtype)},
        block=(_THREADS, 1, 1),
        shared_bytes=image_a.size + image_b.size,
    )


def matrix_of(accumulators: np.ndarray) -> np.ndarray:
    """[64, n] from the accumulators of all threads."""
    matrix = np.empty((_M, 2 * accumulators.shape[1]), accumulators.dtype)
    matrix[_accumulator_places(matrix.shape[1])] = accumulators
    return matrix


def _case(
    name: str,
    kind: Kind,
    n: int,
    a: Layout,
    b: Layout,
    rng: np.random.Generator,
    add: int = 1,
    signs: tuple[int, int] = (1, 1),
) -> Case:
    matrix_a, matrix_b = _small(rng, (_M, kind.k), kind.a), _small(rng, (n, kind.k), kind.b)
    # No zeros, whose sign is not settled.
    start = rng.integers(-8, 9, (_M, n)) + 0.5 * (kind.d != "s32")
    return launch(name, Product(kind, matrix_a, matrix_b, start), (a, b), rng, add, signs)


def _rounded_case(kind: Kind, n: int, rng: np.random.Generator) -> Case:
    a, b = (
        rng.standard_normal((rows, kind.k)).astype(np.float32).astype(DTYPES[name])
        for rows, name in ((_M, kind.a), (n, kind.b))
    )
    start = rng.standard_normal((_M, n)).astype(np.float32)
    case = launch(f"wgmma_rounded_{kind.a}", Product(kind, a, b, start), (K_MAJOR, K_MAJOR), rng)
    sums = truncated_sums(*(x.astype(np.float64) for x in (a, b, start)), (kind.a, kind.b, kind.d))
    return dataclasses.replace(case, expected={2: sums[_accumulator_places(n)]})


_BF16 = Kind("bf16", "bf16", "f32", 16)


def _k_major(swizzle: int, start: int = 0) -> Layout:
    """K-major with room between the groups of eight rows, as far as the swizzle lets it."""
    if swizzle == 0:
        return Layout(0, True, leading=128, stride=384, start=start)
    return Layout(swizzle, True, leading=16, stride=8 * swizzle if swizzle == 128 else 16 * swizzle, start=start)


K_MAJOR = _k_major(128)


def _mn_major(swizzle: int, rows: int) -> Layout:
    if swizzle == 0:
        return Layout(0, False, leading=128 * (rows // 8), stride=128)
    chunks = -(-rows * 2 // swizzle)
    return Layout(swizzle, False, leading=1024 * -(-8 * swizzle // 1024), stride=1024 * chunks)


def _layouts(rng: np.random.Generator) -> Iterator[Case]:
    for swizzle in _LAYOUT_CODES:
        k_major = _k_major(swizzle)
        yield _case(f"wgmma_k_{swizzle}", _BF16, 64, k_major, K_MAJOR, rng)
        yield _case(f"wgmma_b_k_{swizzle}", _BF16, 24, K_MAJOR, k_major, rng)
        yield _case(f"wgmma_a_mn_{swizzle}", _BF16, 64, _mn_major(swizzle, 64), K_MAJOR, rng)
        yield _case(f"wgmma_b_mn_{swizzle}", _BF16, 64, K_MAJOR, _mn_major(swizzle, 64), rng)
    for step in (1, 2, 3):
        yield _case(f"wgmma_step_{step}", _BF16, 64, _k_major(128, 32 * step), _k_major(128, 32 * step), rng)
    yield _case("wgmma_step_64", _BF16, 64, _k_major(64, 32), _k_major(64, 32), rng)
    yield _case("wgmma_mn_128_wide", _BF16, 128, _mn_major(128, 64), _mn_major(128, 128), rng)


def _kinds(rng: np.random.Generator) -> Iterator[Case]:
    kinds = [
        Kind("f16", "f16", "f32", 16),
        Kind("f16", "f16", "f16", 16),
        Kind("tf32", "tf32", "f32", 8),
        *(Kind(a, b, "f32", 32) for a in ("e4m3", "e5m2") for b in ("e4m3", "e5m2")),
        Kind("e4m3", "e5m2", "f16", 32),
        *(Kind(a, b, "s32", 32) for a in ("s8", "u8") for b in ("s8", "u8")),
    ]
    for kind in kinds:
        yield _case(f"wgmma_{kind.a}_{kind.b}_{kind.d}", kind, 16, K_MAJOR, K_MAJOR, rng)
    yield _case("wgmma_n8", _BF16, 8, K_MAJOR, K_MAJOR, rng)
    yield _case("wgmma_n256", _BF16, 256, K_MAJOR, K_MAJOR, rng)
    yield _case("wgmma_no_add", _BF16, 16, K_MAJOR, K_MAJOR, rng, add=0)
    yield _case("wgmma_negated", _BF16, 16, K_MAJOR, K_MAJOR, rng, signs=(-1, 1))
    yield _case("wgmma_twice_negated", _BF16, 16, K_MAJOR, K_MAJOR, rng, signs=(-1, -1))


def _rounded(rng: np.random.Generator) -> Iterator[Case]:
    for kind in (_BF16, Kind("f16", "f16", "f32", 16), *(Kind(a, "e4m3", "f32", 32) for a in ("e4m3", "e5m2"))):
        yield _rounded_case(kind, 64, rng)


def cases() -> list[Case]:
    """All cases."""
    rng = np.random.default_rng(10)
    return [*_layouts(rng), *_kinds(rng), *_rounded(rng)]
