"""A kernel as Python functions, each for a stretch of straight-line code, made when it is first reached."""

from __future__ import annotations

import copy
import itertools
from collections import defaultdict
from collections.abc import Iterable
from functools import cached_property

import numpy as np

from ..errors import EmulationError, Finding
from ..machine.wait import Wait
from ..ptx.syntax import Kernel
from . import runtime, special
from .assignment import Assignment, never_written
from .control_flow import Block, ControlFlow, is_branch, is_exit
from .emit import Emitter, Names
from .liveness import Liveness
from .loads import completing_uses
from .operations import Component, Decoder, Effect, components_of, reads, writes
from .registers import early_uses
from .scalars import truncated_quotient
from .segment import Graph, Val
from .uniformity import varying_components

_NUMBERS = itertools.count()


class Program:
    """The functions of a kernel.

    `function(pc, masked)` gives what runs from instruction `pc` to the next place where a warp may have to wait, or
    to the end of its block. It is called with the warp and the mask, and returns the next pc, a Wait (try again), a
    Parting (lanes go different ways) or runtime.EXIT. Its attribute `length` counts instructions.

    Attributes:
      kernel: the PTX kernel.
      flow: its blocks.
      varying: names of the components that differ between lanes.
      slots: place of each component in a warp's registers.
      operations: of each instruction.
    """

    def __init__(self, kernel: Kernel, varying: set[str] | None = None) -> None:
        self.kernel = kernel
        decoder = Decoder(kernel)
        self.operations = [[] if is_branch(i) or is_exit(i) else decoder.decode(i) for i in kernel.instructions]
        self.specials = decoder.specials
        self.flow = ControlFlow(kernel)
        for index, effects in completing_uses(kernel, self.flow).items():
            self.operations[index] = [*effects, *self.operations[index]]
        self._liveness = Liveness(self.flow, self.operations)
        if varying is None:
            varying = varying_components(self.flow, self.operations, self._liveness)
        self.varying = varying
        self._homes, self.slots = self._places()
        self._assignment = Assignment(self.flow, self.operations)
        self._block_of = [b for b in self.flow.blocks for _ in range(b.stop - b.start)]
        count = len(kernel.instructions)
        self._functions: dict[bool, list[runtime.Function | None]] = {
            masked: [None] * (count + 1) for masked in (False, True)
        }
        for table in self._functions.values():
            table[count] = runtime.leave
        self._names = Names(
            Wait=Wait,
            EXIT=runtime.EXIT,
            truncated_quotient=truncated_quotient,
            concatenate=np.concatenate,
            broadcast_to=np.broadcast_to,
            **{f.__name__: f for f in runtime.FUNCTIONS},
        )
        self._file = f"<PTX of {kernel.name}, program {next(_NUMBERS)}>"

    def _places(self) -> tuple[dict[str, str], dict[str, int]]:
        homes: dict[str, str] = {}
        votes: defaultdict[str, set[str]] = defaultdict(set)
        for operations, instruction in zip(self.operations, self.kernel.instructions, strict=True):
            if instruction.guard is not None:
                homes[instruction.guard.name] = "b1"
            for operation in operations:
                for component in components_of(tuple(reads(operation))):
                    homes[component.name] = component.kind
                for component in writes(operation):
                    homes[component.name] = component.kind
                    if not isinstance(operation, Effect) and hasattr(operation, "result"):
                        votes[component.name].add(operation.result)
        for name, kinds in votes.items():
            if len(kinds) == 1 and homes[name] != "b1":
                kind = next(iter(kinds))
                if kind[1] == homes[name][1] and kind != "b1":
                    homes[name] = kind
        return homes, {name: i for i, name in enumerate(homes)}

    def initial_registers(self, cta, index: int, tid: np.ndarray) -> list:
        """The registers of a warp that starts: special registers set, the others None."""
        registers: list = [None] * len(self.slots)
        for name, value in special.values(self.specials, cta, index, tid).items():
            if name in self.slots:
                registers[self.slots[name]] = value
        return registers

    @cached_property
    def static_findings(self) -> list[Finding]:
        """What is found in the text: registers that are used too early, or never written."""
        return early_uses(self.kernel) + never_written(self.kernel, self.operations, self.specials)

    def tables(self) -> tuple[list, list]:
        """The functions so far: for all lanes, and for some."""
        return self._functions[False], self._functions[True]

    def function(self, pc: int, masked: bool) -> runtime.Function:
        """The function for a stretch of code that starts at `pc`."""
        function = self._functions[masked][pc]
        if function is None:
            function = self._functions[masked][pc] = self._make(pc, masked)
        return function

    def altered(self, kernel: Kernel) -> Program:
        """The program of a kernel that differs in a few instructions, sooner than from nothing.

        The other kernel must not make a component vary between lanes that does not vary here.
        """
        both = zip(kernel.instructions, self.kernel.instructions, strict=True)
        changed = [new for new, old in both if new is not old]
        anew = any(i.opcode.startswith("tcgen05.ld") or is_branch(i) or is_exit(i) for i in changed)
        if anew or kernel.labels != self.kernel.labels:
            return Program(kernel, self.varying)
        new = copy.copy(self)
        new.kernel, new.flow = kernel, self.flow.of(kernel)
        new.operations = list(self.operations)
        decoder, uses = Decoder(kernel), completing_uses(kernel, new.flow)
        for instruction in changed:
            new.operations[instruction.index] = [*uses.get(instruction.index, ()), *decoder.decode(instruction)]
        homes, slots = new._places()
        new._homes = homes | self._homes
        new.slots = self.slots | {name: len(self.slots) + i for i, name in enumerate(slots.keys() - self.slots.keys())}
        new._liveness = Liveness(new.flow, new.operations, self._liveness)
        new._assignment = Assignment(new.flow, new.operations)
        new.__dict__.pop("static_findings", None)
        new._names = self._names.copy()
        for masked, table in self._functions.items():
            new._functions = new._functions | {masked: list(table)}
        if not new._liveness.within(self._liveness):
            new._forget(new.flow.blocks)
        new._forget({new._block_of[i.index].number: new._block_of[i.index] for i in changed}.values())
        return new

    def _forget(self, blocks: Iterable[Block]) -> None:
        """Let the functions of some blocks be made again."""
        for block in blocks:
            for table in self._functions.values():
                table[block.start : block.stop] = [None] * (block.stop - block.start)

    # ---- making functions ----

    def _stop(self, pc: int, block: Block, masked: bool) -> int:
        """Where a stretch of code ends: before an instruction at which the warp may have to wait."""
        for index in range(pc + 1, block.stop):
            for operation in self.operations[index]:
                if isinstance(operation, Effect):
                    handler = operation.handler
                    narrowed = masked or self._has_varying_guard(index)
                    if handler.blocking or (handler.convergent and narrowed):
                        return index
        return block.stop

    def _is_set(self, name: str, assigned: int) -> bool:
        return name in self.specials or self._assignment.is_in(name, assigned)

    def _has_varying_guard(self, index: int) -> bool:
        guard = self.kernel.instructions[index].guard
        return guard is not None and guard.name in self.varying

    def _make(self, pc: int, masked: bool):
        block = self._block_of[pc]
        stop = self._stop(pc, block, masked)
        assigned = self._assignment.at(pc, block.number)
        graph = Graph(self.varying, self._homes, lambda name: self._is_set(name, assigned))
        for index in range(pc, stop):
            graph.add(self.kernel.instructions[index], self.operations[index])
        emitter = Emitter(graph, self._names, self.slots, masked)
        live = self._liveness.at(stop, block)
        next_guard = self.kernel.instructions[stop].guard if stop < block.stop else None
        if next_guard is not None:
            live.add(next_guard.name)
        last = self.kernel.instructions[stop - 1]
        ending: Val | None = None
        if stop == block.stop and (is_branch(last) or is_exit(last)) and last.guard is not None:
            ending = graph.read(Component(last.guard.name, "b1"))
        emitter.emit(_needed(graph, live, ending))
        if ending is not None:
            guard = emitter.scalar(ending) if ending.uniform else emitter.array(ending, "b1")
            emitter.require(ending, last)
        emitter.store(live)
        if stop < block.stop:
            emitter.line(f"return {stop}")
        elif ending is not None:
            emitter.line(self._conditional(last, ending.uniform, guard, block))
        elif is_branch(last):
            emitter.line(f"return {self.flow.target(last)}")
        else:
            emitter.line("return EXIT" if is_exit(last) else f"return {stop}")
        return self._compile(emitter, pc, stop, masked)

    def _conditional(self, last, uniform: bool, guard: str, block: Block) -> str:
        target = self.flow.target(last) if is_branch(last) else len(self.kernel.instructions)
        if last.negated:
            guard = f"not {guard}" if uniform else f"~{guard}"
        if uniform:
            return f"return {target} if {guard} else {block.stop}"
        meet = self.flow.reconvergence[block.number]
        # Lanes that do not meet before the exit leave one group after the other.
        meet_at = -1 if meet in (None, self.flow.exit) else self.flow.blocks[meet].start
        return f"return part(m, {guard}, {target}, {block.stop}, {meet_at})"

    def _compile(self, emitter: Emitter, pc: int, stop: int, masked: bool):
        name = f"at_{pc}{'_masked' if masked else ''}"
        source = "\n    ".join([f"def {name}(w, m):", "r = w.registers", *emitter.lines])
        namespace = self._names.namespace
        exec(compile(source, self._file, "exec"), namespace)
        function = namespace.pop(name)
        function.length = stop - pc
        function.origin = emitter.origin
        function.source = source
        return function

    def explain(self, error: Exception, pc: int, function: runtime.Function) -> EmulationError:
        """An unexpected exception of generated code, with the instruction at which it happened."""
        where = self.kernel.instructions[pc].where
        traceback = error.__traceback__
        while traceback is not None:
            if traceback.tb_frame.f_code.co_filename == self._file:
                line = traceback.tb_lineno - 3
                if 0 <= line < len(function.origin) and function.origin[line] >= 0:
                    where = self.kernel.instructions[function.origin[line]].where
            traceback = traceback.tb_next
        return EmulationError(f"{where}: {type(error).__name__}: {error}")


def _needed(graph: Graph, live: set[str], ending) -> list:
    """The nodes whose results are used."""
    wanted = [graph.content[name] for name in live if name in graph.content]
    if ending is not None:
        wanted.append(ending)
    used, stack = set(), [v.node for v in wanted if v.node is not None] + [n for n in graph.nodes if n.is_effect]
    while stack:
        node = stack.pop()
        if id(node) in used:
            continue
        used.add(id(node))
        stack.extend(v.node for v in node.all_inputs() if v.node is not None)
    return [n for n in graph.nodes if id(n) in used]
