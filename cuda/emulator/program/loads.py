"""When a tcgen05.ld has read tensor memory.

At the latest at `tcgen05.wait::ld`. NVIDIA's own kernels leave that out where an instruction has used a loaded
register, which waits for the load as for any other: so such a use is taken to end the load's read, too. This is one of
the assumptions of docs/blackwell_questions.md, since the ISA's register dependencies imply no order of tensor memory.
"""

from __future__ import annotations

from collections import defaultdict

from ..instructions.handler import Handler
from ..instructions.tcgen05_data import finish_loads
from ..ptx.syntax import Instruction, Kernel
from .control_flow import ControlFlow
from .operations import Effect
from .registers import loaded_registers, registers_of

_COPIES = ("mov",)


def completing_uses(kernel: Kernel, flow: ControlFlow) -> dict[int, list[Effect]]:
    """Effects to put in front of instructions: the first use, in each block, of what a load brings."""
    loads = [i for i in kernel.instructions if i.opcode.startswith("tcgen05.ld")]
    if not loads:
        return {}
    origins = _origins(kernel, loads)
    effects: defaultdict[int, list[Effect]] = defaultdict(list)
    for block in flow.blocks:
        completed: set[int] = set()
        for index in range(block.start, block.stop):
            instruction = kernel.instructions[index]
            if instruction.opcode.startswith("tcgen05.ld"):
                completed.discard(index)
            elif instruction.parts[0] not in _COPIES and instruction.guard is None:
                for load in _used(instruction, origins) - completed:
                    completed.add(load)
                    effects[index].append(Effect(Handler(_completion(load)), (), ()))
    return dict(effects)


def _origins(kernel: Kernel, loads: list[Instruction]) -> dict[str, int]:
    """The load that a register, or what it is a copy of, certainly comes from."""
    definitions: defaultdict[str, list[Instruction]] = defaultdict(list)
    for instruction in kernel.instructions:
        written = loaded_registers(instruction) if instruction.opcode.startswith("tcgen05.ld") else set()
        for name in written or set(registers_of(instruction.operands[0]) if instruction.operands else ()):
            definitions[name].append(instruction)
    only = {name: found[0] for name, found in definitions.items() if len(found) == 1}
    origins: dict[str, int] = {}
    for load in loads:
        for name in loaded_registers(load):
            if name in only:
                origins[name] = load.index
    for instruction in kernel.instructions:
        if instruction.parts[0] in _COPIES:
            sources = {origins[n] for n in registers_of(instruction.operands[1]) if n in origins}
            for name in registers_of(instruction.operands[0]):
                if name in only and len(sources) == 1:
                    origins[name] = next(iter(sources))
    return origins


def _used(instruction: Instruction, origins: dict[str, int]) -> set[int]:
    stores = instruction.parts[0] in ("st", "red", "atom") or instruction.opcode.startswith("tcgen05.st")
    operands = instruction.operands if stores else instruction.operands[1:]
    return {origins[n] for operand in operands for n in registers_of(operand) if n in origins}


def _completion(load: int):
    def run(warp, mask) -> None:
        if warp.machine.monitor is not None:
            finish_loads(warp, load)

    return run
