"""Straight-line code as a graph of operations, each with the level at which all its inputs are known."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..ptx.syntax import Instruction
from .operations import Component, Constant, Copy, Effect, Not, Pure, select
from .uniformity import uniform_of


class Val:
    """A value: a constant, a register's content at the start, or what an operation gives.

    Attributes:
      uniform: a Python int; otherwise an array of 32 lanes.
      kind: array type in which it is held.
      node: that gives it, or None.
      constant: its value, for constants.
      register: name of the component that it is loaded from.
      unset: the register may never have been written.
    """

    __slots__ = ("constant", "kind", "node", "number", "register", "uniform", "unset")

    def __init__(self, number: int, uniform: bool, kind: str, node: Node | None = None) -> None:
        self.number, self.uniform, self.kind, self.node = number, uniform, kind, node
        self.constant: int | None = None
        self.register: str | None = None
        self.unset = False


class Node:
    """An operation in the graph.

    Attributes:
      operation: Pure or Effect.
      inputs: a Val, or a tuple of Vals for `Rows`, for each input.
      outputs: likewise.
      guard: a predicate Val, or None; only of effects.
      old: what the outputs held before, for guarded effects.
      level: 1 + the highest level of the inputs.
      instruction: that it comes from.
    """

    __slots__ = ("guard", "inputs", "instruction", "level", "old", "operation", "outputs", "uniform")

    def __init__(self, operation, inputs: list, instruction: Instruction) -> None:
        self.operation, self.inputs, self.instruction = operation, inputs, instruction
        self.outputs: list = []
        self.guard: Val | None = None
        self.old: list = []
        self.level = 0
        self.uniform = False

    @property
    def is_effect(self) -> bool:
        return isinstance(self.operation, Effect)

    def all_inputs(self):
        yield from flat(self.inputs)
        yield from flat(self.old)
        if self.guard is not None:
            yield self.guard


def flat(values):
    for value in values:
        if isinstance(value, tuple):
            yield from value
        elif value is not None:
            yield value


class Graph:
    """The operations of some consecutive instructions of one block."""

    def __init__(self, varying: set[str], homes: dict[str, str], is_set: Callable[[str], bool]) -> None:
        self.varying, self.homes, self._is_set = varying, homes, is_set
        self.nodes: list[Node] = []
        self.content: dict[str, Val] = {}
        self.loaded: dict[str, Val] = {}
        self._constants: dict[tuple[int, str], Val] = {}
        self._count = 0
        self._effects_at = 0

    def _val(self, uniform: bool, kind: str, node: Node | None = None) -> Val:
        self._count += 1
        return Val(self._count, uniform, kind, node)

    def read(self, source, kind: str = "u4"):
        """The value of a source; a tuple for a tuple."""
        if isinstance(source, tuple):
            return tuple(self.read(s, kind) for s in source)
        if isinstance(source, Constant):
            return self._constant(source.value, kind)
        if isinstance(source, Not):
            return self._complement(self.read(source.component))
        value = self.content.get(source.name)
        if value is None:
            uniform = source.name not in self.varying
            value = self._val(uniform, source.kind if uniform else self.homes[source.name])
            value.register, value.unset = source.name, not self._is_set(source.name)
            self.content[source.name] = self.loaded[source.name] = value
        return value

    def _constant(self, value: int, kind: str) -> Val:
        key = (value, kind)
        if key not in self._constants:
            constant = self._val(True, kind)
            constant.constant = value
            self._constants[key] = constant
        return self._constants[key]

    def _complement(self, value: Val) -> Val:
        operation = Pure(("complement",), np.logical_not, (None,), ("b1",), Component("_", "b1"), "b1")
        return self._pure_node(operation, [value], self._instruction)

    def add(self, instruction: Instruction, operations: list) -> None:
        """Append the operations of an instruction."""
        self._instruction = instruction
        guard = None
        if instruction.guard is not None and operations:
            guard = self.read(Component(instruction.guard.name, "b1"))
            if instruction.negated:
                guard = self._complement(guard)
        for operation in operations:
            if isinstance(operation, Effect):
                self._add_effect(operation, instruction, guard)
            else:
                self._add_pure(operation, instruction, guard)

    def _add_pure(self, operation, instruction: Instruction, guard: Val | None) -> None:
        destination = operation.destination
        if isinstance(operation, Copy):
            value = self.read(operation.source, destination.kind)
        else:
            inputs = [self.read(s, _raw(t)) for s, t in zip(operation.sources, operation.types, strict=True)]
            value = self._pure_node(operation, inputs, instruction)
        if destination.name == "_":
            return
        if guard is not None:
            old = self.read(destination)
            chosen = select(None, None, None, destination)
            value = self._pure_node(chosen, [guard, value, old], instruction)
        self.content[destination.name] = value

    def _pure_node(self, operation: Pure, inputs: list, instruction: Instruction) -> Val:
        node = Node(operation, inputs, instruction)
        node.uniform = all(v.uniform for v in inputs)
        node.level = 1 + max((v.node.level for v in inputs if v.node), default=0)
        kind = operation.result
        if node.uniform and kind != "b1":
            kind = "u" + kind[1]
        value = self._val(node.uniform, kind, node)
        node.outputs = [value]
        self.nodes.append(node)
        return value

    def _add_effect(self, operation: Effect, instruction: Instruction, guard: Val | None) -> None:
        node = Node(operation, [self.read(s) for s in operation.inputs], instruction)
        node.guard = guard
        for output, uniform in zip(operation.outputs, uniform_of(operation), strict=True):
            if isinstance(output, tuple):
                node.outputs.append(tuple(self._output(c, False, node) for c in output))
            else:
                node.outputs.append(self._output(output, self._is_uniform(uniform, node), node))
        if guard is not None:
            node.old = [self._old(o) for o in operation.outputs]
        node.level = 1 + max((v.node.level for v in node.all_inputs() if v.node), default=0)
        node.level = self._effects_at = max(node.level, self._effects_at + 1)
        self.nodes.append(node)
        for component, value in zip(flat(operation.outputs), flat(node.outputs), strict=True):
            if component.name != "_":
                self.content[component.name] = value

    def _is_uniform(self, uniform: str, node: Node) -> bool:
        """Whether the handler gives an int; with a varying guard it is made an array afterwards."""
        if uniform == "always":
            return True
        inputs = node.inputs[1:] if uniform == "lane" else node.inputs
        return uniform != "never" and all(v.uniform for v in flat(inputs))

    def _output(self, component: Component, uniform: bool, node: Node) -> Val:
        if node.guard is not None:
            uniform = uniform and node.guard.uniform and component.name not in self.varying
        return self._val(uniform, component.kind, node)

    def _old(self, output):
        if isinstance(output, tuple):
            return tuple(self._old(c) for c in output)
        return None if output.name == "_" else self.read(output)


def _raw(kind: str) -> str:
    return kind if kind == "b1" else "u" + kind[1]
