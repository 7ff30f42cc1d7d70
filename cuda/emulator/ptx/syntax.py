"""The parts of a PTX kernel."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

# Bytes of one element of each fundamental type.
TYPE_BYTES = {
    "b8": 1, "u8": 1, "s8": 1,
    "b16": 2, "u16": 2, "s16": 2, "f16": 2, "bf16": 2,
    "b32": 4, "u32": 4, "s32": 4, "f32": 4, "f16x2": 4, "bf16x2": 4, "tf32": 4,
    "b64": 8, "u64": 8, "s64": 8, "f64": 8, "f32x2": 8,
    "b128": 16,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Register:
    """A register; `kind` is "pred", "b16", "b32", "b64" or "b128"."""

    name: str
    kind: str


@dataclass(frozen=True, slots=True)
class Immediate:
    """A literal; `value` holds the raw bits of 0f and 0d literals."""

    value: int
    is_float: bool = False


@dataclass(frozen=True, slots=True)
class Symbol:
    """A label, parameter, shared variable or special register."""

    name: str


@dataclass(frozen=True, slots=True)
class Address:
    """`[base + offset]`, with the coordinates of a tensor map behind it."""

    base: Register | Immediate | Symbol
    offset: int = 0
    coordinates: tuple = ()


@dataclass(frozen=True, slots=True)
class Vector:
    items: tuple


@dataclass(frozen=True, slots=True)
class Pair:
    """`first|second`, as in `elect.sync leader|predicate`."""

    first: object
    second: object


@dataclass(frozen=True, slots=True)
class Negated:
    """`!predicate` as a source operand."""

    register: Register


SINK = Symbol("_")


@dataclass(frozen=True)
class Instruction:
    """One statement.

    Attributes:
      opcode: with all modifiers, as written.
      operands: in the order written.
      guard: the predicate register, or None.
      negated: whether the guard is `@!p`.
      line: of the PTX text, from 1.
      text: the statement, white space collapsed.
      index: its position in the kernel.
      source: "file:line" of the program that it was compiled from, or "".
    """

    opcode: str
    operands: tuple
    guard: Register | None
    negated: bool
    line: int
    text: str
    index: int
    source: str = ""

    @cached_property
    def parts(self) -> tuple[str, ...]:
        """The opcode split at its dots."""
        return tuple(self.opcode.split("."))

    @property
    def where(self) -> str:
        """For messages."""
        place = f"line {self.line}" + (f" ({self.source})" if self.source else "")
        return f"{place}: {self.text[:120]}"


@dataclass(frozen=True)
class Parameter:
    """A parameter of a kernel.

    Attributes:
      name: as declared.
      offset: in the parameter space.
      size: in bytes.
      type: of the parameter, or of an element of an array.
    """

    name: str
    offset: int
    size: int
    type: str


@dataclass(frozen=True)
class Kernel:
    """An entry: its interface and its instructions.

    Attributes:
      name: of the entry.
      target: such as "sm_100f".
      parameters: in order of declaration.
      parameter_bytes: size of the parameter space.
      instructions: in order.
      labels: label to the index of the instruction behind it.
      shared_variables: name to (offset, bytes) of the shared arrays; dynamic arrays have 0 bytes and start
        behind the static ones.
      threads: of a CTA as declared by `.reqntid`, or None.
      max_threads: of a CTA as declared by `.maxntid`, or None.
      cluster: CTAs of a cluster as declared by `.reqnctapercluster`, or None.
      max_cluster: CTAs of a cluster as declared by `.maxclusterrank`, or None.
      explicit_cluster: whether a launch has to say what its clusters are.
    """

    name: str
    target: str
    parameters: tuple[Parameter, ...]
    parameter_bytes: int
    instructions: tuple[Instruction, ...]
    labels: dict[str, int]
    shared_variables: dict[str, tuple[int, int]] = field(default_factory=dict)
    threads: tuple[int, int, int] | None = None
    max_threads: int | None = None
    cluster: tuple[int, int, int] | None = None
    max_cluster: int | None = None
    explicit_cluster: bool = False
