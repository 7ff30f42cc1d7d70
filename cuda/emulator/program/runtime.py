"""What generated functions call and return."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from ..errors import EmulationError
from ..machine.warp import Parting


class _Exit:
    def __repr__(self) -> str:
        return "EXIT"


EXIT = _Exit()


class Function(Protocol):
    """The code of some consecutive instructions.

    Attributes:
      length: counts them.
      origin: for each line, the index of the instruction that it comes from, or -1.
    """

    length: int
    origin: list[int]

    def __call__(self, warp, mask): ...


class _Leave:
    def __init__(self) -> None:
        self.length = 0
        self.origin: list[int] = []

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


# What a register holds that was never written: a NaN, and no address.
UNDEFINED = 0xFFC0DEAD


def keep(guard: np.ndarray | None, new: np.ndarray, old: np.ndarray) -> np.ndarray:
    """`new` where the guard holds, elsewhere the old content."""
    return new if guard is None else np.where(guard, new, old)


def merged(mask: np.ndarray | None, new: np.ndarray, old: np.ndarray | None) -> np.ndarray:
    """`new` in the lanes of a mask, elsewhere the old content, if there is any."""
    if mask is None:
        return new
    if old is None:
        old = np.zeros(32, bool) if new.dtype == bool else np.full(32, UNDEFINED, np.uint64).astype(f"u{new.itemsize}")
    return np.where(mask, new, old.view(new.dtype))


def required(register: object, message: str) -> None:
    """A register that an instruction needs has to have been written."""
    if register is None:
        raise EmulationError(message)


def as_lanes(value, kind: str) -> np.ndarray:
    """An array of 32 lanes of what may be one number for all."""
    if isinstance(value, (int, bool)):
        return np.full(32, value, "?" if kind == "b1" else kind)
    return value


# By their names in generated code.
FUNCTIONS = (as_lanes, keep, merged, narrowed, part, required)
