"""One launch of a kernel: its CTAs, the order in which warps and engines take turns, and what was found."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from .checks.races import Actor, Monitor
from .errors import DeadlockError, EmulationError, Finding
from .instructions.tcgen05_data import finish_stores
from .machine.barriers import ThreadBarrier
from .machine.engines import Engines, Operation
from .machine.memory import GlobalMemory, SharedMemory
from .machine.tensor_memory import TensorMemory
from .machine.wait import Wait
from .machine.warp import Cta, Group, Parting, Warp
from .program.program import Program
from .program.runtime import EXIT
from .ptx.syntax import Instruction
from .tensor_map import TensorMap

# A finding that repeats is counted, and kept once.
_MAX_FINDINGS = 200
# How often a try_wait returns false before a launch in which nothing else happens is given up: kernels may count.
_MAX_TIME_OUTS = 64
# How often the lanes of a warp that are furthest behind go first.
_BACKMOST_RATE = 0.75


class Machine:
    """One launch.

    Attributes:
      kernel: what is launched.
      grid: CTAs along x, y, z.
      block: threads of a CTA along x, y, z.
      cluster: CTAs of a cluster along x, y, z.
      shared_bytes: of dynamic shared memory.
      static_shared_bytes: that the kernel declares itself.
      global_memory: of the launch.
      parameter_bytes: the parameter space.
      monitor: happens-before, or None when races are not checked.
      rng: of the seed.
      false_wait_rate: how often try_wait says false at once.
      now: the time, in instructions.
      executed: instructions of warps so far.
      findings: counted.
      trace: receives (start, end, who, instructions) of everything that happens, with no instruction's time when a
        warp has to wait; or None.
      products: receives each Product of tcgen05.mma as it takes effect; or None.
    """

    def __init__(
        self,
        program: Program,
        parameter_bytes: np.ndarray,
        tensor_maps: dict[int, TensorMap],
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        *,
        global_memory: GlobalMemory,
        cluster: tuple[int, int, int] = (1, 1, 1),
        shared_bytes: int = 0,
        seed: int = 0,
        races: bool = True,
        resident: int = 1,
        max_delay: int = 400,
        quantum: int = 40,
        max_instructions: int = 1 << 27,
        trace: Callable | None = None,
        products: Callable | None = None,
    ) -> None:
        self.program, self.kernel = program, program.kernel
        self.grid, self.block, self.cluster = grid, block, cluster
        self.shared_bytes = shared_bytes
        ends = [offset + size for offset, size in self.kernel.shared_variables.values()]
        self.static_shared_bytes = max(ends, default=0)
        self.parameter_bytes, self._tensor_maps = parameter_bytes, tensor_maps
        self.global_memory = global_memory
        self.findings: Counter[Finding] = Counter()
        self.monitor = Monitor(self.report) if races else None
        global_memory.monitor = self.monitor
        self.rng = random.Random(seed)
        # Each launch draws how its warps and engines behave, so that seeds explore very different orders.
        self.engines = Engines(self.rng, max_delay)
        self.false_wait_rate = self.rng.choice((0.02, 0.1, 0.6))
        self._stall_rate = self.rng.choice((0.0, 0.03, 0.1))
        self._by_priority = self.rng.random() < 0.5
        self._resident, self._max_delay, self._quantum = resident, max_delay, quantum
        self._max_instructions = max_instructions
        self.now, self.executed, self.state, self._polls = 0, 0, 0, 0
        self.trace, self.products = trace, products
        self._last_of_stream: dict[object, Actor] = {}
        self._place: dict[tuple, int] = {}
        self._full, self._masked = program.tables()
        self.seconds = 0.0

    # ---- what instructions use ----

    def report(self, kind: str, text: str) -> None:
        """Record a finding."""
        finding = Finding(kind, text)
        if finding in self.findings or len(self.findings) < _MAX_FINDINGS:
            self.findings[finding] += 1

    def changed(self) -> None:
        """Say that something has changed for which a warp may wait."""
        self.state += 1

    def tensor_map(self, address: int) -> TensorMap:
        """The tensor map that a kernel finds at an address."""
        found = self._tensor_maps.get(address)
        if found is None:
            raise EmulationError(f"no tensor map at address {address:#x}")
        return found

    def place_of(self, cta: Cta) -> int:
        """A number for the multiprocessor that runs a CTA."""
        return self._place.setdefault(cta.index, len(self._place))

    def issue(
        self,
        warp: Warp,
        engine: str,
        instruction: Instruction,
        effect: Callable[[Operation], None],
        stream: object = None,
    ) -> Operation:
        """Let an asynchronous operation of a warp take effect later.

        Args:
          warp: that issues it.
          engine: "tma", "tensor" or "copy".
          instruction: for reports.
          effect: called with the operation when it takes effect.
          stream: operations of equal streams take effect in order and know of each other; None for none.
        """
        actor = None
        if self.monitor is not None and warp.actor is not None:
            name = f"{instruction.parts[0]} of {warp.name}"
            actor = self.monitor.operation(warp.actor, name, stream, self._last_of_stream.get(stream))
            if stream is not None:
                self._last_of_stream[stream] = actor
        operation = Operation(engine, warp, actor, instruction, self.now)
        self.engines.submit(self.now, operation, effect, stream)
        return operation

    # ---- the run ----

    def run(self) -> Machine:
        """Run all CTAs, `resident` clusters at a time."""
        start = time.perf_counter()
        clusters = self._clusters()
        live: list[Warp] = []
        with np.errstate(all="ignore"):
            while True:
                while len({id(w.cta.cluster) for w in live}) < self._resident:
                    index = next(clusters, None)
                    if index is None:
                        break
                    live += [w for cta in self._start(index) for w in cta.warps]
                if not live:
                    break
                count = len(live)
                while len(live) == count:
                    live = self._step(live)
            while self.engines.next_time is not None:
                self._advance()
        self.seconds = time.perf_counter() - start
        return self

    def _clusters(self):
        cx, cy, cz = self.cluster
        for z in range(0, self.grid[2], cz):
            for y in range(0, self.grid[1], cy):
                for x in range(0, self.grid[0], cx):
                    yield x, y, z

    def _start(self, corner: tuple[int, int, int]) -> list[Cta]:
        cx, cy, cz = self.cluster
        ctas: list[Cta] = []
        barrier = ThreadBarrier(f"barrier of the cluster at {corner}", self.monitor)
        for rank in range(cx * cy * cz):
            index = (corner[0] + rank % cx, corner[1] + rank // cx % cy, corner[2] + rank // (cx * cy))
            cta = Cta(self, index, rank, ctas)
            nbytes = self.static_shared_bytes + self.shared_bytes
            cta.shared = SharedMemory(rank, nbytes, self.monitor, f"CTA {index}")
            cta.tensor = TensorMemory(rank, self.monitor)
            cta.cluster_barrier = barrier
            ctas.append(cta)
        threads = self.block[0] * self.block[1] * self.block[2]
        for cta in ctas:
            for number in range(-(-threads // 32)):
                self._start_warp(cta, number, threads)
            for warp in cta.warps:
                tid = np.arange(32 * warp.index, 32 * warp.index + 32)
                warp.registers = self.program.initial_registers(cta, warp.index, tid)
        return ctas

    def _start_warp(self, cta: Cta, number: int, threads: int) -> None:
        name = f"warp {number} of CTA {cta.index}"
        actor = self.monitor.warp((cta.index, number), name) if self.monitor else None
        warp = Warp(cta, number, np.arange(32 * number, 32 * number + 32) < threads, actor)
        warp.priority = self.rng.random()
        cta.warps.append(warp)
        if actor is not None:
            cta.shared.lifetime.warps.add(actor)

    def _step(self, live: list[Warp]) -> list[Warp]:
        """Let a warp run, or time pass."""
        rng, now = self.rng, self.now
        state = self.state
        ready = [w for w in live if w.asleep_until <= now and w.runnable(state)]
        if ready:
            warp = max(ready, key=_priority) if self._by_priority else ready[int(rng.random() * len(ready))]
            if rng.random() < 0.02:
                warp.priority = rng.random()
            count = self._run(warp, 1 + int(rng.random() * self._quantum))
            self.now = now + count
            self.executed += count
            if self.executed > self._max_instructions:
                raise EmulationError(
                    f"{self._max_instructions} instructions were run without an end\n{self._report(live)}"
                )
            if rng.random() < self._stall_rate:
                warp.asleep_until = self.now + rng.randint(1, 5 * self._max_delay)
            if not warp.groups:
                finish_stores(warp)
                live = [w for w in live if w is not warp]
                self._retire(warp.cta)
        elif not self._wait(live):
            raise DeadlockError(self._report(live))
        while self.engines.next_time is not None and self.engines.next_time <= self.now:
            self._advance()
        return live

    def _wait(self, live: list[Warp]) -> bool:
        """Let time pass until something happens; False when nothing can."""
        wake = min((w.asleep_until for w in live if w.asleep_until > self.now), default=None)
        coming = self.engines.next_time
        if coming is not None and (wake is None or coming <= wake):
            self._advance()
        elif wake is not None:
            self.now = wake
        else:
            # Nothing says that it has changed, so this finds only what forgot to.
            self.state, self._polls = self.state + 1, self._polls + 1
            return any(w.runnable(self.state) for w in live) or self._time_out(live)
        return True

    def _advance(self) -> None:
        at, operation = self.engines.advance()
        self.now = max(self.now, at)
        self.state += 1
        if self.trace is not None:
            who = f"{operation.engine} {operation.warp.name}"
            self.trace(operation.issued, self.now, who, [operation.instruction])

    def _time_out(self, live: list[Warp]) -> bool:
        """Let blocked try_waits return false, a number of times in each state of the machine."""
        any_left, state = False, self.state - self._polls
        for warp in live:
            for group in warp.groups:
                if group.wait is None or not group.wait.may_time_out:
                    continue
                if group.tried_at != state:
                    group.tried_at, group.tries = state, 0
                if group.tries < _MAX_TIME_OUTS:
                    group.tries, group.timed_out, any_left = group.tries + 1, True, True
        return any_left

    def _run(self, warp: Warp, budget: int) -> int:
        """Run about `budget` instructions of a warp and return how many it were."""
        done = 0
        while done < budget and warp.groups:
            group = self._next_group(warp)
            if group is None:
                break
            done += self._run_group(warp, group, budget - done)
        warp.executed += done
        return done

    def _next_group(self, warp: Warp) -> Group | None:
        groups, state = warp.groups, self.state
        if len(groups) == 1:
            return groups[0] if groups[0].runnable(state) else None
        ready = [g for g in groups if g.runnable(state)]
        if len(ready) < 2:
            return ready[0] if ready else None
        if self.rng.random() < _BACKMOST_RATE:
            return min(ready, key=lambda g: g.pc)
        return ready[int(self.rng.random() * len(ready))]

    def _run_group(self, warp: Warp, group: Group, budget: int) -> int:
        warp.group, group.wait = group, None
        mask, pc, meet, done, act = group.mask, group.pc, group.meet, 0, None
        table = self._full if mask is None else self._masked
        while True:
            function = table[pc] or self.program.function(pc, mask is not None)
            try:
                act = function(warp, mask)
            except EmulationError as e:
                raise type(e)(f"{e}\n  by {warp.name}") from e.__cause__
            except (TypeError, ValueError, AttributeError, IndexError, KeyError, OverflowError) as e:
                raise self.program.explain(e, pc, function) from e
            if self.trace is not None:
                start, length = self.now + done, 0 if act.__class__ is Wait else function.length
                self.trace(start, start + length, warp.name, self.kernel.instructions[pc : pc + function.length])
            if act.__class__ is int:
                done += function.length
                pc = act
                if pc == meet:
                    group.pc = pc
                    warp.meet(group)
                    return done
                if done >= budget:
                    group.pc = pc
                    return done
            else:
                break
        group.pc = pc
        if act.__class__ is Wait:
            group.wait = act
        elif act.__class__ is Parting:
            done += function.length
            warp.part(group, act)
        elif act is EXIT:
            done += function.length
            warp.leave(group)
        else:
            raise EmulationError(f"{self.kernel.instructions[pc].where}: unexpected result {act!r}")
        return done

    def _retire(self, cta: Cta) -> None:
        """Check what a CTA leaves behind when the last of its warps is done, and a cluster when its last CTA is."""
        if self.monitor is not None and not any(w.groups for w in cta.warps):
            cta.shared.lifetime.end()
        if any(w.groups for c in cta.cluster for w in c.warps):
            return
        for one in cta.cluster:
            if one.tensor.allocations:
                self.report("leak", f"CTA {one.index} ends without freeing tensor memory: {one.tensor.allocations}")

    def _report(self, live: Sequence[Warp]) -> str:
        lines = ["no warp can go on and nothing is in flight:"]
        for warp in live:
            for group in warp.groups:
                who = "all lanes" if group.mask is None else f"{int(group.mask.sum())} lane(s)"
                if group.wait is not None:
                    state = f"waits for {group.wait.describe()}"
                else:
                    state = "can run"
                where = (
                    self.kernel.instructions[group.pc].where if group.pc < len(self.kernel.instructions) else "the end"
                )
                lines.append(f"  {warp.name} ({who}) {state}; {where}")
        return "\n".join(lines)


def _priority(warp: Warp) -> float:
    return warp.priority
