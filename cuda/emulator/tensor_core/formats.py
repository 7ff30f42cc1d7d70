"""Element formats of matrix operands and scale factors, and their decoding to float64.

A *packing* says how elements lie in 16 bytes of shared memory or in the words of tensor memory (PTX ISA, "Packing
formats of elements in Tensor and Shared memory"):

- "dense": one after the other; the two 4-bit elements of a byte low nibble first.
- "chunks": sixteen elements of 4 or 6 bits at the start of each 16 bytes, the rest is padding (b4x16_p64, b6x16_p32).
- "bytes": one element a byte, of 6 bits in bits 0..5 and of 4 bits in bits 2..5.
"""

from __future__ import annotations

import numpy as np

from ..arithmetic.formats import bfloat16_to_float32, values

# Bits of an element.
WIDTH = {
    "tf32": 32, "f16": 16, "bf16": 16, "e4m3": 8, "e5m2": 8, "s8": 8, "u8": 8, "e2m3": 6, "e3m2": 6, "e2m1": 4,
}  # fmt: skip


_BYTE = np.arange(256)
_E2M1_PAIRS = np.stack([values("e2m1")[_BYTE & 15], values("e2m1")[_BYTE >> 4]], axis=1)
_BYTE_VALUES = {
    "e4m3": values("e4m3"),
    "e5m2": values("e5m2"),
    "s8": _BYTE.astype(np.uint8).view(np.int8).astype(np.float64),
    "u8": _BYTE.astype(np.float64),
    "e2m3": values("e2m3")[_BYTE & 63],
    "e3m2": values("e3m2")[_BYTE & 63],
    "e2m1": values("e2m1")[_BYTE >> 2 & 15],
}
# The sign bit of a ue4m3 scale is ignored.
SCALE_VALUES = {"ue4m3": values("ue4m3")[_BYTE & 127], "ue8m0": values("ue8m0")}
# The accumulators that mma.sync and wgmma have for an element.
ACCUMULATORS = {
    "f16": ("f16", "f32"), "bf16": ("f32",), "tf32": ("f32",), "e4m3": ("f16", "f32"), "e5m2": ("f16", "f32"),
    "s8": ("s32",), "u8": ("s32",),
}  # fmt: skip


def decode(raw: np.ndarray, element: str, packing: str = "dense") -> np.ndarray:
    """(..., bytes) uint8, C-contiguous, to (..., elements) float64; tf32 elements lose their low 13 bits."""
    width = WIDTH[element]
    if width == 32:
        return (raw.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)
    if element == "bf16":
        return bfloat16_to_float32(raw.view(np.uint16)).astype(np.float64)
    if element == "f16":
        return raw.view(np.float16).astype(np.float64)
    if width == 8 or packing == "bytes":
        return np.take(_BYTE_VALUES[element], raw)
    if packing == "dense":
        return _pairs(raw)
    chunks = raw.reshape(*raw.shape[:-1], -1, 16)
    decoded = _pairs(chunks[..., :8]) if width == 4 else _sixes(chunks[..., :12], element)
    return decoded.reshape(*raw.shape[:-1], -1)


def _pairs(raw: np.ndarray) -> np.ndarray:
    return np.take(_E2M1_PAIRS, raw, axis=0).reshape(*raw.shape[:-1], -1)


def _sixes(raw: np.ndarray, element: str) -> np.ndarray:
    """(..., 12) bytes to (..., 16) values, the elements' bits lowest first."""
    triples = raw.reshape(*raw.shape[:-1], 4, 3).astype(np.uint32)
    words = triples[..., 0] | triples[..., 1] << 8 | triples[..., 2] << 16
    codes = words[..., None] >> np.arange(0, 24, 6, dtype=np.uint32) & 63
    return np.take(_BYTE_VALUES[element], codes).reshape(*raw.shape[:-1], 16)
