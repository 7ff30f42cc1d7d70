"""Races by happens-before, whatever the schedule happened to be.

Every warp's run between two releases, and every asynchronous operation, is an *event*. What is ordered before a
point of the program is a set of events, held as the bits of a Python int: exact, and cheap to join. Order comes
from program order, barriers and waits alone. Two accesses of which one writes race when the later one (in this
schedule) does not know the earlier one's event.

Generic accesses (ld, st, cp.async) become visible to the asynchronous proxy (TMA, wgmma, tcgen05) by
`fence.proxy.async`: `published` is the set of events with such a fence on the way.

*Strong* accesses (atomics, relaxed, acquire, release and volatile loads and stores) do not race with one another.
What a strong write releases is kept by address, as a `ValueSync` that strong reads of that address acquire; a relaxed
access releases what the last fence before it covers, and acquires when the next fence comes. To acquire from another
CTA with .cta scope is reported, and orders; the scopes of fences are not told apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..ptx.syntax import Instruction

WORD = 4  # bytes of a cell of global and shared memory


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


class ValueSync(Sync):
    """What a value in memory hands from strong writes to strong reads.

    Attributes:
      releases: of the writes: in which CTA, and whether for that CTA alone.
    """

    __slots__ = ("releases",)

    def __init__(self) -> None:
        super().__init__()
        self.releases: set[tuple[object, bool]] = set()


class Shadow:
    """The last accesses of each cell of one memory, as numbers of accesses (0: none).

    Attributes:
      name: of the memory, for reports.
      shape: of the arrays; a number of words for memory that is addressed by bytes.
      fine: whether the cells are bytes, as they are from the first access on that is narrower than a word.
      written: whether anything was written.
    """

    def __init__(self, name: str, shape: int | tuple[int, ...]) -> None:
        self.name, self.shape = name, shape
        self.fine = self.written = False
        self.writer = np.zeros(shape, np.int32)
        self.readers: dict[object, np.ndarray] = {}
        self.unordered_reads: list[tuple[int, Any]] = []
        self.strong_readers: dict[object, np.ndarray] = {}
        self.strong_writers: dict[object, np.ndarray] = {}
        self.unordered_strong_writes: list[tuple[int, Any]] = []

    def cells(self, words, part: np.ndarray | None):
        """The cells of an access to some words, or, if it is narrower than a word, to the bytes `part`."""
        if part is None:
            return _bytes_of(words) if self.fine else words
        if not self.fine:
            self._refine()
        return part

    def _refine(self) -> None:
        """Make cells of bytes from cells of words."""
        self.fine, self.shape = True, WORD * self.shape
        self.writer = np.repeat(self.writer, WORD)
        for columns in (self.readers, self.strong_readers, self.strong_writers):
            for agent, column in columns.items():
                columns[agent] = np.repeat(column, WORD)
        for accesses in (self.unordered_reads, self.unordered_strong_writes):
            accesses[:] = [(access, _bytes_of(words)) for access, words in accesses]


class Monitor:
    """The events of a launch, and the checks of its accesses."""

    def __init__(self, report: Callable[[str, str], None]) -> None:
        self.report = report
        self.names: list[str] = []
        self.access_event = [0]
        self.access_instruction: list[Any] = [None]
        self.access_generic = [False]

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
          cells: an index of the shadow's arrays (slices or index arrays), in words where it has bytes.
          actor: who reads.
          instruction: by which.
          generic: through the generic proxy.
          strong: see the module.
          part: the bytes, where they are not whole words.
        """
        cells = shadow.cells(cells, part)
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
        cells, shadow.written = shadow.cells(cells, part), True
        self._check(shadow, shadow.writer[cells], actor, instruction, generic, "write", "write")
        self._check_reads(shadow, shadow.readers, cells, actor, instruction)
        if shadow.unordered_reads:
            left = self._check_unordered(shadow, shadow.unordered_reads, cells, actor, instruction, "write", "read")
            # Strong writes that follow need not be ordered after a strong one, but after the reads they have to be.
            if not strong:
                shadow.unordered_reads = left
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
            earlier = shadow.unordered_strong_writes
            left = self._check_unordered(shadow, earlier, cells, actor, instruction, doing, "write")
            if doing == "write":
                shadow.unordered_strong_writes = left

    def _access(self, actor: Actor, instruction: Instruction, generic: bool) -> int:
        self.access_event.append(actor.event)
        self.access_instruction.append(instruction)
        self.access_generic.append(generic)
        return len(self.access_event) - 1

    def _check(self, shadow, accesses, actor, instruction, generic, doing, earlier) -> None:
        if accesses.size == 0:
            return
        first = accesses.flat[0]
        for access in (first,) if (accesses == first).all() else np.unique(accesses):
            event = self.access_event[access]
            if access == 0 or event == actor.event:
                continue
            if not actor.known >> event & 1:
                self._race(shadow, access, actor, instruction, doing, earlier)
            elif (
                earlier == "write" and not generic and self.access_generic[access] and not actor.published >> event & 1
            ):
                self._unpublished(shadow, access, actor, instruction, doing)

    def _check_unordered(self, shadow, accesses, cells, actor, instruction, doing, earlier) -> list[tuple[int, Any]]:
        """Check against the accesses of operations without order; what of them this one does not come after is left."""
        touched = np.zeros(shadow.shape, bool)
        touched[cells] = True
        kept = []
        for access, cells_of_access in accesses:
            event = self.access_event[access]
            overlap = touched[cells_of_access]
            if overlap.any():
                if event != actor.event and not actor.known >> event & 1:
                    self._race(shadow, access, actor, instruction, doing, earlier)
                elif overlap.all():
                    continue
                else:
                    cells_of_access = _outside(shadow, cells_of_access, overlap)
            kept.append((access, cells_of_access))
        return kept

    def lanes_collide(self, actor: Actor, instruction: Instruction) -> None:
        """Lanes of one store write different values to one address: which of them stays is undefined."""
        self.report("race", f"lanes of {actor.name} store different values to one address at {instruction.where}")

    def read_constant(
        self, shadow: Shadow, cells, actor: Actor, instruction: Instruction, part: np.ndarray | None
    ) -> None:
        """Check a read by ld.global.nc, of memory that has to be constant while the kernel runs."""
        if not shadow.written:
            return
        cells = shadow.cells(cells, part)
        writes = [shadow.writer[cells], *(column[cells] for column in shadow.strong_writers.values())]
        access = max(int(column.max()) for column in writes)
        for unordered, cells_of_write in shadow.unordered_strong_writes:
            touched = np.zeros(shadow.shape, bool)
            touched[cells] = True
            if touched[cells_of_write].any():
                access = max(access, unordered)
        if access:
            self.report(
                "race",
                f"the read of {shadow.name} by {actor.name} at {instruction.where} is one of constant memory (.nc), "
                f"but the kernel wrote there: {self.names[self.access_event[access]]} at "
                f"{self.access_instruction[access].where}",
            )

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


def _bytes_of(words):
    """The bytes of words, given as a slice or an index array."""
    if isinstance(words, slice):
        return slice(WORD * words.start, WORD * words.stop)
    return (WORD * words[..., None] + np.arange(WORD)).reshape(-1)


def _outside(shadow: Shadow, cells, overlap: np.ndarray):
    """An index of those cells that are not in the overlap, a bool array with an element for each of them."""
    if isinstance(cells, np.ndarray):
        return cells[~overlap]
    if isinstance(cells, slice) and overlap.ndim == 1:
        return np.arange(cells.start, cells.stop)[~overlap]
    left = np.zeros(shadow.shape, bool)
    left[cells] = ~overlap
    return np.nonzero(left)


def _record(shadow: Shadow, columns: dict[object, np.ndarray], cells, actor: Actor, access: int) -> None:
    column = columns.get(actor.agent)
    if column is None:
        column = columns[actor.agent] = np.zeros(shadow.shape, np.int32)
    column[cells] = access
