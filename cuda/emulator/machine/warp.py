"""Warps and their CTAs: registers, groups of lanes that run together, and what each instruction family keeps."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..checks.races import Actor, Monitor
from ..errors import BarrierFaultError, MemoryFaultError
from .barriers import Generation, MBarrier, ThreadBarrier
from .memory import OFFSET_MASK, RANK_SHIFT, SHARED_BASE, SharedMemory
from .wait import Wait

if TYPE_CHECKING:
    from ..launch import Machine
    from ..ptx.syntax import Instruction
    from .tensor_memory import TensorMemory


@dataclass(frozen=True, slots=True)
class Parting:
    """Lanes of a group go different ways and meet again at `meet`."""

    taken: np.ndarray
    others: np.ndarray
    target: int
    following: int
    meet: int


class Meeting:
    """Where lanes that parted meet again.

    Attributes:
      parent: the group from which they parted, without its lanes.
      missing: groups that have not come yet.
      mask: lanes that have come.
    """

    __slots__ = ("mask", "missing", "parent")

    def __init__(self, parent: Group) -> None:
        self.parent, self.missing, self.mask = parent, 2, np.zeros(32, bool)


class Group:
    """Lanes of a warp at one instruction.

    Attributes:
      pc: index of the next instruction.
      meet: index at which it waits for lanes that parted from it, or -1.
      meeting: with them.
      mask: None for all 32 lanes, otherwise a (32,) bool array.
      wait: why the group cannot go on, or None.
      timed_out: let a try_wait return false.
      tried_at: state of the machine in which it last timed out.
      tries: how often it timed out in that state.
      blocked_at: state of the machine in which its wait was last found not to be over.
      token: what a two-step instruction (bar.sync) remembers while it waits.
    """

    __slots__ = ("blocked_at", "mask", "meet", "meeting", "pc", "timed_out", "token", "tried_at", "tries", "wait")

    def __init__(self, pc: int, mask: np.ndarray | None, meet: int = -1, meeting: Meeting | None = None) -> None:
        self.pc, self.mask, self.meet, self.meeting = pc, mask, meet, meeting
        self.wait: Wait | None = None
        self.timed_out, self.tried_at, self.tries, self.blocked_at = False, -1, 0, -1
        self.token: Generation | None = None

    def runnable(self, state: int) -> bool:
        """Whether it can go on; asked once in each state of the machine."""
        if self.wait is None or self.timed_out:
            return True
        if self.blocked_at == state:
            return False
        if self.wait.ready():
            return True
        self.blocked_at = state
        return False


class Warp:
    """A warp in execution.

    Attributes:
      cta: its CTA.
      index: in the CTA.
      machine: the launch.
      live: lanes that have not exited, a (32,) bool array.
      registers: by slot; arrays of 32 lanes, or Python ints where all lanes agree.
      groups: its lanes by instruction.
      group: the group that runs now.
      actor: its identity for race checking, or None.
      pending: lists that the instruction families keep for themselves, by name.
    """

    def __init__(self, cta: Cta, index: int, live: np.ndarray, actor: Actor | None) -> None:
        self.cta, self.index, self.machine, self.actor = cta, index, cta.machine, actor
        self.live = live
        self.groups = [Group(0, None if live.all() else live)]
        self.group = self.groups[0]
        self.registers: list = []
        self.pending: defaultdict[str, list] = defaultdict(list)
        self.executed = 0
        self.asleep_until = 0
        self.priority = 0.0

    def runnable(self, state: int) -> bool:
        """Whether any of its groups can go on."""
        return any(group.wait is None or group.runnable(state) for group in self.groups)

    def join(self, done: Actor | None) -> None:
        """The warp has waited for an asynchronous operation."""
        if self.actor is not None and done is not None:
            Monitor.join(self.actor, done)

    @property
    def name(self) -> str:
        return f"warp {self.index} of CTA {self.cta.index}"

    def part(self, group: Group, parting: Parting) -> None:
        """Lanes of a group go different ways; it goes on where they meet."""
        self.machine.changed()
        group.pc = parting.meet
        self.groups.remove(group)
        meeting = Meeting(group)
        for pc, mask in ((parting.following, parting.others), (parting.target, parting.taken)):
            half = Group(pc, mask, parting.meet, meeting)
            self.groups.append(half)
            if pc == parting.meet:
                self.meet(half)

    def meet(self, group: Group) -> None:
        """A group has come to where it meets the others; the last one lets the lanes go on together."""
        self.machine.changed()
        self.groups.remove(group)
        if group.meeting is None:
            raise AssertionError("a group without others has nobody to meet")
        group.meeting.mask |= group.mask if group.mask is not None else True
        self._come(group.meeting)

    def _come(self, meeting: Meeting) -> None:
        meeting.missing -= 1
        if meeting.missing:
            return
        parent = meeting.parent
        if not meeting.mask.any():
            self._gone(parent)
            return
        parent.mask = None if meeting.mask.all() else meeting.mask
        self.groups.append(parent)
        if parent.pc == parent.meet:
            self.meet(parent)

    def _gone(self, group: Group) -> None:
        if group.meeting is not None:
            self._come(group.meeting)

    def leave(self, group: Group) -> None:
        """The lanes of a group exit."""
        self.machine.changed()
        self.groups.remove(group)
        self.live = self.live & ~group.mask if group.mask is not None else np.zeros(32, bool)
        self._gone(group)

    def converged(self, mask: np.ndarray | None) -> Wait | None:
        """None when all live lanes are here, else a wait for the others."""
        if mask is None or (mask == self.live).all():
            return None
        group = self.group
        return Wait(
            lambda: group.mask is None or bool((group.mask == self.live).all()), lambda: "the other lanes of its warp"
        )


class Cta:
    """A CTA in execution.

    Attributes:
      index: (x, y, z) in the grid.
      rank: in its cluster.
      cluster: all CTAs of the cluster, by rank.
      shared: its shared memory.
      tensor: its tensor memory.
      barriers: named barriers, by number.
      warps: by index.
    """

    def __init__(self, machine: Machine, index: tuple[int, int, int], rank: int, cluster: list[Cta]) -> None:
        self.machine, self.index, self.rank, self.cluster = machine, index, rank, cluster
        self.shared: SharedMemory
        self.tensor: TensorMemory
        self.cluster_barrier: ThreadBarrier
        self.barriers: dict[int, ThreadBarrier] = {}
        self.warps: list[Warp] = []

    def named_barrier(self, number: int) -> ThreadBarrier:
        if not 0 <= number < 16:
            raise BarrierFaultError(f"named barrier {number}; 0 to 15 exist")
        if number not in self.barriers:
            self.barriers[number] = ThreadBarrier(f"named barrier {number} of CTA {self.index}", self.machine.monitor)
        return self.barriers[number]

    def shared_target(self, address: int, instruction: Instruction) -> tuple[Cta, int]:
        """The CTA and the byte offset of a shared address."""
        rank = address >> RANK_SHIFT
        if rank >= len(self.cluster):
            raise MemoryFaultError(
                f"{instruction.where}: shared address {address:#x} names CTA rank {rank} of {len(self.cluster)}"
            )
        return self.cluster[rank], address & OFFSET_MASK

    def mbarrier(
        self, address: int, actor: Actor | None, instruction: Instruction, asynchronous: bool = False
    ) -> MBarrier:
        """The mbarrier at a shared address, of whichever CTA of the cluster; who uses it may be the async proxy."""
        cta, offset = self.shared_target(address, instruction)
        bar = cta.shared.barriers.get(offset)
        if bar is None:
            raise BarrierFaultError(
                f"{instruction.where}: no mbarrier was initialised at shared byte {offset - SHARED_BASE} "
                f"of CTA rank {cta.rank}"
            )
        bar.used_by(actor, instruction, asynchronous)
        if actor is not None and cta is not self:
            cta.shared.lifetime.use(actor, instruction)
        return bar
