"""mbarriers, named barriers and the barrier of a cluster."""

from __future__ import annotations

from ..checks.races import Actor, Monitor, Sync
from ..errors import BarrierFaultError
from ..ptx.syntax import Instruction

_MAX_COUNT = (1 << 20) - 1
_MAX_BYTES = (1 << 20) - 1


class MBarrier(Sync):
    """An mbarrier object in shared memory.

    Attributes:
      name: for reports.
      count: arrivals of a phase.
      pending: arrivals still to come in this phase.
      bytes: transaction bytes still to come; negative when data came before it was announced.
      phase: phases completed.
      awaited: by (warp, parity), the phase in which its wait began that has not succeeded yet.
      users: by agent, the event of its last use.
    """

    __slots__ = ("awaited", "bytes", "count", "initialised_in", "monitor", "name", "pending", "phase", "users")

    def __init__(self, name: str, count: int, actor: Actor | None, monitor: Monitor | None) -> None:
        super().__init__()
        if not 1 <= count <= _MAX_COUNT:
            raise BarrierFaultError(f"{name}: initialised for {count} arrivals; 1 to {_MAX_COUNT} are possible")
        self.name, self.count, self.pending, self.bytes, self.phase = name, count, count, 0, 0
        self.monitor = monitor
        self.initialised_in = actor.event if actor is not None else None
        self.awaited: dict[object, int] = {}
        self.users: dict[object, int] = {}

    def used_by(self, actor: Actor | None, instruction: Instruction, asynchronous: bool = False) -> None:
        """Check that the actor's use of the barrier is ordered after its initialisation.

        The async proxy sees the initialisation by `fence.mbarrier_init` or `fence.proxy.async` (CUDA programming
        guide, "Asynchronous data copies using the Tensor Memory Accelerator").
        """
        if self.monitor is None or actor is None or self.initialised_in is None:
            return
        if actor.agent is not None:
            self.users[actor.agent] = actor.event
        use = f"the use of {self.name} at {instruction.where}"
        if actor.event != self.initialised_in and not actor.known >> self.initialised_in & 1:
            self.monitor.report("race", f"{use} is not ordered after its initialisation")
        elif asynchronous and not actor.published >> self.initialised_in & 1:
            self.monitor.report(
                "proxy", f"{use} has no fence.mbarrier_init or fence.proxy.async after its initialisation"
            )

    def expect(self, nbytes: int) -> None:
        """Announce transaction bytes of this phase.

        It completes the phase where they have all come, and all arrivals, too: a phase is complete when nothing is
        pending (PTX ISA, "Phase Completion of the mbarrier object").
        """
        self.bytes += nbytes
        self._check_bytes()
        self._end_if_complete()

    def arrive(self, count: int, actor: Actor | None, relaxed: bool = False) -> None:
        """`count` arrivals by the actor, who releases what it knows; if relaxed, what its last fence covers."""
        self.pending -= count
        if self.pending < 0:
            raise BarrierFaultError(f"{self.name}: more than its {self.count} arrivals in phase {self.phase}")
        self._released_by(actor, relaxed)

    def complete(self, nbytes: int, actor: Actor | None, relaxed: bool = False) -> None:
        """Transaction bytes have arrived, by an asynchronous operation."""
        self.bytes -= nbytes
        self._check_bytes()
        self._released_by(actor, relaxed)

    def passed(self, parity: int) -> bool:
        """Whether the phase of this parity is over (mbarrier.try_wait.parity)."""
        return (self.phase & 1) != parity

    def drop(self, count: int = 1) -> None:
        """So many participants less from the next phase on (mbarrier.arrive_drop, before its arrival)."""
        self.count -= count

    def _check_bytes(self) -> None:
        if abs(self.bytes) > _MAX_BYTES:
            raise BarrierFaultError(
                f"{self.name}: {self.bytes} pending transaction bytes; the counter holds {_MAX_BYTES}"
            )

    def _released_by(self, actor: Actor | None, relaxed: bool) -> None:
        if self.monitor is not None and actor is not None:
            self.monitor.release(self, actor, relaxed)
        self._end_if_complete()

    def _end_if_complete(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.phase, self.pending = self.phase + 1, self.count
            if self.monitor is not None:
                self.monitor.complete(self)

    def __str__(self) -> str:
        return (
            f"{self.name} (phase {self.phase}, {self.pending} of {self.count} arrivals and {self.bytes} bytes to come)"
        )


class Generation(Sync):
    """One use of a barrier of threads, kept by those who wait for it.

    Attributes:
      over: whether all have arrived.
      true, votes: the true votes and all votes of bar.red.
    """

    __slots__ = ("over", "true", "votes")

    def __init__(self) -> None:
        super().__init__()
        self.over = False
        self.true = self.votes = 0


class ThreadBarrier:
    """A barrier of threads: bar.sync, barrier.cluster, or a pair of CTAs in tcgen05.alloc.

    Attributes:
      arrived: threads in this generation.
      expected: threads that this generation waits for, or 0 while nobody has arrived.
      generation: that is not over yet.
    """

    __slots__ = ("arrived", "expected", "generation", "monitor", "name")

    def __init__(self, name: str, monitor: Monitor | None) -> None:
        self.name, self.monitor = name, monitor
        self.arrived = self.expected = 0
        self.generation = Generation()

    def arrive(
        self, threads: int, expected: int, actor: Actor | None, instruction: Instruction, relaxed: bool = False
    ) -> None:
        """Threads arrive; the generation ends when `expected` have."""
        if self.expected not in (0, expected):
            raise BarrierFaultError(
                f"{instruction.where}: {self.name} is used for {expected} threads while {self.arrived} threads "
                f"of {self.expected} wait at it"
            )
        self.arrived, self.expected = self.arrived + threads, expected
        if self.arrived > expected:
            raise BarrierFaultError(
                f"{instruction.where}: {self.arrived} threads arrive at {self.name}, which is for {expected}"
            )
        if self.monitor is not None and actor is not None:
            self.monitor.release(self.generation, actor, relaxed)
            self.monitor.next_event(actor)
        if self.arrived == expected:
            self.end_generation()

    def end_generation(self) -> None:
        """All have arrived."""
        self.arrived = self.expected = 0
        if self.monitor is not None:
            self.monitor.complete(self.generation)
        self.generation.over = True
        self.generation = Generation()

    def __str__(self) -> str:
        return f"{self.name} ({self.arrived} of {self.expected} threads)"
