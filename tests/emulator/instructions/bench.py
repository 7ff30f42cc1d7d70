"""Runs single instructions on memories set up by hand: a machine whose operations take effect at once."""

from __future__ import annotations

import numpy as np

import cuda.emulator.instructions.families  # noqa: F401
from cuda.emulator.checks.races import Monitor
from cuda.emulator.errors import UnsupportedInstructionError
from cuda.emulator.instructions.handler import handler_of
from cuda.emulator.instructions.tcgen05_mma import Product
from cuda.emulator.machine.engines import Operation
from cuda.emulator.machine.memory import SHARED_BASE, SharedMemory
from cuda.emulator.machine.tensor_memory import TensorMemory
from cuda.emulator.machine.warp import Cta, Warp
from cuda.emulator.ptx.parser import parse
from cuda.emulator.ptx.syntax import Instruction
from tests.emulator.text import module


class Bench:
    """A cluster of CTAs of four warps each.

    Attributes:
      findings: reported, as (kind, text).
      monitor: of races, or None.
      ctas: by rank.
      shown: products of tcgen05.mma.
    """

    def __init__(self, ctas: int = 1, shared_bytes: int = 65536, races: bool = False) -> None:
        self.findings: list[tuple[str, str]] = []
        self.monitor = Monitor(self.report) if races else None
        self.ctas: list[Cta] = []
        self._last: dict[object, object] = {}
        self.shown: list[Product] = []
        self.products = self.shown.append
        for rank in range(ctas):
            cta = Cta(self, (rank, 0, 0), rank, self.ctas)
            cta.shared = SharedMemory(rank, shared_bytes, self.monitor)
            cta.tensor = TensorMemory(rank, self.monitor)
            self.ctas.append(cta)
            for number in range(4):
                actor = self.monitor.warp((cta.index, number), f"warp {number}") if self.monitor else None
                cta.warps.append(Warp(cta, number, np.ones(32, bool), actor))

    def report(self, kind: str, text: str) -> None:
        self.findings.append((kind, text))

    def changed(self) -> None:
        pass

    def issue(self, warp, engine, instruction, effect, stream=None) -> Operation:
        actor = None
        if self.monitor is not None:
            actor = self.monitor.operation(warp.actor, engine, stream, self._last.get(stream))
            self._last[stream] = actor
        operation = Operation(engine, warp, actor, instruction, 0)
        effect(operation)
        return operation

    def run(self, text: str, *values, warp: int = 0, cta: int = 0, lane: int | None = None):
        """Execute a statement with the values of its handler's inputs, by all lanes or by one."""
        mask = None if lane is None else np.arange(32) == lane
        return run_handler(text)(self.ctas[cta].warps[warp], mask, *values)

    def one(self, text: str, *values, warp: int = 0, cta: int = 0) -> None:
        """Execute a statement by one thread."""
        self.run(text, *values, warp=warp, cta=cta, lane=0)

    def fill_shared(self, addresses: np.ndarray, data: np.ndarray, cta: int = 0) -> None:
        """Bytes at shared addresses."""
        shared = self.ctas[cta].shared
        shared.data[addresses] = data
        shared.written.reshape(-1, 16)[np.unique(addresses) // 16] = 1

    def fill_tensor(self, column: int, words: np.ndarray, cta: int = 0) -> None:
        """(columns, 128) words; the columns are allocated with all others if they are not yet."""
        tensor = self.ctas[cta].tensor
        if not tensor.allocations:
            tensor.allocate(0, 512)
        tensor.data[column : column + len(words)] = words
        tensor.written[column : column + len(words)] = True


START = 2 * SHARED_BASE


def statement(text: str) -> Instruction:
    """One statement, parsed."""
    return parse(module(text)).instructions[0]


def run_handler(text: str):
    """The handler's function of one statement."""
    instruction = statement(text)
    handler = handler_of(instruction)
    if handler is None:
        raise UnsupportedInstructionError(text)
    return handler.run


def vector(prefix: str, count: int) -> str:
    return "{" + ", ".join(f"{prefix}{i}" for i in range(count)) + "}"
