"""Python source for a graph of operations.

Operations of one kind whose inputs are known at the same level become one operation of an (n, 32) array: unrolled
loops over a tile run as a few array operations. A value is then one row of a group's array.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import numpy as np

from ..ptx.syntax import Instruction
from . import runtime
from .operations import Effect
from .scalars import by_array, expression
from .segment import Graph, Node, Val, flat

# Below this many operations a group is not worth gathering scattered inputs for.
_WORTH_GATHERING = 4


class Names:
    """Objects that generated code refers to, by name, shared by all functions of a program."""

    def __init__(self, **fixed) -> None:
        self.namespace = dict(fixed)
        self._names: dict[object, str] = {}

    def copy(self) -> Names:
        """The same names, to which others can be added."""
        new = Names(**self.namespace)
        new._names = dict(self._names)
        return new

    def __call__(self, key: object, value, prefix: str) -> str:
        """The name of a value; equal keys are one object."""
        if key not in self._names:
            name = f"{prefix}{len(self._names)}"
            self._names[key] = name
            self.namespace[name] = value
        return self._names[key]


class Emitter:
    """Writes the body of one function."""

    def __init__(self, graph: Graph, names: Names, slots: dict[str, int], masked: bool) -> None:
        self.graph, self.names, self.slots, self.masked = graph, names, slots, masked
        self.lines: list[str] = []
        self.rows: dict[int, tuple[str, int]] = {}
        self.sources: dict[int, str] = {}
        # Registers that may never have been written, as they are; `sources` has them with a NaN in place of nothing.
        self.raws: dict[int, str] = {}
        self._views: dict[tuple[int, str], str] = {}
        self._count = 0
        self.origin: list[int] = []

    # ---- text ----

    def line(self, text: str, node: Node | None = None) -> None:
        self.lines.append(text)
        self.origin.append(node.instruction.index if node is not None else -1)

    def _fresh(self, prefix: str = "t") -> str:
        self._count += 1
        return f"{prefix}{self._count}"

    # ---- values ----

    def scalar(self, value: Val) -> str:
        """A Python expression of an int or bool."""
        if value.constant is not None:
            return str(bool(value.constant)) if value.kind == "b1" else str(value.constant)
        if value.number not in self.sources:
            self._load(value)
        return self.sources[value.number]

    def _load(self, value: Val) -> None:
        if value.register is None:
            raise AssertionError("a value that no operation has given yet is not that of a register")
        name = self._fresh("r")
        self.line(f"{name} = r[{self.slots[value.register]}]")
        self.sources[value.number] = name
        if value.unset:
            self.raws[value.number] = name
            kind = value.kind if value.uniform else f"{value.kind} lanes"
            undefined = self.names(("undefined", kind), _undefined(value.kind, value.uniform), "U")
            defined = self._fresh("d")
            self.line(f"{defined} = {undefined} if {name} is None else {name}")
            self.sources[value.number] = defined

    def array(self, value: Val, kind: str) -> str:
        """An expression of 32 lanes of a type; an array scalar where all lanes agree."""
        if value.uniform:
            return self._typed_scalar(value, kind)
        key = (value.number, kind)
        if key in self._views:
            return self._views[key]
        if value.number not in self.sources:
            if value.number in self.rows:
                group, row = self.rows[value.number]
                name = self._fresh()
                self.line(f"{name} = {group}[{row}]")
                self.sources[value.number] = name
            else:
                self._load(value)
        text = self.sources[value.number]
        if value.kind != kind:
            name = self._fresh()
            self.line(f"{name} = {text}{_conversion(value.kind, kind)}")
            text = name
        self._views[key] = text
        return text

    def _typed_scalar(self, value: Val, kind: str) -> str:
        raw = "?" if kind == "b1" else "u" + kind[1]
        if value.constant is not None:
            constant = np.array(_fit(value.constant, kind), raw).view(_dtype(kind))[()]
            return self.names(("constant", value.constant, kind), constant, "K")
        maker = self.names(("scalar", kind), _scalar_maker(kind), "S")
        return f"{maker}({self.scalar(value)})"

    def full(self, value: Val, kind: str) -> str:
        """An expression of an array of 32 lanes, also where all lanes agree."""
        if not value.uniform:
            return self.array(value, kind)
        if value.constant is not None:
            raw = "?" if kind == "b1" else "u" + kind[1]
            constant = np.full(32, _fit(value.constant, kind), raw).view(_dtype(kind))
            constant.flags.writeable = False
            return self.names(("full", value.constant, kind), constant, "A")
        maker = self.names(("fuller", kind), _full_maker(kind), "F")
        return f"{maker}({self.scalar(value)})"

    # ---- nodes ----

    def emit(self, nodes: list[Node]) -> None:
        """All nodes, in the order of their levels; an effect first in the code comes before what it does not need."""
        first = next((n for n in nodes if n.is_effect), None)
        early = _ancestors(first) if first is not None and first.operation.handler.blocking else set()
        self._emit_levels([n for n in nodes if id(n) in early])
        self._emit_levels([n for n in nodes if id(n) not in early])

    def _emit_levels(self, nodes: list[Node]) -> None:
        levels: defaultdict[int, list[Node]] = defaultdict(list)
        for node in nodes:
            levels[node.level].append(node)
        for level in sorted(levels):
            groups: defaultdict[tuple, list[Node]] = defaultdict(list)
            for node in levels[level]:
                if node.is_effect:
                    self._effect(node)
                elif node.uniform:
                    self._uniform(node)
                else:
                    pattern = tuple(v.uniform for v in node.inputs)
                    groups[(node.operation.key, node.operation.types, pattern)].append(node)
            for group in groups.values():
                self._group(group)

    def _uniform(self, node: Node) -> None:
        operation, value = node.operation, node.outputs[0]
        sources = [self.scalar(v) for v in node.inputs]
        text = expression(operation.key, sources)
        if text is None:
            key = ("by_array", operation.key, operation.types)
            call = self.names(key, by_array(operation.function, operation.types, operation.result), "f")
            text = f"{call}({', '.join(sources)})"
        name = self._fresh("s")
        self.line(f"{name} = {text}", node)
        self.sources[value.number] = name

    def _group(self, nodes: list[Node]) -> None:
        if len(nodes) == 1 or (len(nodes) < _WORTH_GATHERING and not self._aligned(nodes)):
            for node in nodes:
                self._single(node)
            return
        if all(v is w for n in nodes for v, w in zip(n.inputs, nodes[0].inputs, strict=True)):
            self._single(nodes[0])
            for node in nodes[1:]:
                self.sources[node.outputs[0].number] = self.sources[nodes[0].outputs[0].number]
            return
        nodes = self._in_row_order(nodes)
        operation = nodes[0].operation
        inputs = [self.table([n.inputs[i] for n in nodes], kind) for i, kind in enumerate(operation.types)]
        name = self._fresh("g")
        self.line(f"{name} = {self._function(operation)}({', '.join(inputs)})", nodes[0])
        for row, node in enumerate(nodes):
            self.rows[node.outputs[0].number] = (name, row)

    def _single(self, node: Node) -> None:
        operation, value = node.operation, node.outputs[0]
        inputs = [self.array(v, kind) for v, kind in zip(node.inputs, operation.types, strict=True)]
        name = self._fresh()
        self.line(f"{name} = {self._function(operation)}({', '.join(inputs)})", node)
        self.sources[value.number] = name

    def _function(self, operation) -> str:
        return self.names(("function", operation.key, operation.types), operation.function, "f")

    # ---- tables: one row for each operation of a group ----

    def _aligned(self, nodes: list[Node]) -> bool:
        """Whether every input is one value, or rows of one group in order."""
        for i in range(len(nodes[0].inputs)):
            column = [n.inputs[i] for n in nodes]
            if not all(v.uniform for v in column) and len(set(map(id, column))) > 1 and self._slice(column) is None:
                return False
        return True

    def _in_row_order(self, nodes: list[Node]) -> list[Node]:
        for i in range(len(nodes[0].inputs)):
            column = [n.inputs[i] for n in nodes]
            places = self._places(column)
            if places is not None and len({v.number for v in column}) == len(column):
                rows = [row for _, row in places]
                return [nodes[j] for j in sorted(range(len(nodes)), key=rows.__getitem__)]
        return nodes

    def _places(self, column: list[Val]) -> list[tuple[str, int]] | None:
        """The group and the row of each value, if they are all rows of one group."""
        places = [self.rows[v.number] for v in column if v.number in self.rows]
        return places if len(places) == len(column) and len({group for group, _ in places}) == 1 else None

    def _slice(self, column: list[Val]) -> tuple[str, int, int, int] | None:
        places = self._places(column)
        if places is None:
            return None
        step = places[1][1] - places[0][1]
        if step <= 0 or any(b[1] - a[1] != step for a, b in pairwise(places)):
            return None
        return places[0][0], places[0][1], places[-1][1] + 1, step

    def table(self, column: list[Val], kind: str) -> str:
        """An expression that broadcasts to (n, 32)."""
        if all(v is column[0] for v in column):
            return self.array(column[0], kind)
        if all(v.uniform for v in column):
            return self._uniform_column(column, kind)
        cut = self._slice(column) if len(column) > 1 else None
        if cut is not None:
            group, start, stop, step = cut
            text = f"{group}[{start}:{stop}{f':{step}' if step > 1 else ''}]"
            return text + _conversion(column[0].kind, kind)
        places = self._places(column)
        if places is not None:
            index = tuple(p[1] for p in places)
            text = f"{places[0][0]}[{self.names(('index', index), np.array(index), 'I')}]"
            return text + _conversion(column[0].kind, kind)
        return self._gathered(column, kind)

    def _uniform_column(self, column: list[Val], kind: str) -> str:
        raw = "?" if kind == "b1" else "u" + kind[1]
        numbers = tuple(_fit(v.constant, kind) for v in column if v.constant is not None)
        if len(numbers) == len(column):
            constant = np.array(numbers, raw).view(_dtype(kind))[:, None]
            return self.names(("column", numbers, kind), constant, "C")
        maker = self.names(("columner", kind), _column_maker(kind), "M")
        return f"{maker}(({', '.join(self.scalar(v) for v in column)},))"

    def _gathered(self, column: list[Val], kind: str) -> str:
        pieces, flat_pieces, i = [], True, 0
        while i < len(column):
            j, cut = i + 1, None
            while j < len(column) and (longer := self._slice(column[i : j + 1])) is not None:
                j, cut = j + 1, longer
            if cut is not None and j - i > 2:
                group, start, stop, step = cut
                text = f"{group}[{start}:{stop}{f':{step}' if step > 1 else ''}]"
                pieces.append((text + _conversion(column[i].kind, kind), True))
                flat_pieces = False
            else:
                pieces.extend((self.full(v, kind), False) for v in column[i:j])
            i = j
        if flat_pieces:
            return f"concatenate(({', '.join(p for p, _ in pieces)},)).reshape({len(column)}, 32)"
        return f"concatenate(({', '.join(p if two else f'{p}[None]' for p, two in pieces)},))"

    # ---- effects ----

    def _effect(self, node: Node) -> None:
        operation: Effect = node.operation
        run = self.names(("run", id(operation.handler)), operation.handler.run, "h")
        if node.guard is None:
            self._call(node, run, "m", "")
            return
        guard = self.scalar(node.guard) if node.guard.uniform else self.array(node.guard, "b1")
        self.require(node.guard, node.instruction)
        olds = [self.scalar(v) if v.uniform else self.array(v, _raw(v.kind)) for v in flat(node.old)]
        arguments = self._arguments(node)
        if node.guard.uniform:
            self.line(f"if {guard}:", node)
            mask = "m"
        else:
            mask = self._fresh("m")
            self.line(f"{mask} = narrowed(m, {guard})", node)
            self.line(f"if {mask} is not False:", node)
        self._call(node, run, mask, "    ", arguments)
        outputs = list(flat(node.outputs))
        if outputs:
            self._merge_guarded(node, outputs, olds, mask)

    def _arguments(self, node: Node) -> list[str]:
        arguments = []
        for value in node.inputs:
            if isinstance(value, tuple):
                arguments.append(self._all_rows(value))
                continue
            text = self.scalar(value) if value.uniform else self.array(value, _raw(value.kind))
            if value.number in self.raws:
                text = f"({self._required(value, node.instruction)}, {text})[1]"
            arguments.append(text)
        return arguments

    def _required(self, value: Val, instruction: Instruction) -> str:
        message = f"{instruction.where}: the register {value.register} is read but was never written"
        return f"required({self.raws[value.number]}, {self.names(('message', message), message, 'E')})"

    def require(self, value: Val, instruction: Instruction) -> None:
        """Make it a fault if an instruction gets a register that was never written."""
        if value.number in self.raws:
            self.line(self._required(value, instruction))

    def _all_rows(self, values: tuple[Val, ...]) -> str:
        kind = _raw(values[0].kind)
        if len(values) == 1:
            return f"{self.full(values[0], kind)}[None]"
        if len(set(map(id, values))) == 1 or all(v.uniform for v in values):
            return f"broadcast_to({self.table(list(values), kind)}, ({len(values)}, 32))"
        return self.table(list(values), kind)

    def _call(self, node: Node, run: str, mask: str, indent: str, arguments: list[str] | None = None) -> None:
        handler = node.operation.handler
        arguments = self._arguments(node) if arguments is None else arguments
        targets = []
        for value in node.outputs:
            name = self._fresh("o")
            targets.append(name)
            if isinstance(value, tuple):
                for row, v in enumerate(value):
                    self.rows[v.number] = (name, row)
            else:
                self.sources[value.number] = name
        call = f"{run}(w, {', '.join([mask, *arguments])})"
        may_wait = handler.blocking or (handler.convergent and self.masked) or (handler.convergent and mask != "m")
        if may_wait:
            self.line(f"{indent}x = {call}", node)
            self.line(f"{indent}if x.__class__ is Wait: return x", node)
            if targets:
                self.line(f"{indent}{_targets(targets)} = x", node)
        else:
            self.line(f"{indent}{_targets(targets)} = {call}" if targets else f"{indent}{call}", node)

    def _merge_guarded(self, node: Node, outputs: list[Val], olds: list[str], mask: str) -> None:
        """Where the guard is false, the outputs are what the registers held before."""
        texts = []
        for value in outputs:
            if value.number in self.rows:
                group, row = self.rows.pop(value.number)
                texts.append(f"{group}[{row}]")
            else:
                texts.append(self.sources.pop(value.number))
        names = [self._fresh() for _ in outputs]
        for name, text, old, value in zip(names, texts, olds, outputs, strict=True):
            if not value.uniform:
                text = f"as_lanes({text}, {value.kind!r})"
                if node.guard is not None and not node.guard.uniform:
                    text = f"keep({mask}, {text}, {old})"
            self.line(f"    {name} = {text}", node)
        self.line("else:", node)
        for name, old, value in zip(names, olds, outputs, strict=True):
            self.line(f"    {name} = {old if value.uniform else f'as_lanes({old}, {value.kind!r})'}", node)
            self.sources[value.number] = name

    # ---- registers ----

    def store(self, live: set[str]) -> None:
        """Write back the registers that are read later; all are read before the first is written."""
        lines = []
        for name in sorted(self.graph.content):
            value = self.graph.content[name]
            if name not in live or value is self.graph.loaded.get(name):
                continue
            slot = self.slots[name]
            if name not in self.graph.varying:
                lines.append(f"r[{slot}] = {self.scalar(value)}")
                continue
            text = self.full(value, self.graph.homes[name])
            lines.append(f"r[{slot}] = merged(m, {text}, r[{slot}])" if self.masked else f"r[{slot}] = {text}")
        for line in lines:
            self.line(line)


def _undefined(kind: str, uniform: bool):
    """What stands for a register that was never written: no predicate, or a NaN."""
    if kind == "b1":
        return False if uniform else np.zeros(32, bool)
    bits = runtime.UNDEFINED >> 16 if kind[1] == "2" else runtime.UNDEFINED
    return bits if uniform else np.full(32, bits, "u" + kind[1]).view(kind)


def _targets(names: list[str]) -> str:
    return ", ".join(names)


def _raw(kind: str) -> str:
    return kind if kind == "b1" else "u" + kind[1]


def _dtype(kind: str) -> np.dtype:
    return np.dtype("?" if kind == "b1" else kind)


def _fit(value: int, kind: str) -> int:
    return bool(value) if kind == "b1" else value & ((1 << 8 * int(kind[1])) - 1)


def _conversion(have: str, want: str) -> str:
    """The method that turns an array of one type into another of the same bits, truncated or extended with zeros."""
    if have == want:
        return ""
    if have[1] == want[1] and "b1" not in (have, want):
        return f".view({want!r})"
    if want[0] == "u":
        return f".astype({want!r})" if have[0] == "u" else f".view('u{have[1]}').astype({want!r})"
    return f".astype('u{want[1]}').view({want!r})"


def _scalar_maker(kind: str):
    if kind == "b1":
        return np.bool_
    raw, mask = np.dtype("u" + kind[1]).type, (1 << 8 * int(kind[1])) - 1
    if kind[0] == "u":
        return lambda x: raw(x & mask)
    typed = np.dtype(kind)
    return lambda x: raw(x & mask).view(typed)


def _full_maker(kind: str):
    if kind == "b1":
        return lambda x: np.full(32, x, bool)
    raw, mask, typed = np.dtype("u" + kind[1]), (1 << 8 * int(kind[1])) - 1, np.dtype(kind)
    return lambda x: np.full(32, x & mask, raw).view(typed)


def _column_maker(kind: str):
    if kind == "b1":
        return lambda xs: np.array(xs, bool)[:, None]
    raw, mask, typed = np.dtype("u" + kind[1]), (1 << 8 * int(kind[1])) - 1, np.dtype(kind)
    return lambda xs: np.array([x & mask for x in xs], raw).view(typed)[:, None]


def _ancestors(node: Node) -> set[int]:
    seen, stack = {id(node)}, [node]
    while stack:
        for value in stack.pop().all_inputs():
            if value.node is not None and id(value.node) not in seen:
                seen.add(id(value.node))
                stack.append(value.node)
    return seen
