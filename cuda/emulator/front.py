"""`emulate`: run a kernel on arrays under several schedules and say what was found."""

from __future__ import annotations

import copy
import itertools
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from threadpoolctl import ThreadpoolController

from .configuration import Shape, check_shared_bytes, shapes
from .errors import EmulationError, Finding, UnsupportedInstructionError
from .instructions.tcgen05_mma import Product
from .launch import Machine
from .machine.memory import PARAMETER_BASE, GlobalMemory
from .parameters import scalar_bytes
from .program.program import Program
from .ptx.parser import parse
from .ptx.syntax import Kernel, Parameter
from .tensor_map import TensorMap

_POINTER_BYTES, _TENSOR_MAP_BYTES = 8, 128


@dataclass(frozen=True, eq=False)
class Output:
    """An array that the kernel writes: reading an element before it is written is a fault.

    What the kernel does not write keeps its initial content.
    """

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
      findings: what was found under any seed, and how often; once for each warp that did it.
      varying: places, in `arrays`, of the arrays that differ between seeds.
      instructions: warp instructions executed under all seeds.
      seconds: spent executing them.
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
    cluster: Shape | int | None = None,
    shared_bytes: int = 0,
    seeds: Iterable[int] = (0,),
    races: bool = True,
    entry: str | None = None,
    resident: int = 1,
    max_instructions: int = 1 << 27,
    trace: Callable | None = None,
    products: Callable[[Product], None] | None = None,
) -> Result:
    """Run a kernel once for each seed.

    Args:
      kernel: PTX text, a parsed kernel, or a program.
      arguments: one for each parameter: an array (its address is passed), an `Output`, a `TensorMap`, a Python int or
        float, a NumPy scalar, bytes, a `Struct`, or None for a null pointer; of JAX arrays pass `np.asarray(x)`. Every
        run works on copies of the arrays; one array that is in several arguments, tensor maps among them, is one
        buffer. Different arrays must not overlap.
      grid: CTAs along x, y, z.
      block: threads of a CTA; may be left out if the kernel declares it (`.reqntid`).
      cluster: CTAs of a cluster; if left out, what the kernel declares, or 1.
      shared_bytes: of dynamic shared memory.
      seeds: each is one order in which warps and engines take turns.
      races: check happens-before (slower).
      entry: which kernel of a text.
      resident: clusters that run at the same time.
      max_instructions: end a run that goes on for longer.
      trace: called with (start, end, who, instructions) for everything that happens: a stretch of code of a warp, with
        start = end when the warp has to wait, or an operation of an engine, from its issue to its effect.
      products: called with each tcgen05.mma as it takes effect: A, its scale factors, and D afterwards.

    Returns:
      The arrays after each run, and the findings.

    Raises:
      EmulationError: the kernel did something wrong, in words, with the instruction, the warp and the seed.
      ValueError: the arguments do not fit the kernel, or the hardware would not take the launch.
      TypeError: the seeds are one int.
    """
    program = _program(kernel, entry)
    grid, block, cluster = shapes(program.kernel, grid, block, cluster)
    check_shared_bytes(program.kernel, shared_bytes)
    if resident < 1:
        raise ValueError(f"resident must be at least 1, not {resident}")
    if isinstance(seeds, (int, np.integer)):
        raise TypeError(f"seeds must be an iterable of ints, such as range({seeds}) or [{seeds}], not {seeds!r}")
    _check_arrays(arguments)
    result = Result(findings=Counter(program.static_findings))
    for seed in map(operator.index, seeds):
        layout = _Layout(program.kernel, arguments)
        machine = Machine(
            program, layout.bytes, layout.tensor_maps, grid, block, global_memory=layout.memory, cluster=cluster,
            shared_bytes=shared_bytes, seed=seed, races=races, resident=resident, max_instructions=max_instructions,
            trace=trace, products=products,
        )  # fmt: skip
        try:
            with _blas().limit(limits=1, user_api="blas"):
                machine.run()
        except EmulationError as e:
            result.findings.update(machine.findings)
            raise _with_findings(e, seed, list(result.findings)) from e.__cause__
        result.arrays.append(layout.arrays)
        result.findings.update(machine.findings)
        result.instructions += machine.executed
        result.seconds += machine.seconds
    result.varying = _varying(result.arrays)
    return result


def _with_findings(error: EmulationError, seed: int, findings: list[Finding]) -> EmulationError:
    """A fault with what was found before it, which may be its cause."""
    text = f"{error}\n  under seed {seed}"
    telling = [finding for finding in findings if finding.kind not in ("issue", "assumption")]
    for finding in telling[:3]:
        text += f"\n  found before: {finding}"
    return type(error)(text, findings)


@lru_cache(maxsize=1)
def _blas() -> ThreadpoolController:
    """The products of one instruction are too small for several threads, which would only wait for one another."""
    return ThreadpoolController()


