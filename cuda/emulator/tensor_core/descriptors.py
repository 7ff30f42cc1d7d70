"""Matrix descriptors of operands in shared memory, and instruction descriptors of tcgen05.mma.

The fields are those of the PTX ISA: "Shared memory descriptor" and "Instruction descriptor" of tcgen05, and
"Matrix-descriptor format" of wgmma.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

from ..errors import DescriptorFaultError
from ..ptx.syntax import Instruction
from .formats import WIDTH


@contextmanager
def located(instruction: Instruction) -> Iterator[None]:
    """Add the place to the faults of descriptors."""
    try:
        yield
    except DescriptorFaultError as error:
        raise DescriptorFaultError(f"{instruction.where}: {error}") from None


# ---- matrices in shared memory ----


@dataclass(frozen=True, slots=True)
class Swizzle:
    """How the 16-byte chunks of a row are permuted.

    Attributes:
      chunks: chunks of a row of the pattern, 1 without swizzling.
      mask: of the row bits that are added (exclusive or) to the chunk bits.
      shift: 1 where pairs of chunks stay together (32-byte atoms), else 0.
    """

    chunks: int
    mask: int
    shift: int = 0


_NONE, _B32, _B64, _B128 = Swizzle(1, 0), Swizzle(2, 1), Swizzle(4, 3), Swizzle(8, 7)
_B128_ATOM32 = Swizzle(8, 3, 1)
_TCGEN05_SWIZZLES = {0: _NONE, 1: _B128_ATOM32, 2: _B128, 4: _B64, 6: _B32}
_WGMMA_SWIZZLES = {0: _NONE, 1: _B128, 2: _B64, 3: _B32}


@dataclass(frozen=True, slots=True)
class MatrixDescriptor:
    """Where a matrix lies in shared memory; all but the swizzle in chunks of 16 bytes.

    Attributes:
      start: chunk of the first element.
      leading: leading dimension offset, or the chunk where rows go on if `absolute`.
      stride: stride dimension offset.
      swizzle: of the chunks.
      absolute: leading dimension in absolute address mode.
    """

    start: int
    leading: int
    stride: int
    swizzle: Swizzle
    absolute: bool = False


def tcgen05_matrix(bits: int) -> MatrixDescriptor:
    """The matrix descriptor of tcgen05.mma and tcgen05.cp."""
    swizzle = _TCGEN05_SWIZZLES.get(bits >> 61)
    if bits >> 46 & 7 != 1 or bits >> 53 & 0xFF or swizzle is None:
        raise DescriptorFaultError(f"{bits:#018x} is no matrix descriptor of tcgen05")
    return _matrix(bits, swizzle, bool(bits >> 52 & 1))


def wgmma_matrix(bits: int) -> MatrixDescriptor:
    """The matrix descriptor of wgmma.mma_async."""
    return _matrix(bits, _WGMMA_SWIZZLES[bits >> 62], False)


def _matrix(bits: int, swizzle: Swizzle, absolute: bool) -> MatrixDescriptor:
    if bits >> 49 & 7:
        raise DescriptorFaultError(
            f"matrix descriptor {bits:#018x}: patterns that do not start at a multiple of their size (base offset) are "
            "not supported"
        )
    return MatrixDescriptor(bits & 0x3FFF, bits >> 16 & 0x3FFF, bits >> 32 & 0x3FFF, swizzle, absolute)


# ---- instructions ----

BLOCK_SCALED = ("mxf8f6f4", "mxf4", "mxf4nvf4")
KINDS = ("f16", "tf32", "f8f6f4", "i8", *BLOCK_SCALED)

_F8F6F4 = {0: "e4m3", 1: "e5m2", 3: "e2m3", 4: "e3m2", 5: "e2m1"}
_FORMATS = {
    "f16": {0: "f16", 1: "bf16"},
    "tf32": {2: "tf32"},
    "f8f6f4": _F8F6F4,
    "mxf8f6f4": _F8F6F4,
    "mxf4": {1: "e2m1"},
    "mxf4nvf4": {1: "e2m1"},
    "i8": {0: "u8", 1: "s8"},
}
_ACCUMULATORS = {"f16": {0: "f16", 1: "f32"}, "tf32": {1: "f32"}, "f8f6f4": {0: "f16", 1: "f32"}, "i8": {2: "s32"}}


@dataclass(frozen=True, slots=True)
class InstructionDescriptor:
    """What a tcgen05.mma multiplies.

    Attributes:
      m, n, k: extents, of the CTA pair for cta_group::2.
      a, b: formats of the elements.
      accumulator: "f32", "f16" or "s32".
      a_transposed, b_transposed: M or N is the contiguous dimension in shared memory.
      negative: the product is negated.
      saturate: integer accumulators saturate.
      scale: format of the scale factors, or "".
      a_scale_id, b_scale_id: byte of the scale factors in their column.
      packed: 4-bit elements lie two to a byte.
    """

    m: int
    n: int
    k: int
    a: str
    b: str
    accumulator: str
    a_transposed: bool
    b_transposed: bool
    negative: bool
    saturate: bool
    scale: str
    a_scale_id: int
    b_scale_id: int
    packed: bool

    @property
    def k_bytes(self) -> int:
        """Bytes of a row of K in shared memory."""
        return self.k // 2 if self.packed else self.k * max(8, WIDTH[self.a]) // 8


@lru_cache(maxsize=256)
def instruction_descriptor(bits: int, kind: str, cta_group: int) -> InstructionDescriptor:
    """The 32-bit instruction descriptor of a kind, checked for what the CTA group can do."""
    scaled, packed = kind in BLOCK_SCALED, kind in ("mxf4", "mxf4nvf4")
    if bits >> 2 & 1:
        raise DescriptorFaultError(f"instruction descriptor {bits:#010x}: sparse matrices are not supported")
    # Bit 12 is reserved in the mxf4 form; compiled kernels set it.
    a_format, b_format = bits >> 7 & 7, bits >> 10 & (3 if packed else 7)
    accumulator = "f32" if scaled else _ACCUMULATORS[kind].get(bits >> 4 & 3)
    a, b = _FORMATS[kind].get(a_format), _FORMATS[kind].get(b_format)
    if a is None or b is None or accumulator is None:
        raise DescriptorFaultError(f"instruction descriptor {bits:#010x}: formats that kind::{kind} does not have")
    descriptor = InstructionDescriptor(
        m=(bits >> 24 & 0x1F) << 4,
        n=(bits >> 17 & 0x3F) << 3,
        k=_extent_of_k(bits, packed, a),
        a=a,
        b=b,
        accumulator=accumulator,
        a_transposed=bool(bits >> 15 & 1),
        b_transposed=bool(bits >> 16 & 1),
        negative=bool((bits >> 13 ^ bits >> 14) & 1),
        saturate=kind == "i8" and bool(bits >> 3 & 1),
        scale=("ue8m0" if bits >> 23 & 1 else "ue4m3") if scaled else "",
        a_scale_id=bits >> 29 & 3 if scaled else 0,
        b_scale_id=bits >> 4 & 3 if scaled else 0,
        packed=packed,
    )
    _check(descriptor, bits, kind, cta_group)
    return descriptor


def _extent_of_k(bits: int, packed: bool, element: str) -> int:
    if packed:
        return 96 if bits >> 31 else 64
    return 256 // max(8, WIDTH[element])


def _check(d: InstructionDescriptor, bits: int, kind: str, cta_group: int) -> None:
    scaled = kind in BLOCK_SCALED
    shapes = {1: (128,) if scaled else (64, 128), 2: (128, 256)}[cta_group]
    step = 8 if cta_group == 1 and (d.m == 64 or scaled) else 16
    if d.m not in shapes or not step <= d.n <= 256 or d.n % step:
        raise DescriptorFaultError(
            f"instruction descriptor {bits:#010x}: M={d.m}, N={d.n} is no shape of kind::{kind} "
            f"with cta_group::{cta_group}"
        )
    if d.packed and (d.a_transposed or d.b_transposed):
        raise DescriptorFaultError(f"instruction descriptor {bits:#010x}: kind::{kind} has no transposed operands")
    if kind in ("mxf8f6f4", "mxf4") and d.scale != "ue8m0":
        raise DescriptorFaultError(f"instruction descriptor {bits:#010x}: the scale factors of kind::{kind} are ue8m0")
    if kind == "i8" and bits >> 13 & 3:
        raise DescriptorFaultError(f"instruction descriptor {bits:#010x}: kind::i8 does not negate its operands")
