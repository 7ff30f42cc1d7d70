"""Registers that an asynchronous wgmma still uses, used too early: a check of the text.

`wgmma.mma_async` uses its accumulators and its A registers until a `wgmma.wait_group` covers it, and what other
instructions write to them needs a `wgmma.fence` before the next `wgmma.mma_async`, as does the first one (PTX ISA). A
`mov` does not count as a write: compilers put those that set out a loop's registers behind the fence. Loads of tensor
memory need no such check: the ISA respects register dependencies there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from ..errors import Finding
from ..ptx.syntax import Address, Instruction, Kernel, Negated, Pair, Register, Vector
from .control_flow import ControlFlow


@dataclass(frozen=True)
class _State:
    """What is outstanding on some way to a point of the program; registers are bits.

    Attributes:
      groups: registers that the groups of wgmma use, oldest group first, the open one last.
      unfenced: registers written since the last wgmma.fence.
      fenced: a wgmma.fence has come on every way.
    """

    groups: tuple[int, ...] = (0,)
    unfenced: int = 0
    fenced: bool = False

    def joined(self, other: _State) -> _State:
        length = max(len(self.groups), len(other.groups))
        mine = (0,) * (length - len(self.groups)) + self.groups
        theirs = (0,) * (length - len(other.groups)) + other.groups
        groups = tuple(a | b for a, b in zip(mine, theirs, strict=True))
        return _State(groups, self.unfenced | other.unfenced, self.fenced and other.fenced)


def registers_of(operand) -> Iterator[str]:
    """The names of the registers in an operand."""
    if isinstance(operand, Register):
        yield operand.name
    elif isinstance(operand, Vector):
        for item in operand.items:
            yield from registers_of(item)
    elif isinstance(operand, Pair):
        yield from registers_of(operand.first)
        yield from registers_of(operand.second)
    elif isinstance(operand, Negated):
        yield operand.register.name
    elif isinstance(operand, Address):
        yield from registers_of(operand.base)
        for item in operand.coordinates:
            yield from registers_of(item)


def loaded_registers(instruction: Instruction) -> set[str]:
    """What a tcgen05.ld writes: its registers, and the extreme of a .red."""
    destinations = instruction.operands[: 2 if "red" in instruction.parts else 1]
    return {name for operand in destinations for name in registers_of(operand)}


def early_uses(kernel: Kernel) -> list[Finding]:
    """One finding for each instruction that uses a register too early on some way through the program."""
    multiplications = [i for i in kernel.instructions if _is_wgmma(i)]
    return _Search(kernel, multiplications).run() if multiplications else []


def _is_wgmma(instruction: Instruction) -> bool:
    return instruction.opcode.startswith("wgmma.mma_async")


def _used_by_wgmma(instruction: Instruction) -> set[str]:
    """The accumulators, and the A registers if A is in registers."""
    a = instruction.operands[1]
    return set(registers_of(instruction.operands[0])) | (set(registers_of(a)) if isinstance(a, Vector) else set())


class _Search:
    def __init__(self, kernel: Kernel, multiplications: list[Instruction]) -> None:
        self.kernel, self.flow = kernel, ControlFlow(kernel)
        names = sorted({name for i in multiplications for name in _used_by_wgmma(i)})
        self._bits = {name: 1 << n for n, name in enumerate(names)}
        self._names = names
        waits = (i for i in kernel.instructions if i.opcode.startswith("wgmma.wait_group"))
        self._kept = max((i.operands[0].value for i in waits), default=0)
        self.findings: dict[int, Finding] = {}

    def run(self) -> list[Finding]:
        at_start: dict[int, _State] = {0: _State()}
        work = [0]
        while work:
            block = self.flow.blocks[work.pop()]
            state = at_start[block.number]
            for instruction in self.kernel.instructions[block.start : block.stop]:
                state = self._step(instruction, state)
            for successor in block.successors:
                before = at_start.get(successor)
                new = state if before is None else before.joined(state)
                if new != before:
                    at_start[successor] = new
                    work.append(successor)
        return [self.findings[index] for index in sorted(self.findings)]

    def _mask(self, names: Iterable[str]) -> int:
        mask = 0
        for name in names:
            mask |= self._bits.get(name, 0)
        return mask

    def _step(self, instruction: Instruction, state: _State) -> _State:
        opcode = instruction.opcode
        if opcode.startswith("wgmma.fence"):
            return _State(state.groups, 0, True)
        if opcode.startswith("wgmma.commit_group"):
            return replace(state, groups=self._merged((*state.groups, 0)))
        if opcode.startswith("wgmma.wait_group"):
            keep = instruction.operands[0].value
            done, still_open = state.groups[:-1], state.groups[-1]
            return replace(state, groups=(*(done[len(done) - keep :] if keep else ()), still_open))
        if _is_wgmma(instruction):
            return self._multiplication(instruction, state)
        return self._other(instruction, state)

    def _merged(self, groups: tuple[int, ...]) -> tuple[int, ...]:
        """The oldest groups as one: all waits of the kernel cover them alike, and a loop may commit without end."""
        excess = len(groups) - self._kept - 2
        if excess <= 0:
            return groups
        oldest = 0
        for group in groups[: excess + 1]:
            oldest |= group
        return (oldest, *groups[excess + 1 :])

    def _multiplication(self, instruction: Instruction, state: _State) -> _State:
        used = self._mask(_used_by_wgmma(instruction))
        self._check(instruction, used & state.unfenced, "which was written without a wgmma.fence after it")
        if not state.fenced:
            text = f"{instruction.where} may have no wgmma.fence before it"
            self.findings.setdefault(instruction.index, Finding("register", text))
        return replace(state, groups=(*state.groups[:-1], state.groups[-1] | used))

    def _other(self, instruction: Instruction, state: _State) -> _State:
        names = [name for operand in instruction.operands for name in registers_of(operand)]
        in_use = 0
        for group in state.groups:
            in_use |= group
        self._check(instruction, self._mask(names) & in_use, "which a wgmma uses that no wgmma.wait_group has covered")
        written = 0
        if instruction.operands and instruction.parts[0] != "mov":
            written = self._mask(registers_of(instruction.operands[0]))
        return replace(state, unfenced=state.unfenced | written)

    def _check(self, instruction: Instruction, registers: int, why: str) -> None:
        if registers:
            name = self._names[(registers & -registers).bit_length() - 1]
            self.findings.setdefault(instruction.index, Finding("register", f"{instruction.where} uses {name}, {why}"))
