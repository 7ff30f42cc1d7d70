"""Products of decoded operands and their addition to the accumulators.

The PTX ISA does not specify the order in which the products of one instruction are added, nor the width of the partial
sums. Those of wgmma have been measured (`adders.py`). The products of mma.sync and tcgen05.mma are added here in
float64, which is exact for operands of similar magnitude, together with the accumulator, and rounded to the
accumulator's type once. Integers are exact.
"""

from __future__ import annotations

import numpy as np

_INT32 = np.iinfo(np.int32)


def multiply(a: np.ndarray, b: np.ndarray, negative: bool = False) -> np.ndarray:
    """(M, K) and (N, K) float64 to A B^T transposed: (N, M) float64."""
    with np.errstate(all="ignore"):
        # The operand is negated, not the sum: one that cancels is +0.
        return b @ (-a.T if negative else a.T)


def to_accumulator(
    product: np.ndarray, old: np.ndarray | None, kind: str, saturate: bool = False, scale: float = 1.0
) -> np.ndarray:
    """The sum of products and `scale` times the old accumulators, as words.

    Args:
      product: float64; used up.
      old: words of the same shape, or None for zero.
      kind: "f32", "f16" (in the low half of a word) or "s32".
      saturate: integers saturate instead of wrapping around.
      scale: of the old accumulators.
    """
    with np.errstate(all="ignore"):
        if old is not None:
            old = from_accumulator(old, kind)
            product += old if scale == 1.0 else np.multiply(old, scale, dtype=np.float64)
        if kind == "f32":
            return product.astype(np.float32).view(np.uint32)
        if kind == "f16":
            return product.astype(np.float16).view(np.uint16).astype(np.uint32)
    if saturate:
        return np.clip(product, _INT32.min, _INT32.max).astype(np.int32).view(np.uint32)
    return product.astype(np.int64).astype(np.uint32)


def from_accumulator(words: np.ndarray, kind: str) -> np.ndarray:
    """Accumulators as float32 (from "f32"), float16 ("f16", in the low half of a word) or int32 ("s32")."""
    if kind == "f16":
        return words.astype(np.uint16).view(np.float16)
    return words.view(np.float32 if kind == "f32" else np.int32)
