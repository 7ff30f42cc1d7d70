"""Which components hold the same value in all lanes that can read them.

They are kept as Python ints, which makes the code of producer and matrix-issue warps many times faster. A component
varies when one of its definitions does, or when lanes that part at a branch can carry different definitions of it to
where they meet, or out of a loop that they leave at different times. Lanes that part meet again at the immediate
post-dominator of the branch; the scheduler sees to that.
"""

from __future__ import annotations

from collections import defaultdict

from ..ptx.syntax import Instruction
from .control_flow import ControlFlow, is_branch, is_exit
from .operations import Component, Copy, Effect, Not, Pure
from .special import VARYING


def components_of(source):
    """The components that a source reads."""
    if isinstance(source, tuple):
        for item in source:
            yield from components_of(item)
    elif isinstance(source, Not):
        yield source.component
    elif isinstance(source, Component):
        yield source


def reads(operation) -> tuple:
    if isinstance(operation, Copy):
        return (operation.source,)
    return operation.sources if isinstance(operation, Pure) else operation.inputs


def writes(operation) -> list[Component]:
    if isinstance(operation, Effect):
        return [c for c in components_of(operation.outputs) if c.name != "_"]
    return [] if operation.destination.name == "_" else [operation.destination]


def varying_components(flow: ControlFlow, operations: list[list]) -> set[str]:
    """The names of the components that differ between lanes, for the operations of each instruction."""
    return _Analysis(flow, operations).run()


class _Analysis:
    def __init__(self, flow: ControlFlow, operations: list[list]) -> None:
        self.flow, self.operations = flow, operations
        self.varying: set[str] = set(VARYING)
        self.defined: defaultdict[str, list[int]] = defaultdict(list)
        self.touched: defaultdict[str, set[int]] = defaultdict(set)
        self.guards: dict[int, str] = {}
        self._collect()

    def _collect(self) -> None:
        for block in self.flow.blocks:
            for index in range(block.start, block.stop):
                instruction = self.flow.kernel.instructions[index]
                if instruction.guard is not None:
                    self.guards[index] = instruction.guard.name
                    self.touched[instruction.guard.name].add(block.number)
                for operation in self.operations[index]:
                    for component in components_of(tuple(reads(operation))):
                        self.touched[component.name].add(block.number)
                    for component in writes(operation):
                        self.defined[component.name].append(block.number)
                        self.touched[component.name].add(block.number)

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

    def _visit_branch(self, block) -> None:
        index = block.stop - 1
        last: Instruction = self.flow.kernel.instructions[index]
        if not (is_branch(last) or is_exit(last)) or self.guards.get(index) not in self.varying:
            return
        meet = self.flow.reconvergence[block.number]
        sides = [self.flow.region(s, meet) for s in block.successors]
        region, both = 0, -1
        for side in sides:
            region |= side
            both &= side
        left = [
            loop
            for loop in self.flow.loops
            if loop >> block.number & 1 and any(not loop >> s & 1 for s in block.successors)
        ]
        for name, blocks in self.defined.items():
            if name in self.varying:
                continue
            parted = len(blocks) > 1 and any(region >> b & 1 for b in blocks) and not self._on_one_side(block, name)
            if parted or any(both >> b & 1 for b in blocks) or any(self._leaves(loop, name, blocks) for loop in left):
                self.varying.add(name)

    def _on_one_side(self, block, name: str) -> bool:
        """All that is done with a component is behind one way out of the branch, where the lanes are together."""
        for successor in block.successors:
            if self.flow.blocks[successor].predecessors == [block.number] and all(
                self.flow.dominators[b] >> successor & 1 for b in self.touched[name]
            ):
                return True
        return False

    def _leaves(self, loop: int, name: str, blocks: list[int]) -> bool:
        return any(loop >> b & 1 for b in blocks) and any(not loop >> b & 1 for b in self.touched[name])


def uniform_of(operation: Effect) -> tuple[str, ...]:
    """What the handler says of each output."""
    uniform = operation.handler.uniform
    return uniform if isinstance(uniform, tuple) else (uniform,) * len(operation.outputs)
