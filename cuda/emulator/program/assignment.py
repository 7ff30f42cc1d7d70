"""Which components have certainly been written before a point of the program."""

from __future__ import annotations

from ..errors import Finding
from ..ptx.syntax import Kernel
from .control_flow import ControlFlow
from .operations import components_of, reads, writes


class Assignment:
    """Components written on every way to the start of a block, or to an instruction in it."""

    def __init__(self, flow: ControlFlow, operations: list[list]) -> None:
        self.flow, self.operations = flow, operations
        self._bits: dict[str, int] = {}
        written = [self._written(block.start, block.stop) for block in flow.blocks]
        everything = (1 << len(self._bits)) - 1
        self._before = [everything] * len(flow.blocks)
        self._before[0] = 0
        changed = True
        while changed:
            changed = False
            for block in flow.blocks[1:]:
                new = everything
                for number in block.predecessors:
                    new &= self._before[number] | written[number]
                if new != self._before[block.number]:
                    self._before[block.number], changed = new, True

    def _written(self, start: int, stop: int) -> int:
        names = 0
        for index in range(start, stop):
            if self.flow.kernel.instructions[index].guard is None:
                for operation in self.operations[index]:
                    for component in writes(operation):
                        names |= 1 << self._bits.setdefault(component.name, len(self._bits))
        return names

    def at(self, index: int, number: int) -> int:
        """The components written before an instruction of a block, for `is_in`."""
        return self._before[number] | self._written(self.flow.blocks[number].start, index)

    def is_in(self, name: str, components: int) -> bool:
        """Whether a component is among them."""
        bit = self._bits.get(name)
        return bit is not None and bool(components >> bit & 1)


def never_written(kernel: Kernel, operations: list[list], given: set[str]) -> list[Finding]:
    """One finding for each instruction that reads a register which no instruction writes."""
    written = given | {c.name for each in operations for operation in each for c in writes(operation)}
    findings = []
    for instruction, each in zip(kernel.instructions, operations, strict=True):
        names = [c.name for operation in each for c in components_of(tuple(reads(operation)))]
        if instruction.guard is not None:
            names.append(instruction.guard.name)
        missing = next((name for name in names if name not in written), None)
        if missing is not None:
            findings.append(Finding("register", f"{instruction.where} reads {missing}, which nothing writes"))
    return findings
