"""Instructions taken apart into operations on register components.

A component is a register, or one half of a 64-bit register that packed arithmetic on pairs of float32 touches: such
registers are kept as two components, so that packing and unpacking them costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from ..arithmetic import operations as arithmetic
from ..errors import UnsupportedInstructionError
from ..instructions import families  # noqa: F401
from ..instructions.handler import Handler, Rows, Value, handler_of
from ..machine.memory import PARAMETER_BASE
from ..ptx.syntax import (
    SINK,
    TYPE_BYTES,
    Address,
    Immediate,
    Instruction,
    Kernel,
    Negated,
    Pair,
    Register,
    Symbol,
    Vector,
)
from . import special

# The array type of the raw bits of each register kind.
RAW = {"pred": "b1", "b8": "u2", "b16": "u2", "b32": "u4", "b64": "u8"}
_RAW_OF_BYTES = {1: "u2", 2: "u2", 4: "u4", 8: "u8"}
_MASKS = {"b1": 1, "u2": 0xFFFF, "u4": 0xFFFFFFFF, "u8": 0xFFFFFFFFFFFFFFFF}


def raw_type(ptx_type: str) -> str:
    """The array type in which values of a PTX type are held."""
    return "b1" if ptx_type == "pred" else _RAW_OF_BYTES[TYPE_BYTES[ptx_type]]


@dataclass(frozen=True, slots=True)
class Component:
    """A source or destination: a register or half of one, held as `kind`."""

    name: str
    kind: str


@dataclass(frozen=True, slots=True)
class Constant:
    value: int


@dataclass(frozen=True, slots=True)
class Not:
    """The complement of a predicate."""

    component: Component


@dataclass(frozen=True, slots=True)
class Pure:
    """An operation on values: `key` says which; equal keys can be done together.

    Attributes:
      key: identifies the function.
      function: of arrays.
      sources: one for each input.
      types: array types of the inputs.
      destination: of the result.
      result: array type of the result.
    """

    key: tuple
    function: Callable
    sources: tuple
    types: tuple[str, ...]
    destination: Component
    result: str


@dataclass(frozen=True, slots=True)
class Copy:
    source: object
    destination: Component


@dataclass(frozen=True, slots=True)
class Effect:
    """An instruction of a handler. Inputs are sources, or tuples of sources for `Rows`; outputs likewise."""

    handler: Handler
    inputs: tuple
    outputs: tuple


class Decoder:
    """Takes the instructions of one kernel apart."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self._offsets = {p.name: p.offset for p in kernel.parameters}
        self.pairs = _paired_registers(kernel)
        self.specials: set[str] = set()
        self._sums = 0
        self._before: list[Pure] = []
        self._after: list[Pure] = []

    def decode(self, instruction: Instruction) -> list[Pure | Copy | Effect]:
        """The operations of one instruction that is neither a branch nor an exit."""
        self._before, self._after = [], []
        try:
            operations = self._decode(instruction)
            return [*self._before, *operations, *self._after]
        except UnsupportedInstructionError as e:
            raise UnsupportedInstructionError(_located(e, instruction)) from None
        except (KeyError, AttributeError, TypeError, IndexError, ValueError) as e:
            text = f"{instruction.where}: cannot make sense of {instruction.opcode}: {type(e).__name__}: {e}"
            raise UnsupportedInstructionError(text) from e

    def _decode(self, instruction: Instruction) -> list:
        base = instruction.parts[0]
        if base == "mov":
            return self._mov(instruction)
        if base == "selp":
            return self._selp(instruction)
        handler = handler_of(instruction)
        if handler is not None:
            return [self._effect(instruction, handler)]
        if instruction.parts[-1] == "f32x2":
            return self._packed(instruction)
        return self._pure(instruction)

    # ---- operands ----

    def source(self, operand, kind: str):
        """A source operand, to be held as array type `kind`."""
        if isinstance(operand, Register):
            return self._joined(operand) if operand.name in self.pairs else Component(operand.name, RAW[operand.kind])
        if isinstance(operand, Negated):
            return Not(Component(operand.register.name, "b1"))
        if isinstance(operand, Immediate):
            return Constant(operand.value & _MASKS[kind])
        if isinstance(operand, Address):
            return self._sum(self.source(operand.base, kind), operand.offset, kind)
        if isinstance(operand, Symbol):
            if operand.name in self._offsets:
                return Constant(PARAMETER_BASE + self._offsets[operand.name])
            if operand.name in self.kernel.shared_variables:
                return self.special(special.SHARED_PREFIX + operand.name)
            if operand.name.startswith("%"):
                return self.special(operand.name)
        raise UnsupportedInstructionError(f"the operand {operand} is not supported")

    def special(self, name: str) -> Component:
        """A register that is set before the kernel starts."""
        kind = special.kind_of(name)
        self.specials.add(name)
        return Component(name, kind)

    def destination(self, operand) -> Component:
        if operand == SINK:
            return Component("_", "u4")
        if not isinstance(operand, Register):
            raise UnsupportedInstructionError(f"the destination {operand} is not supported")
        return self._split(operand) if operand.name in self.pairs else Component(operand.name, RAW[operand.kind])

    def _joined(self, register: Register) -> Component:
        """A register that is kept as two halves, as a whole."""
        whole = Component(register.name + ".whole", "u8")
        self._before.append(Pure(("join",), special.join, self.halves(register), ("u4", "u4"), whole, "u8"))
        return whole

    def _split(self, register: Register) -> Component:
        """A whole to be kept as two halves."""
        whole = Component(register.name + ".whole", "u8")
        for part, half in enumerate(self.halves(register)):
            function = special.unpack("u8", 32, part)
            self._after.append(Pure(("unpack", "u8", 32, part), function, (whole,), ("u8",), half, "u4"))
        return whole

    def _sum(self, base, offset: int, kind: str):
        if offset == 0:
            return base
        if isinstance(base, Constant):
            return Constant(base.value + offset & _MASKS[kind])
        self._sums += 1
        total = Component(f"{base.name}+{offset}.{self._sums}", base.kind)
        constant = Constant(offset & _MASKS[base.kind])
        self._before.append(Pure(("add", base.kind), np.add, (base, constant), (base.kind,) * 2, total, base.kind))
        return total

    def halves(self, operand) -> tuple:
        """The low and high half of a 64-bit operand that is kept as a pair, or of a constant."""
        if isinstance(operand, Immediate):
            return Constant(operand.value & 0xFFFFFFFF), Constant(operand.value >> 32 & 0xFFFFFFFF)
        return Component(operand.name + ".low", "u4"), Component(operand.name + ".high", "u4")

    def _is_pair(self, operand) -> bool:
        return isinstance(operand, Register) and operand.name in self.pairs

    # ---- kinds of instructions ----

    def _mov(self, instruction: Instruction) -> list:
        destination, source = instruction.operands
        kind = raw_type(instruction.parts[-1])
        if isinstance(destination, Vector):
            return self._unpack(destination.items, source, kind)
        if isinstance(source, Vector):
            return self._pack(destination, source.items, kind)
        if self._is_pair(destination):
            return [Copy(s, d) for s, d in zip(self._halves_of(source), self.halves(destination), strict=True)]
        if isinstance(source, Symbol) and special.is_clock(source.name):
            return [self._effect(instruction, special.clock(source.name, destination))]
        return [Copy(self.source(source, kind), self.destination(destination))]

    def _halves_of(self, source) -> tuple:
        if self._is_pair(source) or isinstance(source, Immediate):
            return self.halves(source)
        raise UnsupportedInstructionError(f"a pair of float32 from {source} is not supported")

    def _unpack(self, items: tuple, source, kind: str) -> list:
        if self._is_pair(source) and len(items) == 2:
            return [Copy(s, self.destination(d)) for s, d in zip(self.halves(source), items, strict=True) if d != SINK]
        whole = self.source(source, kind)
        width = 8 * int(kind[1]) // len(items)
        return [
            Pure(
                ("unpack", kind, width, i),
                special.unpack(kind, width, i),
                (whole,),
                (kind,),
                self.destination(d),
                RAW[d.kind],
            )
            for i, d in enumerate(items)
            if d != SINK
        ]

    def _pack(self, destination, items: tuple, kind: str) -> list:
        part = _RAW_OF_BYTES[int(kind[1]) // len(items)]
        sources = tuple(self.source(item, part) for item in items)
        if self._is_pair(destination):
            if len(items) != 2:
                raise UnsupportedInstructionError("a pair of float32 made of more than two parts is not supported")
            return [Copy(s, d) for s, d in zip(sources, self.halves(destination), strict=True)]
        width = 8 * int(kind[1]) // len(items)
        function = special.pack(kind, width)
        key = ("pack", kind, width)
        return [Pure(key, function, sources, (part,) * len(items), self.destination(destination), kind)]

    def _selp(self, instruction: Instruction) -> list:
        destination, a, b, predicate = instruction.operands
        chooser = self.source(predicate, "b1")
        kind = raw_type(instruction.parts[-1])
        if self._is_pair(destination):
            parts = [*zip(self.halves(destination), self._halves_of(a), self._halves_of(b), strict=True)]
        else:
            parts = [(self.destination(destination), self.source(a, kind), self.source(b, kind))]
        return [select(chooser, x, y, d) for d, x, y in parts]

    def _packed(self, instruction: Instruction) -> list:
        destination, *sources = instruction.operands
        operation = arithmetic.find((*instruction.parts[:-1], "f32"))
        if operation is None:
            raise UnsupportedInstructionError(f"{instruction.opcode} is not supported")
        halves = [self._halves_of(s) for s in sources]
        key = (*instruction.parts[:-1], "f32")
        return [
            Pure(key, operation.function, tuple(h[i] for h in halves), operation.inputs, d, operation.output)
            for i, d in enumerate(self.halves(destination))
        ]

    def _pure(self, instruction: Instruction) -> list:
        destination, *sources = instruction.operands
        if sources and isinstance(sources[0], Vector):
            sources = [*sources[0].items, *sources[1:]]
        immediates = tuple(s.value if isinstance(s, Immediate) else None for s in sources)
        operation = arithmetic.find(instruction.parts, immediates)
        if operation is None:
            raise UnsupportedInstructionError(f"{instruction.opcode} is not supported")
        types = operation.inputs
        if not len(types) <= len(sources):
            raise UnsupportedInstructionError(f"{instruction.opcode} with {len(sources)} sources is not supported")
        # Literals that the function already knows are behind its inputs; that of prmt knows its selector, too.
        known = immediates if instruction.parts[0] == "prmt" else immediates[len(types) :]
        key = (*instruction.parts, known, len(types))
        refs = tuple(self.source(s, _unsigned(t)) for s, t in zip(sources, types, strict=False))
        if isinstance(destination, Pair):
            return self._two_predicates(key, operation, refs, types, destination)
        return self._results(
            Pure(key, operation.function, refs, types, self.destination(destination), operation.output)
        )

    def _results(self, operation: Pure) -> list:
        """The operation, and the extension of a narrow result to its register."""
        held, result = operation.destination, operation.result
        if result == "b1" or int(result[1]) >= int(held.kind[1]) or held.name == "_":
            return [operation]
        narrow = Component(held.name + ".narrow", _unsigned(result))
        widen = special.extend(result, held.kind)
        return [
            replace(operation, destination=narrow),
            Pure(("extend", result, held.kind), widen, (narrow,), (result,), held, held.kind),
        ]

    def _two_predicates(self, key, operation, refs, types, destination: Pair) -> list:
        """setp with a second result: the comparison's complement (combined with the third predicate, if any)."""
        results: list[Pure | Copy] = []
        copies = []
        for complement, d in enumerate((destination.first, destination.second)):
            if d == SINK:
                continue
            function, mark = (operation.second, ("second",)) if complement else (operation.function, ())
            # A source may be the first destination, so both are written when both are known.
            held = self.destination(d)
            value = Component(f"{held.name}.new", held.kind)
            results.append(Pure((*key, *mark), function, refs, types, value, operation.output))
            copies.append(Copy(value, held))
        return results + copies

    def _effect(self, instruction: Instruction, handler: Handler) -> Effect:
        return Effect(
            handler,
            tuple(self._handler_input(v) for v in handler.inputs),
            tuple(self._handler_output(v) for v in handler.outputs),
        )

    def _handler_input(self, wanted: Value | Rows):
        if isinstance(wanted, Rows):
            return tuple(self.source(o, raw_type(wanted.type)) for o in wanted.operands)
        kind = raw_type(wanted.type)
        return self._sum(self.source(wanted.operand, kind), wanted.offset, kind)

    def _handler_output(self, wanted: Value | Rows):
        if isinstance(wanted, Rows):
            return tuple(self.destination(o) for o in wanted.operands)
        return self.destination(wanted.operand)


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


def select(chooser, a, b, destination: Component) -> Pure:
    kind = destination.kind
    return Pure(("select", kind), special.select, (chooser, a, b), ("b1", kind, kind), destination, kind)


def _unsigned(kind: str) -> str:
    return kind if kind == "b1" else "u" + kind[1]


def _located(error: Exception, instruction: Instruction) -> str:
    text = str(error)
    return text if text.startswith("line ") else f"{instruction.where}: {text}"


def _paired_registers(kernel: Kernel) -> set[str]:
    """64-bit registers that packed float32 arithmetic touches, and those that are copied from or to them."""
    pairs: set[str] = set()
    links: list[set[str]] = []
    for instruction in kernel.instructions:
        names = {o.name for o in instruction.operands if isinstance(o, Register) and o.kind == "b64"}
        if instruction.parts[-1] == "f32x2":
            pairs |= names
        elif instruction.parts[0] in ("mov", "selp") and len(names) > 1:
            links.append(names)
    changed = True
    while changed:
        changed = False
        for names in links:
            if names & pairs and not names <= pairs:
                pairs |= names
                changed = True
    return pairs
