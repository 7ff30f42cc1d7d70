"""What generated functions call and return."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np


class _Exit:
    def __repr__(self) -> str:
        return "EXIT"


EXIT = _Exit()


@dataclass(frozen=True, slots=True)
class Parting:
    """Lanes of a group go different ways and meet again at `meet`."""

    taken: np.ndarray
    others: np.ndarray
    target: int
    following: int
    meet: int


class Function(Protocol):
    """The code of some consecutive instructions; `length` counts them."""

    length: int

    def __call__(self, warp, mask): ...


class _Leave:
    length = 0

    def __call__(self, warp, mask) -> _Exit:
        return EXIT


# The function behind the last instruction.
leave = _Leave()


def part(mask, guard: np.ndarray, target: int, following: int, meet: int):
    """The next pc when all lanes go one way, else a Parting."""
    taken = guard if mask is None else guard & mask
    count = int(np.count_nonzero(taken))
    if count == 0:
        return following
    if count == (32 if mask is None else int(np.count_nonzero(mask))):
        return target
    return Parting(taken, ~taken if mask is None else mask & ~taken, target, following, meet)


def narrowed(mask, guard: np.ndarray):
    """The mask of an instruction under a guard: None for all lanes, False for none."""
    taken = guard if mask is None else guard & mask
    if taken.all():
        return None
    return taken if taken.any() else False


def keep(guard, new, old):
    """`new` where the guard holds, elsewhere the old content, which may not exist."""
    if guard is None or old is None:
        return new
    return np.where(guard, new, old)


def merged(mask, new, old):
    """Like keep, for the lanes of a mask; lanes that were never written hold zeros."""
    if mask is None:
        return new
    return np.where(mask, new, np.zeros_like(new) if old is None else old)


def raw_or_none(old, kind: str):
    """The bits of what a register held before, if anything."""
    return None if old is None else old.view(kind)


# What a register holds that was never written, where an instruction may take it: a NaN.
UNDEFINED = 0xFFC0DEAD


def register_rows(values: tuple, kind: str) -> np.ndarray:
    """An (n, 32) array of registers, some of which may never have been written."""
    try:
        return np.concatenate(values).reshape(len(values), 32)
    except ValueError:
        return np.stack([as_lanes(UNDEFINED if v is None else v, kind) for v in values])


def as_lanes(value, kind: str) -> np.ndarray:
    """An array of 32 lanes of what may be one number for all."""
    if isinstance(value, (int, bool)):
        return np.full(32, value, "?" if kind == "b1" else kind)
    return value


# By their names in generated code.
FUNCTIONS = (as_lanes, keep, merged, narrowed, part, raw_or_none, register_rows)
