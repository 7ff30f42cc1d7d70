"""How a register-to-register instruction is described: an opcode taken apart, and the function that it means."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..errors import UnsupportedInstructionError

# NumPy type codes of the registers that hold each PTX type. Eight-bit registers live in 16 bits.
CODES = {
    "b8": "u2", "u8": "u2", "s8": "i2",
    "b16": "u2", "u16": "u2", "s16": "i2", "f16": "f2", "bf16": "u2",
    "b32": "u4", "u32": "u4", "s32": "i4", "f32": "f4", "tf32": "u4",
    "u16x2": "u4", "s16x2": "u4", "f16x2": "u4", "bf16x2": "u4",
    "b64": "u8", "u64": "u8", "s64": "i8", "f64": "f8",
    "pred": "b1",
}  # fmt: skip

SMALL_PAIRS = ("e4m3x2", "e5m2x2", "e2m1x2", "e2m3x2", "e3m2x2", "ue8m0x2")
SMALL_QUADS = ("e4m3x4", "e5m2x4", "e2m1x4", "e2m3x4", "e3m2x4")
TYPES = frozenset(CODES) | frozenset(SMALL_PAIRS) | frozenset(SMALL_QUADS) | {"u4", "s4", "u2", "s2"}

ROUNDINGS = ("rn", "rz", "rm", "rp")


@dataclass(frozen=True)
class Operation:
    """The meaning of one instruction.

    `function` is elementwise: its arguments are arrays of the stated types of any shapes that broadcast, or NumPy
    scalars; it modifies none of them. Call it where floating-point warnings are off (`np.errstate(all="ignore")`).

    Attributes:
      function: of the source operands, in the order written, those in braces too.
      inputs: NumPy type codes, one for each source operand that `function` takes. An operand behind the last one
        was a literal that `function` already knows (`lop3`). A register wider than its input is read by its low bits.
      output: NumPy type code. A result narrower than its register is extended: by its sign if the code is signed.
      second: the function of the destination behind the bar of `setp p|q`, otherwise None.
    """

    function: Callable
    inputs: tuple[str, ...]
    output: str
    second: Callable | None = None


@dataclass(frozen=True)
class Opcode:
    """An opcode taken apart.

    Attributes:
      name: such as "cvt".
      modifiers: what is neither name nor type, in order.
      types: in order.
      immediates: one entry for each source operand, its value if it is a literal, otherwise None; empty if unknown.
    """

    name: str
    modifiers: tuple[str, ...]
    types: tuple[str, ...]
    immediates: tuple[int | None, ...] = ()

    @classmethod
    def of(cls, parts: tuple[str, ...], immediates: tuple[int | None, ...] = ()) -> Opcode:
        rest = parts[1:]
        return cls(
            parts[0],
            tuple(part for part in rest if part not in TYPES),
            tuple(part for part in rest if part in TYPES),
            immediates,
        )

    @property
    def type(self) -> str:
        """The only type."""
        if len(self.types) != 1:
            raise self.unsupported("one type expected")
        return self.types[0]

    def unsupported(self, why: str = "") -> UnsupportedInstructionError:
        name = ".".join((self.name, *self.modifiers, *self.types))
        return UnsupportedInstructionError(f"{name} is not supported" + (f": {why}" if why else ""))

    def allow(self, *modifiers: str) -> None:
        """Raises if there is any other modifier."""
        for modifier in self.modifiers:
            if modifier not in modifiers:
                raise self.unsupported(f"unknown modifier .{modifier}")

    def one_of(self, *choices: str, default: str | None = None) -> str:
        """The modifier that is one of `choices`; raises if there are several, or none and no default."""
        present = [choice for choice in choices if choice in self.modifiers]
        if len(present) == 1:
            return present[0]
        if present or default is None:
            raise self.unsupported(f"exactly one of {', '.join(choices)} expected")
        return default

    def has(self, modifier: str) -> bool:
        return modifier in self.modifiers
