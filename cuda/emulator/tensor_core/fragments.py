"""Matrices spread over the registers of a warp, for mma.sync and wgmma (PTX ISA, "Matrix Fragments").

Thread t = 4 g + i holds, of 16 rows A, 4-byte word i (and i + 4) of rows g and g + 8; of 8 rows B, word i (and i + 4)
of row g; of the accumulators, columns 2 i and 2 i + 1 of every eight, in rows g and g + 8.
"""

from __future__ import annotations

import numpy as np


def a_rows(registers: np.ndarray) -> np.ndarray:
    """(2 or 4, 32) uint32 to the (16, bytes of K) uint8 of A."""
    words = registers.reshape(-1, 2, 8, 4).transpose(1, 2, 0, 3)
    return np.ascontiguousarray(words).reshape(16, -1).view(np.uint8)


def b_rows(registers: np.ndarray) -> np.ndarray:
    """(1 or 2, 32) uint32 to the (8, bytes of K) uint8 of B, by column of B."""
    words = registers.reshape(-1, 8, 4).transpose(1, 0, 2)
    return np.ascontiguousarray(words).reshape(8, -1).view(np.uint8)


def accumulators(registers: np.ndarray, kind: str) -> np.ndarray:
    """(registers, 32) uint32 to (N, 16) words; "f16" registers hold two columns, which become words of their own."""
    if kind == "f16":
        registers = np.stack([registers & np.uint32(0xFFFF), registers >> np.uint32(16)], axis=1)
    # By eight columns, half of the rows, column of the pair, row and pair.
    parts = registers.reshape(-1, 2, 2, 8, 4)
    return parts.transpose(0, 4, 2, 1, 3).reshape(-1, 16)


def accumulator_registers(words: np.ndarray, kind: str) -> np.ndarray:
    """The reverse of `accumulators`."""
    parts = words.reshape(-1, 4, 2, 2, 8).transpose(0, 3, 2, 4, 1).reshape(-1, 2, 32)
    if kind == "f16":
        return parts[:, 0] | parts[:, 1] << np.uint32(16)
    return parts.reshape(-1, 32)
