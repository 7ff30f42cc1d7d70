"""Random operands of matrix products, as the codes that a kernel reads and the numbers that they stand for."""

import dataclasses

import ml_dtypes
import numpy as np

from tests.emulator.nvidia.cases import Case, Kernel
from tests.emulator.tensor_core.truncated_sums import chain_of_sums

# Scales are stored as atoms of 128 rows by 4 blocks.
_ATOM_ROWS, _ATOM_BLOCKS = 128, 4
_LARGEST_OPERAND = 6.0
_KINDS = {"bfloat16": "bf16", "float16": "f16", "float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}
_SCALES = {"float8_e4m3fn": (0.125, 4.0), "float8_e8m0fnu": (0.125, 4.0)}


@dataclasses.dataclass(frozen=True)
class Operands:
    """One product.

    Attributes:
      arrays: in the order of the recording, C last and zero.
      product: (l, m, n) in float64.
      sums: (l, m, n) in float32, added as the tensor cores do, instruction by instruction.
    """

    arrays: list[np.ndarray]
    product: np.ndarray
    sums: np.ndarray


def type_of(name: str) -> np.dtype:
    """The NumPy type of a name in ml_dtypes."""
    return np.dtype(getattr(ml_dtypes, name, name))


def make_operands(case: Case, seed: int = 0) -> Operands:
    """Operands with values, and scales, drawn from all that their types have within a range."""
    rng, kernel = np.random.default_rng(seed), case.kernel
    a = _draw(rng, kernel.a, (case.l, case.m, case.k))
    b = _draw(rng, kernel.b, (case.l, case.n, case.k))
    arrays = [_stored(a, kernel.majors[0] == "k"), _stored(b, kernel.majors[1] == "k")]
    left, right = a.astype(np.float64), b.astype(np.float64)
    if kernel.scale:
        scales = [_draw_scales(rng, kernel, (*x.shape[:2], case.k // kernel.block)) for x in (a, b)]
        arrays += [_atoms(scale) for scale in scales]
        left, right = (_scaled(x, scale, kernel.block) for x, scale in zip((left, right), scales, strict=True))
    rows, columns = (case.m, case.n) if kernel.majors[2] == "n" else (case.n, case.m)
    arrays.append(np.zeros((case.l, rows, columns), type_of(kernel.c)))
    sums = np.stack([_sums(kernel, *pair) for pair in zip(left, right, strict=True)])
    return Operands(arrays, left @ right.transpose(0, 2, 1), sums)


def _sums(kernel: Kernel, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """(m, n) float32 of one product: Hopper truncates, for Blackwell the emulator rounds once an instruction."""
    if kernel.target == "sm_90a":
        return chain_of_sums(a, b, _KINDS[kernel.a], _KINDS[kernel.b]).astype(np.float32)
    step = _elements_of_an_instruction(kernel)
    sums = np.zeros((len(a), len(b)), np.float32)
    for first in range(0, a.shape[1], step):
        terms = a[:, first : first + step] @ b[:, first : first + step].T
        sums = (sums + terms).astype(np.float32)
    return sums


def _elements_of_an_instruction(kernel: Kernel) -> int:
    """Of K: 32 bytes of the wider operand."""
    return 256 // max(ml_dtypes.finfo(type_of(name)).bits for name in (kernel.a, kernel.b))


def result_of(case: Case, c: np.ndarray) -> np.ndarray:
    """(l, m, n) the numbers in an array C."""
    numbers = c.view(type_of(case.kernel.c)).astype(np.float64)
    return numbers if case.kernel.majors[2] == "n" else numbers.transpose(0, 2, 1)


def expected(case: Case, operands: Operands) -> np.ndarray:
    """(l, m, n) the numbers that C should hold: the sums rounded to its type, within its range."""
    type_ = type_of(case.kernel.c)
    largest = np.float32(ml_dtypes.finfo(type_).max)
    return np.clip(operands.sums, -largest, largest).astype(type_).astype(np.float64)


def _values(name: str, low: float, high: float) -> np.ndarray:
    """All values of an 8-bit or smaller type with magnitudes in [low, high]."""
    type_ = type_of(name)
    values = np.arange(2 ** ml_dtypes.finfo(type_).bits, dtype=np.uint8).view(type_)
    magnitudes = np.abs(values.astype(np.float32))
    return values[(magnitudes >= low) & (magnitudes <= high)]


def _draw(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    if ml_dtypes.finfo(type_of(name)).bits > 8:
        return rng.standard_normal(shape).astype(type_of(name))
    return rng.choice(_values(name, 0, _LARGEST_OPERAND), shape)


def _draw_scales(rng: np.random.Generator, kernel: Kernel, shape: tuple[int, ...]) -> np.ndarray:
    values = _values(kernel.scale, *_SCALES[kernel.scale])
    return rng.choice(values[values.astype(np.float32) > 0], shape)


def _scaled(values: np.ndarray, scales: np.ndarray, block: int) -> np.ndarray:
    return values * np.repeat(scales.astype(np.float64), block, axis=2)


def _stored(values: np.ndarray, as_is: bool) -> np.ndarray:
    """The array with its contiguous dimension last, two elements of 4 bits a byte, low bits first."""
    values = np.ascontiguousarray(values if as_is else values.transpose(0, 2, 1))
    if ml_dtypes.finfo(values.dtype).bits > 4:
        return values
    codes = values.view(np.uint8)
    return codes[..., 0::2] | codes[..., 1::2] << 4


def _atoms(scales: np.ndarray) -> np.ndarray:
    """Scales (l, rows, blocks) in the order of the tensor core: 512-byte atoms along blocks, then rows.

    In an atom, row r and block k are at byte 16 (r mod 32) + 4 (r / 32) + k.
    """
    count, rows, blocks = scales.shape
    padding = ((0, 0), (0, -rows % _ATOM_ROWS), (0, -blocks % _ATOM_BLOCKS))
    codes = np.pad(scales.view(np.uint8), padding)
    shape = (count, codes.shape[1] // _ATOM_ROWS, 4, 32, codes.shape[2] // _ATOM_BLOCKS, _ATOM_BLOCKS)
    return np.ascontiguousarray(codes.reshape(shape).transpose(0, 1, 4, 3, 2, 5))