# Architectures whose instructions the emulator has.
_TARGETS = ("sm_90", "sm_100", "sm_103")
_ON_SOME_TARGETS = {"tcgen05.ld.red": ("sm_103a", "sm_103f")}


def _program(kernel, entry: str | None) -> Program:
    program = kernel
    if not isinstance(kernel, Program):
        program = Program(kernel) if isinstance(kernel, Kernel) else program_of(kernel, entry)
    target = program.kernel.target
    if target.rstrip("af") not in _TARGETS:
        raise UnsupportedInstructionError(f"the target {target}: kernels for {', '.join(_TARGETS)} are emulated")
    _check_instructions(program.kernel)
    return program


def _check_instructions(kernel: Kernel) -> None:
    """Refuses what the target of a kernel lacks and another one has."""
    for instruction in kernel.instructions:
        for opcode, targets in _ON_SOME_TARGETS.items():
            if instruction.opcode.startswith(opcode) and kernel.target not in targets:
                raise UnsupportedInstructionError(f"{instruction.where}: {kernel.target} has no {opcode}")


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
            self._write(argument.bytes, parameter)
            for offset, piece in argument.pieces.items():
                self._piece(piece, offset, parameter)
        elif isinstance(argument, TensorMap):
            self._piece(argument, 0, parameter)
        elif argument is None or isinstance(argument, (np.ndarray, Output)):
            if parameter.size != _POINTER_BYTES or parameter.type == "f64":
                raise ValueError(f"{parameter.name}: an array for a parameter of type .{parameter.type}, no pointer")
            if argument is not None:
                self._piece(argument, 0, parameter)
        else:
            self._write(scalar_bytes(argument, parameter), parameter)

    def _piece(self, piece: Any, offset: int, parameter: Parameter) -> None:
        """Put a tensor map or a pointer at an offset of a parameter."""
        if not isinstance(piece, (TensorMap, np.ndarray, Output)):
            raise ValueError(f"{parameter.name}: a piece of type {type(piece).__name__} is not supported")
        nbytes = _TENSOR_MAP_BYTES if isinstance(piece, TensorMap) else _POINTER_BYTES
        if not 0 <= offset <= parameter.size - nbytes:
            raise ValueError(f"{parameter.name}: {nbytes} bytes at {offset} of a parameter of {parameter.size}")
        start = parameter.offset + offset
        if isinstance(piece, TensorMap):
            bound = copy.copy(piece)
            bound.bind(self._address(piece.array, parameter.name))
            self.tensor_maps[PARAMETER_BASE + start] = bound
        else:
            address = self._address(piece.array if isinstance(piece, Output) else piece, parameter.name)
            self.bytes[start : start + nbytes] = np.frombuffer(address.to_bytes(nbytes, "little"), np.uint8)

    def _address(self, array: np.ndarray, name: str) -> int:
        if id(array) not in self._bound:
            mine = np.array(array, order="C", copy=True)
            self.arrays.append(mine)
            self._bound[id(array)] = self.memory.bind(mine, name, written=id(array) not in self._outputs)
        return self._bound[id(array)]

    def _write(self, data: bytes, parameter: Parameter) -> None:
        if len(data) != parameter.size:
            raise ValueError(f"{parameter.name}: {len(data)} bytes for {parameter.size}")
        self.bytes[parameter.offset : parameter.offset + parameter.size] = np.frombuffer(data, np.uint8)


def _check_arrays(arguments: Sequence[Any]) -> None:
    """Refuse what has no bytes of its own, which would be copied, and arrays that would no longer overlap as copies."""
    arrays = list({id(array): array for array in _arrays(arguments)}.values())
    for array in arrays:
        if not isinstance(array, np.ndarray):
            raise ValueError(f"an Output holds an array, not one of type {type(array).__name__}")
        if array.dtype.hasobject:
            raise ValueError(f"arrays of {array.dtype} cannot be passed")
    for a, b in itertools.combinations(arrays, 2):
        if np.may_share_memory(a, b) and np.shares_memory(a, b):
            raise ValueError(
                f"two arrays of shapes {a.shape} and {b.shape} overlap, but would be buffers of their own: "
                "pass the same array in both places"
            )


def _arrays(arguments: Iterable[Any]) -> Iterator[Any]:
    """What the arguments hold as arrays."""
    for argument in arguments:
        if isinstance(argument, np.ndarray):
            yield argument
        elif isinstance(argument, (Output, TensorMap)):
            yield argument.array
        elif isinstance(argument, Struct):
            yield from _arrays(argument.pieces.values())


def _outputs(arguments: Sequence[Any]):
    for argument in arguments:
        if isinstance(argument, Output):
            yield argument
        elif isinstance(argument, Struct):
            yield from _outputs(list(argument.pieces.values()))
