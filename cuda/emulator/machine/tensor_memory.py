"""Tensor memory: 512 columns of 128 lanes of 32 bits, its allocations, and who accessed it last.

An address has the lane in bits 16 and up and the column in the low 16 bits (PTX ISA, "Tensor Memory Addressing").
"""

from __future__ import annotations

import numpy as np

from ..checks.races import Actor, Monitor, Shadow
from ..errors import MemoryFaultError
from ..ptx.syntax import Instruction

COLUMNS, LANES = 512, 128
QUADRANT = 32  # lanes that one warp of a warpgroup reaches
CELL_LANES = 16  # lanes of one cell of race checking, which is one column wide
_NEVER_WRITTEN = 0xFFC0DEAD  # a NaN as float32


def split_address(address: int) -> tuple[int, int]:
    """The lane and the column of a tensor memory address."""
    return address >> 16 & 0xFFFF, address & 0xFFFF


class TensorMemory:
    """One CTA's tensor memory.

    Attributes:
      data: (512, 128) uint32, by column and lane.
      written: which cells were written since their columns were allocated.
      allocations: first column to number of columns.
      pair: what the collective allocations of a CTA pair share, kept at its first CTA.
    """

    def __init__(self, rank: int, monitor: Monitor | None = None) -> None:
        self.rank, self.monitor = rank, monitor
        self.data = np.full((COLUMNS, LANES), _NEVER_WRITTEN, np.uint32)
        self.written = np.zeros((COLUMNS, LANES), bool)
        self.shadow = Shadow(f"tensor memory of CTA rank {rank}", (COLUMNS, LANES // CELL_LANES))
        self.allocations: dict[int, int] = {}
        self._allocated = 0  # bit c: column c
        self.pair: object | None = None

    # ---- allocation ----

    def fits(self, first: int, columns: int) -> bool:
        """Whether these columns exist and are free."""
        return first + columns <= COLUMNS and not self._allocated >> first & ((1 << columns) - 1)

    def allocate(self, first: int, columns: int) -> None:
        """Take free columns; what they held is gone."""
        self.allocations[first] = columns
        self._allocated |= ((1 << columns) - 1) << first
        self.written[first : first + columns] = False

    def deallocate(self, first: int, columns: int, actor: Actor | None, instruction: Instruction) -> None:
        """Free one whole allocation; accesses of it that are not ordered before are races."""
        if self.allocations.get(first) != columns:
            raise MemoryFaultError(
                f"{instruction.where}: {columns} columns at {first} are no allocation; there are {self._describe()}"
            )
        if self.monitor is not None and actor is not None:
            cells = slice(first, first + columns)
            self.monitor.write(self.shadow, cells, actor, instruction, False)
            # The next owner gets the columns from the allocator, which orders it after this.
            self.shadow.writer[cells] = 0
            for column in self.shadow.readers.values():
                column[cells] = 0
        del self.allocations[first]
        self._allocated &= ~(((1 << columns) - 1) << first)

    def _describe(self) -> str:
        spans = (f"columns {first}..{first + n - 1}" for first, n in sorted(self.allocations.items()))
        return ", ".join(spans) or "no allocations"

    # ---- accesses ----

    def read(self, column: int, columns: int, lanes: slice | np.ndarray, actor: Actor | None, instruction: Instruction):
        """(columns, lanes) uint32 of `lanes`, a slice or indices; a view where they are a slice."""
        self._check(column, columns, instruction)
        window = (slice(column, column + columns), lanes)
        if not self.written[window].all():
            at, lane = np.argwhere(~self.written[window])[0]
            lane = np.arange(LANES)[lanes][lane]
            raise MemoryFaultError(
                f"{instruction.where}: reads tensor memory of CTA rank {self.rank} at column {column + at}, "
                f"lane {lane}, which was never written"
            )
        if self.monitor is not None and actor is not None:
            self.monitor.read(self.shadow, (window[0], _cells(lanes)), actor, instruction, False)
        return self.data[window]

    def write(
        self, column: int, values: np.ndarray, lanes: slice | np.ndarray, actor: Actor | None, instruction: Instruction
    ):
        """Store (columns, lanes) uint32 from a column on, in `lanes`, a slice or indices."""
        self._check(column, len(values), instruction)
        window = (slice(column, column + len(values)), lanes)
        if self.monitor is not None and actor is not None:
            self.monitor.write(self.shadow, (window[0], _cells(lanes)), actor, instruction, False)
        self.data[window] = values
        self.written[window] = True

    def _check(self, column: int, columns: int, instruction: Instruction) -> None:
        wanted = ((1 << columns) - 1) << column
        if wanted & ~self._allocated:
            raise MemoryFaultError(
                f"{instruction.where}: columns {column}..{column + columns - 1} of CTA rank {self.rank} are not all "
                f"allocated; there are {self._describe()}"
            )


def first_fit(memories: list[TensorMemory], columns: int) -> int | None:
    """The first column from which `columns` are free in all of some tensor memories, or None."""
    ends = {0} | {first + n for memory in memories for first, n in memory.allocations.items()}
    return next((c for c in sorted(ends) if all(m.fits(c, columns) for m in memories)), None)


def _cells(lanes: slice | np.ndarray):
    if isinstance(lanes, slice):
        return slice(lanes.start // CELL_LANES, -(-lanes.stop // CELL_LANES))
    return np.unique(lanes // CELL_LANES)
