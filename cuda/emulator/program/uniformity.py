"""Which components hold the same value in all lanes that can read them.

They are kept as Python ints, which makes the code of producer and matrix-issue warps many times faster. A component
varies when one of its definitions does, or when lanes that part at a branch may read what others wrote: where they
meet again, which is the immediate post-dominator of the branch, or on the other side, which for a loop that lanes
leave at different times is behind it. The scheduler keeps lanes that part apart until they meet.
"""

from __future__ import annotations

from collections import defaultdict

from ..ptx.syntax import Instruction
from .control_flow import Block, ControlFlow, is_branch, is_exit
from .liveness import Liveness
from .operations import Effect, components_of, reads, writes
from .special import VARYING


def varying_components(flow: ControlFlow, operations: list[list], liveness: Liveness) -> set[str]:
    """The names of the components that differ between lanes, for the operations of each instruction."""
    return _Analysis(flow, operations, liveness).run()


class _Analysis:
    def __init__(self, flow: ControlFlow, operations: list[list], liveness: Liveness) -> None:
        self.flow, self.operations, self.liveness = flow, operations, liveness
        self.varying: set[str] = set(VARYING)
        # For each component the blocks that define it, as bits.
        self.defined: defaultdict[str, int] = defaultdict(int)
        self.guards: dict[int, str] = {}
        for block in flow.blocks:
            for index in range(block.start, block.stop):
                guard = flow.kernel.instructions[index].guard
                if guard is not None:
                    self.guards[index] = guard.name
                for operation in operations[index]:
                    for component in writes(operation):
                        self.defined[component.name] |= 1 << block.number

    def run(self) -> set[str]:
        size = -1
        while size != len(self.varying):
            size = len(self.varying)
            for index in range(len(self.operations)):
                for operation in self.operations[index]:
                    self._visit(index, operation)
            for block in self.flow.blocks[:-1]:
                self._visit_branch(block)
        return self.varying

    def _varies(self, source) -> bool:
        return any(c.name in self.varying for c in components_of(source))

    def _visit(self, index: int, operation) -> None:
        guarded = self.guards.get(index) in self.varying
        if isinstance(operation, Effect):
            for output, uniform in zip(operation.outputs, uniform_of(operation), strict=True):
                if guarded or self._output_varies(operation, uniform):
                    self.varying |= {c.name for c in components_of(output)}
        elif guarded or self._varies(tuple(reads(operation))):
            self.varying.add(operation.destination.name)

    def _output_varies(self, operation: Effect, uniform: str) -> bool:
        if uniform == "always":
            return False
        if uniform == "inputs":
            return self._varies(operation.inputs)
        if uniform == "lane":
            return self._varies(operation.inputs[1:])
        return True

    def _visit_branch(self, block: Block) -> None:
        index = block.stop - 1
        last: Instruction = self.flow.kernel.instructions[index]
        if not (is_branch(last) or is_exit(last)) or self.guards.get(index) not in self.varying:
            return
        meet = self.flow.reconvergence[block.number]
        sides = [self.flow.region(s, meet) for s in block.successors]
        both = -1
        for side in sides:
            both &= side
        for name, blocks in self.defined.items():
            if name not in self.varying and (both & blocks or self._carried(name, blocks, block, sides, meet)):
                self.varying.add(name)

    def _carried(self, name: str, blocks: int, block: Block, sides: list[int], meet: int | None) -> bool:
        """Whether lanes of one side may read what lanes of the other side, or only some of them, have written.

        That is: something written on a side is read behind where the sides meet, or on the other side.
        """
        readers = [s for s in (meet,) if s is not None]
        for side, successor in zip(sides, block.successors, strict=True):
            others = [s for s in block.successors if s != successor]
            if side & blocks and any(self.liveness.is_live(name, number) for number in [*readers, *others]):
                return True
        return False


def uniform_of(operation: Effect) -> tuple[str, ...]:
    """What the handler says of each output."""
    uniform = operation.handler.uniform
    return uniform if isinstance(uniform, tuple) else (uniform,) * len(operation.outputs)
