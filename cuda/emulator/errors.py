"""What the emulator reports: faults that end a launch, and findings that do not."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


class EmulationError(Exception):
    """A fault of the emulated program, with the instruction at which it happened.

    Attributes:
      findings: what was found under any seed before it.
    """

    def __init__(self, text: str, findings: Iterable[Finding] = ()) -> None:
        super().__init__(text)
        self.findings = list(findings)


class PtxSyntaxError(EmulationError):
    """Text that the parser does not understand, with its line."""


class UnsupportedInstructionError(EmulationError, NotImplementedError):
    """An instruction, or a form of one, that the emulator does not know."""


class MemoryFaultError(EmulationError):
    """An access out of bounds, misaligned, to memory never written, or to columns never allocated."""


class BarrierFaultError(EmulationError):
    """Misuse of an mbarrier or a named barrier."""


class DescriptorFaultError(EmulationError):
    """A descriptor, tensor map or instruction word that the hardware would reject."""


class DeadlockError(EmulationError):
    """No warp can go on and nothing is in flight."""


@dataclass(frozen=True)
class Finding:
    """Something wrong that does not stop the launch.

    Attributes:
      kind: "race" (accesses without order), "proxy" (a generic write that the asynchronous proxy may not see),
        "lifetime" (a use of shared memory that may outlive its CTA), "leak" (tensor memory not freed), "issue" (an
        instruction of one thread issued by several, or a lane quadrant that was not named), "phase" (a barrier that was
        overrun), "assumption" (the result rests on a rule of docs/blackwell_questions.md that the documentation does
        not grant) or "register" (a register used too early, or a lane that does not run read by a shuffle).
      text: one sentence that names the instructions and their lines.
    """

    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"
