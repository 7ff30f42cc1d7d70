"""Groups of asynchronous operations, which a thread commits and waits for in order.

A wait for all but the N newest groups concerns the operations that the waiting threads issued before their N-th last
commit. Groups without operations count too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..checks.races import Actor
from ..machine.wait import Wait
from ..ptx.syntax import Instruction
from .handler import Handler

if TYPE_CHECKING:
    from ..machine.warp import Warp

_NOT_ISSUED = np.iinfo(np.int64).max


@dataclass(slots=True, eq=False)
class Tracked:
    """One operation in the groups of its threads.

    Attributes:
      groups: (32,) the group of each lane; lanes that did not issue it have a number that is never waited for.
      done: whether it is complete.
      actor: whom the waiting warp then knows, or None.
      instruction: that issued it.
    """

    groups: np.ndarray
    done: Callable[[], bool]
    actor: Actor | None
    instruction: Instruction


class AsyncGroups:
    """The groups of the threads of one warp.

    Attributes:
      committed: (32,) groups that each lane has committed.
      pending: operations not waited for yet, in order of issue.
    """

    def __init__(self) -> None:
        self.committed = np.zeros(32, np.int64)
        self.pending: list[Tracked] = []

    def add(
        self, mask: np.ndarray | None, done: Callable[[], bool], actor: Actor | None, instruction: Instruction
    ) -> None:
        """Count an operation of the lanes of a mask to their next group."""
        groups = self.committed.copy() if mask is None else np.where(mask, self.committed, _NOT_ISSUED)
        self.pending.append(Tracked(groups, done, actor, instruction))

    def commit(self, mask: np.ndarray | None) -> None:
        """End a group."""
        if mask is None:
            self.committed += 1
        else:
            self.committed[mask] += 1

    def due(self, mask: np.ndarray | None, keep: int) -> list[Tracked]:
        """What a wait for all but the `keep` newest groups concerns; -1 includes what is not committed."""
        limit = self.committed - keep
        if mask is None:
            return [t for t in self.pending if (t.groups < limit).any()]
        return [t for t in self.pending if (t.groups < limit)[mask].any()]

    def drop(self, waited: list[Tracked]) -> None:
        """Forget what was waited for."""
        numbers = set(map(id, waited))
        self.pending = [t for t in self.pending if id(t) not in numbers]


def groups_of(warp: Warp, name: str) -> AsyncGroups:
    """The groups that an instruction family keeps for a warp."""
    kept = warp.pending[name]
    if not kept:
        kept.append(AsyncGroups())
    return kept[0]


def commit_handler(*names: str) -> Handler:
    """The handler of a commit instruction."""

    def run(warp: Warp, mask: np.ndarray | None) -> None:
        for name in names:
            groups_of(warp, name).commit(mask)

    return Handler(run)


def wait_handler(names: tuple[str, ...], keep: int) -> Handler:
    """The handler of a wait instruction for the groups of some names."""

    def run(warp: Warp, mask: np.ndarray | None) -> Wait | None:
        waited = [(groups, groups.due(mask, keep)) for groups in (groups_of(warp, name) for name in names)]
        unfinished = [t for _, due in waited for t in due if not t.done()]
        if unfinished:
            return Wait(
                lambda: all(t.done() for t in unfinished),
                lambda: f"the completion of {unfinished[0].instruction.where}",
            )
        for groups, due in waited:
            groups.drop(due)
            for tracked in due:
                warp.join(tracked.actor)
        return None

    return Handler(run, blocking=True)
