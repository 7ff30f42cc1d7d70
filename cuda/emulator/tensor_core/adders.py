"""The adder of Hopper's warpgroup products (wgmma), bit for bit as an H200 computes.

One instruction adds all its products, over the whole K, and the accumulator in one step:

1. The exponent of a product is the sum of the exponents of its factors, whose significands' product lies in [1, 4);
   it is not normalised. A subnormal factor or accumulator has the smallest exponent of its format.
2. Every term is truncated, towards zero, to a multiple of 2**(E - F), where E is the largest exponent of all terms with
   the accumulator among them, and F is 13 for 8-bit factors and 25 for all others.
3. The sum of the terms so truncated is exact.
4. A float32 result is truncated, towards zero, to 23 bits behind the leading one, and to 13 with 8-bit factors. A
   float16 result is rounded to the nearest, to even, from the sum itself.

Measured: `tests/emulator/kernels/sums.py` records random sums, and sums of terms that are far smaller than another.
The rules reproduce all 114,688 of each kind that it records: bf16, f16, tf32 and the four pairs of e4m3 and e5m2 to
float32, f16 and e4m3 to float16. Another F, groups of fewer terms, normalised products, and terms or results that are
rounded in another way do not; nor does an accumulator that is not truncated with the products, but f16 to float16 does
not tell.

Not measured, and as in the published model that comes to the same rules (MMA-Sim, arXiv 2511.10909): the exponent of
subnormal terms, subnormal results, results beyond the largest number, which are infinite, +0 as the sum of negative
zeros, and the words of NaN, 0x7fffffff and 0x7fff. A zero is taken to have no exponent.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .formats import WIDTH
from .products import from_accumulator

_SMALLEST_EXPONENT = {"e4m3": -6, "e5m2": -14, "f16": -14, "bf16": -126, "tf32": -126, "f32": -126}
_SMALLEST_PRODUCT = 2 * -126
_NO_EXPONENT = -1000  # of zero: less than those of all others, even if added to one of them
_MODERATE = 40  # a largest exponent with which products and what scales them to 2**27 are normal float32
_NAN = {"f32": 0x7FFFFFFF, "f16": 0x7FFF}


@dataclass(frozen=True, slots=True)
class Adder:
    """The adder for factors of two formats.

    Attributes:
      a, b: formats.
      accumulator: "f32" or "f16".
      fraction_bits: F.
      result_bits: behind the leading one of a float32.
    """

    a: str
    b: str
    accumulator: str
    fraction_bits: int
    result_bits: int

    def add(self, a: np.ndarray, b: np.ndarray, old: np.ndarray | None) -> np.ndarray:
        """(M, K) and (N, K) float64, and (N, M) words of accumulators or None for zeros, to (N, M) words."""
        if old is None:
            start = np.zeros((len(a), len(b)))
        else:
            start = from_accumulator(old, self.accumulator).T.astype(np.float64)
        with np.errstate(all="ignore"):
            total = self._finite_sum(np.ascontiguousarray(a.T), np.ascontiguousarray(b.T), start)
            if not all(np.isfinite(x).all() for x in (a, b, start)):
                plain = a @ b.T + start
                total = np.where(np.isfinite(plain), total, plain)
            words = self._words(total)
        words[np.isnan(total)] = _NAN[self.accumulator]
        return words.T

    def _finite_sum(self, a: np.ndarray, b: np.ndarray, start: np.ndarray) -> np.ndarray:
        """(K, M), (K, N) and (M, N) float64 to (M, N) float64: the sum of the truncated terms, exact."""
        (a_exponents, a_moderate), (b_exponents, b_moderate) = _exponents(a, self.a), _exponents(b, self.b)
        largest = (a_exponents[:, :, None] + b_exponents[:, None, :]).max(0)
        largest = np.maximum(largest, _exponents(start, self.accumulator)[0])
        unit = np.maximum(largest, _SMALLEST_PRODUCT).astype(np.int32) - self.fraction_bits
        scale = np.ldexp(1.0, -unit)
        # Products have at most 22 bits, and those that float32 cannot represent after scaling are less than 1.
        kind = np.dtype("f4" if a_moderate and b_moderate else "f8")
        terms = a.astype(kind)[:, :, None] * b.astype(kind)[:, None, :]
        terms *= np.minimum(scale, np.finfo(kind).max).astype(kind)
        # The conversion truncates. The sums fit: 16 terms are less than 2**27, or 32 are less than 2**15.
        total = terms.astype(np.int32).sum(0, dtype=np.int32)
        # No sum is -0.
        return np.ldexp(total + np.trunc(start * scale) + 0.0, unit)

    def _words(self, total: np.ndarray) -> np.ndarray:
        if self.accumulator == "f16":
            return total.astype(np.float16).view(np.uint16).astype(np.uint32)
        return _truncated(total, self.result_bits).astype(np.float32).view(np.uint32)


def _exponents(x: np.ndarray, kind: str) -> tuple[np.ndarray, bool]:
    """Exponents, and whether all but those of zeros are moderate."""
    plain = np.frexp(x)[1] - 1
    exponents = np.maximum(plain, _SMALLEST_EXPONENT[kind]).astype(np.int16)
    exponents[x == 0] = _NO_EXPONENT
    return exponents, max(-plain.min(), plain.max()) <= _MODERATE


def _truncated(x: np.ndarray, bits: int) -> np.ndarray:
    """Towards zero to `bits` behind the leading one, of subnormal float32 behind that of the smallest normal one."""
    truncated = (x.view(np.int64) & -(1 << 52 - bits)).view(np.float64)
    small = np.abs(x) < 2.0**-126
    if small.any():
        unit = 2.0 ** (-126 - bits)
        truncated[small] = np.trunc(x[small] / unit) * unit
    return truncated


def wgmma_adder(a: str, b: str, accumulator: str) -> Adder:
    """The adder for factors of formats `a` and `b` and accumulators of `accumulator`."""
    narrow = WIDTH[a] == 8
    return Adder(a, b, accumulator, 13 if narrow else 25, 13 if narrow else 23)
