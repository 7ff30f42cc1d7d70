"""`emulate`: run a kernel on arrays under several schedules and say what was found."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from threadpoolctl import ThreadpoolController

from .errors import EmulationError, Finding
from .machine.launch import Machine
from .machine.memory import PARAMETER_BASE, GlobalMemory
from .program.program import Program
from .ptx.parser import parse
from .ptx.syntax import Kernel, Parameter
from .tensor_map import TensorMap

Shape = tuple[int, int, int]


@dataclass(frozen=True, eq=False)
class Output:
    """An array that the kernel writes: reading an element before it is written is a fault."""

    array: np.ndarray


@dataclass(frozen=True)
class Struct:
    """A parameter passed by value with pointers or tensor maps in it.

    Attributes:
      bytes: of the whole parameter.
      pieces: byte offset to what goes there: an array or an Output for its address, or a TensorMap.
    """

    bytes: bytes
    pieces: Mapping[int, Any]


@dataclass
class Result:
    """What came of an emulation.

    Attributes:
      arrays: for each seed, the arrays among the arguments after the run, in order of the arguments.
      findings: what was found under any seed, and how often.
      varying: places, in `arrays`, of the arrays that differ between seeds.
      instructions: warp instructions executed under all seeds.
      seconds: spent executing them.
      machines: the last launch of each seed.
    """

    arrays: list[list[np.ndarray]] = field(default_factory=list)
    findings: Counter[Finding] = field(default_factory=Counter)
    varying: list[int] = field(default_factory=list)
    instructions: int = 0
    seconds: float = 0.0

    def of_kind(self, *kinds: str) -> list[Finding]:
        """The findings of some kinds."""
        return [finding for finding in self.findings if finding.kind in kinds]


@lru_cache(maxsize=64)
def program_of(ptx: str, entry: str | None = None) -> Program:
    """The program of a PTX text, made once."""
    return Program(parse(ptx, entry))


def emulate(
    kernel: str | Kernel | Program,
    arguments: Sequence[Any],
    grid: Shape | int,
    *,
    block: Shape | int | None = None,
    cluster: Shape | int = 1,
    shared_bytes: int = 0,
    seeds: Iterable[int] = (0,),
    races: bool = True,
    entry: str | None = None,
    resident: int = 1,
    max_instructions: int = 1 << 40,
    trace: Callable | None = None,
) -> Result:
    """Run a kernel once for each seed.

    Args:
      kernel: PTX text, a parsed kernel, or a program.
      arguments: one for each parameter: an array (its address is passed), an `Output`, a `TensorMap`, a Python int or
        float, a NumPy scalar, bytes, or a `Struct`. Every run works on copies of the arrays; one array that is in
        several arguments, tensor maps among them, is one buffer.
      grid: CTAs along x, y, z.
      block: threads of a CTA; may be left out if the kernel declares it.
      cluster: CTAs of a cluster.
      shared_bytes: of dynamic shared memory.
      seeds: each is one order in which warps and engines take turns.
      races: check happens-before (slower).
      entry: which kernel of a text.
      resident: clusters that run at the same time.
      max_instructions: end a run that goes on for longer.
      trace: called with (start, end, who, instructions) for everything that happens: a stretch of code of a warp, with
        start = end when the warp has to wait, or an operation of an engine, from its issue to its effect.

    Returns:
      The arrays after each run, and the findings.

    Raises:
      EmulationError: the kernel did something wrong, in words, with the instruction, the warp and the seed.
      ValueError: the arguments do not fit the kernel.
    """
    program = _program(kernel, entry)
    block = _shape(block) if block is not None else program.kernel.threads
    if block is None:
        raise ValueError(f"{program.kernel.name} does not declare its threads: pass block")
    if program.kernel.threads not in (None, block):
        raise ValueError(f"{program.kernel.name} is for blocks of {program.kernel.threads}, not {block}")
    grid, cluster = _shape(grid), _shape(cluster)
    if any(g % c for g, c in zip(grid, cluster, strict=True)):
        raise ValueError(f"the grid {grid} is no multiple of the cluster {cluster}")
    result = Result(findings=Counter(program.static_findings))
    for seed in seeds:
        layout = _Layout(program.kernel, arguments)
        machine = Machine(
            program, layout.bytes, layout.tensor_maps, grid, block, global_memory=layout.memory, cluster=cluster,
            shared_bytes=shared_bytes, seed=seed, races=races, resident=resident, max_instructions=max_instructions,
            trace=trace,
        )  # fmt: skip
        try:
            with _blas().limit(limits=1, user_api="blas"):
                machine.run()
        except EmulationError as e:
            raise type(e)(f"{e}\n  under seed {seed}") from e.__cause__
        result.arrays.append(layout.arrays)
        result.findings.update(machine.findings)
        result.instructions += machine.executed
        result.seconds += machine.seconds
    result.varying = _varying(result.arrays)
    return result


@lru_cache(maxsize=1)
def _blas() -> ThreadpoolController:
    """The products of one instruction are too small for several threads, which would only wait for one another."""
    return ThreadpoolController()


def _program(kernel, entry: str | None) -> Program:
    if isinstance(kernel, Program):
        return kernel
    return Program(kernel) if isinstance(kernel, Kernel) else program_of(kernel, entry)


def _shape(value: Shape | int) -> Shape:
    return (value, 1, 1) if isinstance(value, int) else (*value, 1, 1)[:3]


def _varying(runs: list[list[np.ndarray]]) -> list[int]:
    if not runs:
        return []
    first = [a.tobytes() for a in runs[0]]
    return [i for i, expected in enumerate(first) if any(run[i].tobytes() != expected for run in runs[1:])]


class _Layout:
    """The parameter space and the global memory of one run."""

    def __init__(self, kernel: Kernel, arguments: Sequence[Any]) -> None:
        if len(arguments) != len(kernel.parameters):
            raise ValueError(f"{kernel.name} has {len(kernel.parameters)} parameters, not {len(arguments)}")
        self.memory = GlobalMemory()
        self.bytes = np.zeros(kernel.parameter_bytes, np.uint8)
        self.tensor_maps: dict[int, TensorMap] = {}
        self.arrays: list[np.ndarray] = []
        self._bound: dict[int, int] = {}
        self._outputs = {id(o.array) for o in _outputs(arguments)}
        for argument, parameter in zip(arguments, kernel.parameters, strict=True):
            self._place(argument, parameter)

    def _place(self, argument: Any, parameter: Parameter) -> None:
        if isinstance(argument, Struct):
            self._write(argument.bytes, parameter.offset, parameter.size, parameter.name)
            for offset, piece in argument.pieces.items():
                self._piece(piece, parameter.offset + offset, parameter)
        else:
            self._piece(argument, parameter.offset, parameter)

    def _piece(self, piece: Any, offset: int, parameter: Parameter) -> None:
        if isinstance(piece, TensorMap):
            bound = copy.copy(piece)
            bound.bind(self._address(piece.array, parameter.name))
            self.tensor_maps[PARAMETER_BASE + offset] = bound
        elif isinstance(piece, (np.ndarray, Output)):
            array = piece.array if isinstance(piece, Output) else piece
            self._write(self._address(array, parameter.name).to_bytes(8, "little"), offset, 8, parameter.name)
        elif isinstance(piece, (bytes, bytearray)):
            self._write(bytes(piece), offset, parameter.size, parameter.name)
        elif isinstance(piece, np.generic):
            self._write(piece.tobytes(), offset, parameter.size, parameter.name)
        elif isinstance(piece, float):
            kind = {4: "f4", 8: "f8"}[parameter.size]
            self._write(np.array(piece, kind).tobytes(), offset, parameter.size, parameter.name)
        elif isinstance(piece, int):
            value = piece & ((1 << 8 * parameter.size) - 1)
            self._write(value.to_bytes(parameter.size, "little"), offset, parameter.size, parameter.name)
        else:
            raise ValueError(f"{parameter.name}: an argument of type {type(piece).__name__} is not supported")

    def _address(self, array: np.ndarray, name: str) -> int:
        if id(array) not in self._bound:
            mine = np.array(array, order="C", copy=True)
            self.arrays.append(mine)
            self._bound[id(array)] = self.memory.bind(mine, name, written=id(array) not in self._outputs)
        return self._bound[id(array)]

    def _write(self, data: bytes, offset: int, size: int, name: str) -> None:
        if len(data) != size:
            raise ValueError(f"{name}: {len(data)} bytes for {size}")
        self.bytes[offset : offset + size] = np.frombuffer(data, np.uint8)


def _outputs(arguments: Sequence[Any]):
    for argument in arguments:
        if isinstance(argument, Output):
            yield argument
        elif isinstance(argument, Struct):
            yield from _outputs(list(argument.pieces.values()))
