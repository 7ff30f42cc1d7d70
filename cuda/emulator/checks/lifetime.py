"""Whether what uses a CTA's shared memory from outside its threads is over when the CTA ends.

The shared memory of a CTA that has ended belongs to somebody else. So the asynchronous operations that read or write
it, the arrivals of other CTAs at its barriers and their loads and stores have to be ordered before the end of one of
its warps, by a wait. Arrivals of a CTA's own operations at its own barriers need no such wait: NVIDIA's kernels have
none after the last tcgen05.commit of a loop.
"""

from __future__ import annotations

from collections.abc import Callable

from ..ptx.syntax import Instruction
from .races import Actor


class Lifetime:
    """The uses of one CTA's shared memory.

    Attributes:
      name: of the CTA.
      report: takes a finding; None where races are not checked, and nothing is used.
      warps: the actors of the CTA's own warps, whose uses are not kept.
    """

    def __init__(self, name: str, report: Callable[[str, str], None] | None) -> None:
        self.name, self.report = name, report
        self.warps: set[Actor] = set()
        self._uses: dict[int, tuple[str, Instruction]] = {}
        self._known: int | None = None

    def use(self, actor: Actor, instruction: Instruction) -> None:
        """Somebody reads or writes the memory, or another CTA uses a barrier in it."""
        if actor in self.warps:
            return
        self._uses[actor.event] = actor.name, instruction
        if self._known is not None:
            self._check(self._known)

    def end(self) -> None:
        """The last warp has exited."""
        known = 0
        for actor in self.warps:
            known |= actor.known | 1 << actor.event
        self._known = known
        self._check(known)

    def _check(self, known: int) -> None:
        for event, (who, instruction) in self._uses.items():
            if self.report is not None and not known >> event & 1:
                self.report(
                    "lifetime",
                    f"the use of the shared memory of {self.name} by {who} at {instruction.where} is not ordered "
                    "before the end of that CTA",
                )
        self._uses.clear()
