"""Registers that an asynchronous instruction still writes or reads, used too early: a check of the text.

`tcgen05.ld` writes its registers until `tcgen05.wait::ld`; `wgmma.mma_async` uses its accumulators and its A registers
until a `wgmma.wait_group` covers it, and other instructions' writes of them need `wgmma.fence` before it (PTX ISA).
Compilers move plain copies of loaded registers across the wait, so a copy counts as the register itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..errors import Finding
from ..program.control_flow import ControlFlow
from ..ptx.syntax import Address, Instruction, Kernel, Negated, Pair, Register, Vector

_COPIES = ("mov",)


@dataclass(frozen=True)
class _State:
    """What is outstanding on some way to a point of the program.

    Attributes:
      loads: register to the tcgen05.ld that writes it.
      groups: of wgmma, oldest first, the open one last: register to its instruction.
      unfenced: registers written since the last wgmma.fence.
    """

    loads: frozenset = frozenset()
    groups: tuple[frozenset, ...] = (frozenset(),)
    unfenced: frozenset = frozenset()

    def joined(self, other: _State) -> _State:
        length = max(len(self.groups), len(other.groups))
        mine = (frozenset(),) * (length - len(self.groups)) + self.groups
        theirs = (frozenset(),) * (length - len(other.groups)) + other.groups
        groups = tuple(a | b for a, b in zip(mine, theirs, strict=True))
        return _State(self.loads | other.loads, groups, self.unfenced | other.unfenced)


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


def _all_registers(instruction: Instruction) -> set[str]:
    names = {name for operand in instruction.operands for name in registers_of(operand)}
    return names | ({instruction.guard.name} if instruction.guard is not None else set())


def _wgmma_registers(instruction: Instruction) -> tuple[set[str], set[str]]:
    """The accumulators, and the A registers if A is in registers."""
    accumulators = set(registers_of(instruction.operands[0]))
    a = instruction.operands[1]
    return accumulators, set(registers_of(a)) if isinstance(a, Vector) else set()


def early_uses(kernel: Kernel) -> list[Finding]:
    """One finding for each instruction that uses a register too early on some way through the program."""
    flow = ControlFlow(kernel)
    if not any(i.opcode.startswith(("tcgen05.ld", "wgmma.mma_async")) for i in kernel.instructions):
        return []
    at_start: dict[int, _State] = {0: _State()}
    work, findings = [0], {}
    while work:
        number = work.pop()
        state = at_start[number]
        block = flow.blocks[number]
        for index in range(block.start, block.stop):
            state = _step(kernel.instructions[index], state, findings)
        for successor in block.successors:
            before = at_start.get(successor)
            new = state if before is None else before.joined(state)
            if new != before:
                at_start[successor] = new
                work.append(successor)
    return [findings[key] for key in sorted(findings)]


def _step(instruction: Instruction, state: _State, findings: dict) -> _State:
    opcode = instruction.opcode
    if opcode.startswith("tcgen05.wait::ld"):
        return _State(frozenset(), state.groups, state.unfenced)
    if opcode.startswith("wgmma.fence"):
        return _State(state.loads, state.groups, frozenset())
    if opcode.startswith("wgmma.commit_group"):
        return _State(state.loads, (*state.groups, frozenset()), state.unfenced)
    if opcode.startswith("wgmma.wait_group"):
        keep = instruction.operands[0].value
        done, open_group = state.groups[:-1], state.groups[-1]
        return _State(state.loads, (*(done[len(done) - keep :] if keep else ()), open_group), state.unfenced)
    if opcode.startswith("wgmma.mma_async"):
        return _wgmma(instruction, state, findings)
    return _other(instruction, state, findings)


def loaded_registers(instruction: Instruction) -> set[str]:
    """What a tcgen05.ld writes: its registers, and the extreme of a .red."""
    destinations = instruction.operands[: 2 if "red" in instruction.parts else 1]
    return {name for operand in destinations for name in registers_of(operand)}


def _wgmma(instruction: Instruction, state: _State, findings: dict) -> _State:
    accumulators, a = _wgmma_registers(instruction)
    unfenced = (accumulators | a) & state.unfenced
    if unfenced:
        _found(findings, instruction, f"uses {min(unfenced)}, which was written without a wgmma.fence after it")
    used = frozenset((name, instruction.index) for name in accumulators | a)
    return _State(state.loads, (*state.groups[:-1], state.groups[-1] | used), state.unfenced)


def _other(instruction: Instruction, state: _State, findings: dict) -> _State:
    names = _all_registers(instruction)
    loads = state.loads
    if instruction.opcode.startswith("tcgen05.ld"):
        written = loaded_registers(instruction)
        names -= written
        loads = frozenset(entry for entry in loads if entry[0] not in written) | {
            (n, instruction.index) for n in written
        }
    pending = {name for name, _ in state.loads}
    if instruction.parts[0] in _COPIES:
        source = set(registers_of(instruction.operands[1])) & pending
        if source:
            loads |= {(name, instruction.index) for name in registers_of(instruction.operands[0])}
    elif names & pending:
        _found(findings, instruction, f"uses {min(names & pending)} before the tcgen05.wait::ld of its load")
    in_use = {name for group in state.groups for name, _ in group}
    if names & in_use:
        _found(findings, instruction, f"uses {min(names & in_use)} before the wgmma.wait_group of a wgmma that uses it")
    written = frozenset(registers_of(instruction.operands[0])) if instruction.operands else frozenset()
    return _State(loads, state.groups, state.unfenced | written)


def _found(findings: dict, instruction: Instruction, what: str) -> None:
    findings.setdefault(instruction.index, Finding("register", f"{instruction.where} {what}"))
