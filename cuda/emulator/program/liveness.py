"""Which components are read again before they are written."""

from __future__ import annotations

from .control_flow import ControlFlow
from .operations import components_of, reads, writes


class Liveness:
    """Live components at the start of blocks, and on request within them.

    To be compared with another one, it has to be made with its numbers of components: `like`.
    """

    def __init__(self, flow: ControlFlow, operations: list[list], like: Liveness | None = None) -> None:
        self.flow, self.operations = flow, operations
        self._numbers: dict[str, int] = dict(like._numbers) if like is not None else {}
        self._names: list[str] = list(like._names) if like is not None else []
        self._use = [0] * len(flow.blocks)
        self._kill = [0] * len(flow.blocks)
        for block in flow.blocks:
            self._use[block.number], self._kill[block.number] = self._scan(block.start, block.stop)
        self._live = [0] * len(flow.blocks)
        changed = True
        while changed:
            changed = False
            for block in reversed(flow.blocks):
                new = self._use[block.number] | self._live_out(block) & ~self._kill[block.number]
                if new != self._live[block.number]:
                    self._live[block.number], changed = new, True

    def is_live(self, name: str, number: int) -> bool:
        """Whether a component is live at the start of a block."""
        return bool(self._live[number] & self._bit(name))

    def _bit(self, name: str) -> int:
        if name not in self._numbers:
            self._numbers[name] = len(self._names)
            self._names.append(name)
        return 1 << self._numbers[name]

    def _scan(self, start: int, stop: int) -> tuple[int, int]:
        used = killed = 0
        for index in range(start, stop):
            instruction = self.flow.kernel.instructions[index]
            if instruction.guard is not None:
                used |= self._bit(instruction.guard.name) & ~killed
            for operation in self.operations[index]:
                for component in components_of(tuple(reads(operation))):
                    used |= self._bit(component.name) & ~killed
                for component in writes(operation):
                    # Under a guard the old value remains in the other lanes.
                    if instruction.guard is None:
                        killed |= self._bit(component.name)
                    else:
                        used |= self._bit(component.name) & ~killed
        return used, killed

    def _live_out(self, block) -> int:
        live = 0
        for successor in block.successors:
            live |= self._live[successor]
        return live

    def within(self, other: Liveness) -> bool:
        """Whether nothing is live at the start of a block that is not live there in the other, which this is `like`."""
        return not any(mine & ~theirs for mine, theirs in zip(self._live, other._live, strict=True))

    def at(self, index: int, block) -> set[str]:
        """The names of the components that are live before instruction `index` of a block (its stop: at its end)."""
        used, killed = self._scan(index, block.stop)
        live = used | self._live_out(block) & ~killed
        names = set()
        while live:
            low = live & -live
            names.add(self._names[low.bit_length() - 1])
            live ^= low
        return names
