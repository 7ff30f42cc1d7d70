"""Races by happens-before, whatever the schedule happened to be.

Every warp's run between two releases, and every asynchronous operation, is an *event*. What is ordered before a
point of the program is a set of events, held as the bits of a Python int: exact, and cheap to join. Order comes
from program order, barriers and waits alone. Two accesses of which one writes race when the later one (in this
schedule) does not know the earlier one's event.

Generic accesses (ld, st, cp.async) become visible to the asynchronous proxy (TMA, wgmma, tcgen05) by
`fence.proxy.async`: `published` is the set of events with such a fence on the way.

*Strong* accesses (atomics, relaxed, acquire, release and volatile loads and stores) do not race with one another.
What a strong write releases is kept by address, as a `Sync` that strong reads of that address acquire; a relaxed access
releases what the last fence before it covers, and acquires when the next fence comes. Scopes are not told apart.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..ptx.syntax import Instruction


class Actor:
    """Who accesses memory: a warp, or one asynchronous operation.

    Attributes:
      agent: a key; accesses of one agent are ordered among themselves unless it is None.
      name: for reports.
      event: what the actor is doing now.
      known: events that are ordered before it.
      published: those of them whose generic writes the asynchronous proxy sees.
      fenced: (known, published) at its last fence, which its relaxed writes release.
      observed: (known, published) that its relaxed reads have seen, which its next fence acquires.
    """

    __slots__ = ("agent", "event", "fenced", "known", "name", "observed", "published")

    def __init__(self, agent: object, name: str, event: int, known: int = 0, published: int = 0) -> None:
        self.agent, self.name, self.event, self.known, self.published = agent, name, event, known, published
        self.fenced = self.observed = (0, 0)


class Sync:
    """What a barrier hands from those who arrive to those who wait."""

    __slots__ = ("known", "published", "released_known", "released_published")

    def __init__(self) -> None:
        self.known = self.published = self.released_known = self.released_published = 0


class Shadow:
    """The last accesses of each cell of one memory, as numbers of accesses (0: none)."""

    def __init__(self, name: str, shape: int | tuple[int, ...]) -> None:
        self.name, self.shape = name, shape
        self.writer = np.zeros(shape, np.int32)
        self.readers: dict[object, np.ndarray] = {}
        self.unordered_reads: list[tuple[int, object]] = []
        self.strong_readers: dict[object, np.ndarray] = {}
        self.strong_writers: dict[object, np.ndarray] = {}
        self.unordered_strong_writes: list[tuple[int, object]] = []


class Monitor:
    """The events of a launch, and the checks of its accesses."""

    def __init__(self, report: Callable[[str, str], None]) -> None:
        self.report = report
        self.names: list[str] = []
        self.access_event = [0]
        self.access_instruction: list[Instruction | None] = [None]
        self.access_generic = [False]
        # The bytes of accesses narrower than a cell, by number, and those of the access that is being checked.
        self._parts: dict[int, np.ndarray] = {}
        self._part: np.ndarray | None = None

    # ---- events and order ----

    def _event(self, name: str) -> int:
        self.names.append(name)
        return len(self.names) - 1

    def warp(self, agent: object, name: str) -> Actor:
        """The actor of a warp that begins to run."""
        return Actor(agent, name, self._event(name))

    def operation(self, issuer: Actor, name: str, agent: object = None, after: Actor | None = None) -> Actor:
        """An asynchronous operation of a warp: it knows what the warp knows, and all that `after` knows.

        Pass the same `agent` for operations that are ordered among themselves, and the previous one as `after`.
        """
        known, published = issuer.known | 1 << issuer.event, issuer.published
        if after is not None:
            known |= after.known | 1 << after.event
            published |= after.published
        self.next_event(issuer)
        return Actor(agent, name, self._event(name), known, published)

    def next_event(self, actor: Actor) -> None:
        """What the actor does from now on is not covered by what it released before."""
        actor.known |= 1 << actor.event
        actor.event = self._event(actor.name)

    @staticmethod
    def release(sync: Sync, actor: Actor, relaxed: bool = False) -> None:
        """The actor arrives at a barrier."""
        known, published = _released(actor, relaxed)
        sync.known |= known
        sync.published |= published

    @staticmethod
    def complete(sync: Sync) -> None:
        """All have arrived."""
        sync.released_known, sync.released_published = sync.known, sync.published
        sync.known = sync.published = 0

    @staticmethod
    def acquire(sync: Sync, actor: Actor, relaxed: bool = False) -> None:
        """The actor has waited for the barrier, or has read a value that carries `sync`."""
        if relaxed:
            actor.observed = actor.observed[0] | sync.released_known, actor.observed[1] | sync.released_published
            return
        actor.known |= sync.released_known
        actor.published |= sync.released_published

    def leave(self, sync: Sync, actor: Actor, relaxed: bool, replace: bool) -> None:
        """The actor has written a value that carries `sync`, in place of what was there or (an atomic) on top of it."""
        known, published = _released(actor, relaxed)
        if replace:
            sync.released_known = sync.released_published = 0
        sync.released_known |= known
        sync.released_published |= published
        if not relaxed:
            self.next_event(actor)

    def fence(self, actor: Actor, acquire: bool = True, release: bool = True) -> None:
        """fence.acq_rel: completes the relaxed reads before it, and covers for the relaxed writes behind it."""
        if acquire:
            actor.known |= actor.observed[0]
            actor.published |= actor.observed[1]
        if release:
            actor.fenced = _released(actor, False)
            self.next_event(actor)

    @staticmethod
    def join(actor: Actor, done: Actor) -> None:
        """The actor has waited for another actor's operation."""
        actor.known |= done.known | 1 << done.event
        actor.published |= done.published

    def publish(self, actor: Actor) -> None:
        """fence.proxy.async: what the actor knows becomes visible to the asynchronous proxy."""
        actor.published |= actor.known | 1 << actor.event
        self.next_event(actor)

    # ---- accesses ----

    def read(
        self,
        shadow: Shadow,
        cells,
        actor: Actor,
        instruction: Instruction,
        generic: bool,
        strong: bool = False,
        part: np.ndarray | None = None,
    ) -> None:
        """Check and record a read.

        Args:
          shadow: of the memory.
          cells: an index of the shadow's arrays (slices or index arrays).
          actor: who reads.
          instruction: by which.
          generic: through the generic proxy.
          strong: see the module.
          part: the bytes, where they are not whole cells; two such accesses race only where they share a byte.
        """
        self._part = part
        self._check(shadow, shadow.writer[cells], actor, instruction, generic, "read", "write")
        if not strong and (shadow.strong_writers or shadow.unordered_strong_writes):
            self._check_strong_writes(shadow, cells, actor, instruction, generic, "read")
        access = self._access(actor, instruction, generic)
        if actor.agent is None:
            shadow.unordered_reads.append((access, cells))
        else:
            _record(shadow, shadow.strong_readers if strong else shadow.readers, cells, actor, access)

    def write(
        self,
        shadow: Shadow,
        cells,
        actor: Actor,
        instruction: Instruction,
        generic: bool,
        strong: bool = False,
        part: np.ndarray | None = None,
    ) -> None:
        """Check and record a write; the arguments are those of `read`."""
        self._part = part
        self._check(shadow, shadow.writer[cells], actor, instruction, generic, "write", "write")
        self._check_reads(shadow, shadow.readers, cells, actor, instruction)
        if shadow.unordered_reads:
            shadow.unordered_reads = self._check_unordered(
                shadow, shadow.unordered_reads, cells, actor, instruction, "write", "read"
            )
        if not strong:
            if shadow.strong_readers:
                self._check_reads(shadow, shadow.strong_readers, cells, actor, instruction)
            if shadow.strong_writers or shadow.unordered_strong_writes:
                self._check_strong_writes(shadow, cells, actor, instruction, generic, "write")
        access = self._access(actor, instruction, generic)
        if not strong:
            shadow.writer[cells] = access
        elif actor.agent is None:
            shadow.unordered_strong_writes.append((access, cells))
        else:
            _record(shadow, shadow.strong_writers, cells, actor, access)

    def _check_reads(self, shadow, readers, cells, actor, instruction) -> None:
        for agent, column in readers.items():
            if agent is not actor.agent:
                self._check(shadow, column[cells], actor, instruction, False, "write", "read")

    def _check_strong_writes(self, shadow, cells, actor, instruction, generic, doing) -> None:
        for agent, column in shadow.strong_writers.items():
            if agent is not actor.agent:
                self._check(shadow, column[cells], actor, instruction, generic, doing, "write")
        if shadow.unordered_strong_writes:
            self._check_unordered(shadow, shadow.unordered_strong_writes, cells, actor, instruction, doing, "write")

    def _access(self, actor: Actor, instruction: Instruction, generic: bool) -> int:
        self.access_event.append(actor.event)
        self.access_instruction.append(instruction)
        self.access_generic.append(generic)
        access = len(self.access_event) - 1
        if self._part is not None:
            self._parts[access] = self._part
        return access

    def _apart(self, access: int) -> bool:
        """Whether an earlier access and this one, both narrower than a cell, share no byte."""
        other = self._parts.get(access)
        return self._part is not None and other is not None and not np.isin(self._part, other).any()

    def _check(self, shadow, accesses, actor, instruction, generic, doing, earlier) -> None:
        if accesses.size == 0:
            return
        first = accesses.flat[0]
        for access in (first,) if (accesses == first).all() else np.unique(accesses):
            event = self.access_event[access]
            if access == 0 or event == actor.event:
                continue
            if not actor.known >> event & 1:
                if not self._apart(access):
                    self._race(shadow, access, actor, instruction, doing, earlier)
            elif (
                earlier == "write" and not generic and self.access_generic[access] and not actor.published >> event & 1
            ):
                self._unpublished(shadow, access, actor, instruction, doing)

    def _check_unordered(self, shadow, accesses, cells, actor, instruction, doing, earlier) -> list[tuple[int, object]]:
        """Check against the accesses of operations without order; those are left that this one does not come after."""
        touched = np.zeros(shadow.shape, bool)
        touched[cells] = True
        kept = []
        for access, cells_of_access in accesses:
            event = self.access_event[access]
            ordered = event == actor.event or actor.known >> event & 1
            overlaps = touched[cells_of_access].any()
            if overlaps and not ordered and not self._apart(access):
                self._race(shadow, access, actor, instruction, doing, earlier)
            if not (overlaps and ordered):
                kept.append((access, cells_of_access))
        return kept

    def _race(self, shadow, access, actor, instruction, doing, earlier) -> None:
        self.report(
            "race",
            f"the {doing} of {shadow.name} by {actor.name} at {instruction.where} is not ordered after the {earlier} "
            f"by {self.names[self.access_event[access]]} at {self.access_instruction[access].where}",
        )

    def _unpublished(self, shadow, access, actor, instruction, doing) -> None:
        self.report(
            "proxy",
            f"the asynchronous {doing} of {shadow.name} by {actor.name} at {instruction.where} follows the generic "
            f"write by {self.names[self.access_event[access]]} at {self.access_instruction[access].where} "
            "without fence.proxy.async between them",
        )


def _released(actor: Actor, relaxed: bool) -> tuple[int, int]:
    """(known, published) that a write by the actor hands on."""
    return actor.fenced if relaxed else (actor.known | 1 << actor.event, actor.published)


def _record(shadow: Shadow, columns: dict[object, np.ndarray], cells, actor: Actor, access: int) -> None:
    column = columns.get(actor.agent)
    if column is None:
        column = columns[actor.agent] = np.zeros(shadow.shape, np.int32)
    column[cells] = access
