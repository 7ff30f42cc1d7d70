"""Machine code of cubins, as nvdisasm prints it, with the schedule that the assembler wrote into each instruction."""

import dataclasses
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

NO_BARRIER = 7
"""Index of a scoreboard barrier that stands for none."""

_MODULE_TARGET = re.compile(r"\.target\s+(\w+)")
_FUNCTION = re.compile(r"\.text\.(\S+):")
_LABEL = re.compile(r"(\.L\w+):")
_INSTRUCTION = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;\s*/\*")
_ENCODING = re.compile(r"/\* 0x([0-9a-f]{16}) \*/")
_TARGET = re.compile(r"`\((\.L\w+)\)")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """An instruction.

    Attributes:
      address: In its function, bytes.
      predicate: Guard, as ``@!P0``, or empty.
      opcode: With its modifiers, as ``MUFU.EX2``.
      operands: As printed.
      target: Address that it may jump to, if that is written in it.
      stall: Clocks before the warp's next instruction.
      write_barrier: Scoreboard barrier released when its results are written.
      read_barrier: Scoreboard barrier released when its operands are read.
      wait_mask: Bit i: it waits for barrier i.
    """

    address: int
    predicate: str
    opcode: str
    operands: str
    target: int | None = None
    stall: int = 1
    write_barrier: int = NO_BARRIER
    read_barrier: int = NO_BARRIER
    wait_mask: int = 0

    @property
    def operation(self) -> str:
        """The opcode without modifiers."""
        return self.opcode.partition(".")[0]

    @property
    def modifiers(self) -> tuple[str, ...]:
        """What follows the operation."""
        return tuple(self.opcode.split(".")[1:])


@dataclasses.dataclass(frozen=True)
class Function:
    """The code of a kernel.

    Attributes:
      name: Of its symbol.
      instructions: In order of their addresses.
    """

    name: str
    instructions: tuple[Instruction, ...]


@dataclasses.dataclass(frozen=True)
class Module:
    """The code of a cubin.

    Attributes:
      target: As ``sm_100f``.
      functions: All of them.
    """

    target: str
    functions: tuple[Function, ...]


def disassemble(cubin: Path) -> Module:
    """Code of a cubin.

    Args:
      cubin: File.

    Returns:
      The code.
    """
    command = [find_nvdisasm(), "-c", "-hex", str(cubin)]
    return parse(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def find_nvdisasm() -> str:
    """Path of nvdisasm: that on the path, else that of NVIDIA's Python package, which does not put it there."""
    packaged = (str(x) for entry in sys.path for x in Path(entry).glob("nvidia/*/bin/nvdisasm"))
    found = shutil.which("nvdisasm") or next(packaged, None)
    if found is None:
        raise FileNotFoundError("nvdisasm: not on the path; install the extra 'build'")
    return found


def parse(text: str) -> Module:
    """Code in the output of ``nvdisasm -c -hex``.

    Args:
      text: The output.

    Returns:
      The code.
    """
    parts = _FUNCTION.split(text)
    target = _MODULE_TARGET.search(parts[0])
    if target is None:
        raise ValueError("no .target; is it the output of nvdisasm?")
    functions = (Function(name, tuple(_instructions(x))) for name, x in zip(parts[1::2], parts[2::2], strict=True))
    return Module(target[1], tuple(functions))


def _instructions(code: str) -> Iterator[Instruction]:
    lines = code.splitlines()
    found = [(i, match) for i, line in enumerate(lines) if (match := _INSTRUCTION.match(line))]
    labels = _label_addresses(lines, found)
    for i, match in found:
        address, predicate, opcode, operands = match.groups()
        target = _TARGET.search(operands)
        yield Instruction(
            int(address, 16),
            predicate or "",
            opcode,
            operands,
            labels.get(target[1]) if target else None,
            **_schedule(lines[i + 1]),
        )


def _label_addresses(lines: list[str], found: list[tuple[int, re.Match[str]]]) -> dict[str, int]:
    """Addresses of the instructions that labels stand before."""
    labels: dict[str, int] = {}
    waiting: list[str] = []
    instructions = dict(found)
    for i, line in enumerate(lines):
        if match := _LABEL.match(line):
            waiting.append(match[1])
        elif i in instructions:
            labels |= dict.fromkeys(waiting, int(instructions[i][1], 16))
            waiting = []
    return labels


def _schedule(line: str) -> dict[str, int]:
    """Fields of the upper half of an encoding, which has a line of its own."""
    match = _ENCODING.search(line)
    if match is None:
        raise ValueError(f"no encoding: {line!r}; run nvdisasm with -hex")
    bits = int(match[1], 16)
    return {
        "stall": bits >> 41 & 15,
        "write_barrier": bits >> 46 & 7,
        "read_barrier": bits >> 49 & 7,
        "wait_mask": bits >> 52 & 63,
    }
