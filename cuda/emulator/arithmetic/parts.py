"""Words as vectors of narrower parts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np


def split(x: np.ndarray, code: str) -> np.ndarray:
    """The parts of each element, lowest first, along a new last axis."""
    return np.asarray(x)[..., None].view(code)


def join(parts: np.ndarray, code: str = "u4") -> np.ndarray:
    """The inverse of `split`."""
    return np.ascontiguousarray(parts).view(code)[..., 0]


def paired(function: Callable, code: str) -> Callable:
    """A function of halves as a function of words that hold two."""
    return lambda *words: join(function(*(split(word, code) for word in words)))
