"""Asynchronous engines: what has been issued takes effect after a delay that the seed decides."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable

from ..checks.races import Actor
from ..ptx.syntax import Instruction

# The engines, each with a speed of its own in every schedule.
ENGINES = ("tma", "tensor", "copy")
_SPEEDS = (0.02, 0.3, 1.0, 5.0)
_OUTLIER_RATE, _OUTLIER_FACTOR = 0.05, 10


class Operation:
    """An operation in flight.

    Attributes:
      actor: its identity for race checking, or None.
      instruction: that issued it.
      done: whether it has taken effect.
      engine: one of ENGINES.
      warp: that issued it.
      issued: time of issue.
    """

    __slots__ = ("actor", "done", "engine", "instruction", "issued", "warp")

    def __init__(self, engine: str, warp, actor: Actor | None, instruction: Instruction, issued: int) -> None:
        self.engine, self.warp, self.actor, self.instruction, self.issued = engine, warp, actor, instruction, issued
        self.done = False


class Engines:
    """The operations in flight of a launch, by the time at which they take effect."""

    def __init__(self, rng: random.Random, max_delay: int) -> None:
        self._rng, self._max_delay = rng, max_delay
        self._speeds = {engine: rng.choice(_SPEEDS) for engine in ENGINES}
        self._queue: list[tuple[int, int, Operation, Callable[[Operation], None]]] = []
        self._count = 0
        self._busy_until: dict[object, int] = {}

    def _delay(self, engine: str) -> int:
        delay = self._rng.randint(1, max(1, int(self._max_delay * self._speeds[engine])))
        return delay * _OUTLIER_FACTOR if self._rng.random() < _OUTLIER_RATE else delay

    def submit(
        self, now: int, operation: Operation, effect: Callable[[Operation], None], stream: object = None
    ) -> None:
        """Let `effect(operation)` happen later; operations of one stream take effect in the order of submission."""
        at = now
        if stream is not None:
            at = max(now, self._busy_until.get(stream, 0))
        at += self._delay(operation.engine)
        if stream is not None:
            self._busy_until[stream] = at
        self._count += 1
        heapq.heappush(self._queue, (at, self._count, operation, effect))

    @property
    def next_time(self) -> int | None:
        """When the next operation takes effect, or None."""
        return self._queue[0][0] if self._queue else None

    def advance(self) -> tuple[int, Operation]:
        """Let the next operation take effect and return its time."""
        at, _, operation, effect = heapq.heappop(self._queue)
        effect(operation)
        operation.done = True
        return at, operation
