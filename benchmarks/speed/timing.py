"""Times of calls that take turns, so that clocks, heat and neighbours hit all of them alike.

A turn is many calls in flight, of which the last is waited for: about as long as the device works, and no shorter than
the host needs to launch them. Within short turns all contenders meet the same clocks; in turns of half a second each of
them meets the clocks that its own power leaves.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

TURN_SECONDS = 0.01
MOST_CALLS = 400
ROUNDS = (5, 25)
"""Fewest and most."""


@dataclasses.dataclass(frozen=True)
class Timing:
    """Times of a call.

    Attributes:
      times: Seconds of a call, of each turn.
      calls: Calls of a turn.
    """

    times: tuple[float, ...]
    calls: int

    @property
    def median(self) -> float:
        """Median of the turns."""
        return float(np.median(self.times))

    @property
    def spread(self) -> tuple[float, float]:
        """10th and 90th percentile of the turns."""
        low, high = np.percentile(self.times, (10, 90))
        return float(low), float(high)


def seconds_a_call(function: Callable[[], Any], calls: int) -> float:
    """One turn.

    Args:
      function: Compiled before.
      calls: How often to call it.

    Returns:
      Seconds of a call.
    """
    start = time.perf_counter()
    result = None
    for _ in range(calls):
        result = function()
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / calls


def take_turns(
    functions: Mapping[str, Callable[[], Any]], seconds: float, turn_seconds: float = TURN_SECONDS
) -> dict[str, Timing | Exception]:
    """Times functions in turns, round by round, each round beginning with another one.

    Args:
      functions: By name, compiled before.
      seconds: About how long all rounds together may take; there are five at least.
      turn_seconds: About how long a turn takes.

    Returns:
      For each name its times, or what it failed with.
    """
    failures: dict[str, Exception] = {}

    def turn(name: str, calls: int) -> float:
        try:
            return seconds_a_call(functions[name], calls)
        # A contender may raise whatever it likes, and must not take the others with it.
        except Exception as error:
            failures[name] = error
            return 0.0

    calls = {name: calls_a_turn(turn(name, 1), TURN_SECONDS / 2) for name in functions}
    estimates = {name: turn(name, count) for name, count in calls.items() if name not in failures}
    calls = {name: calls_a_turn(estimate, turn_seconds) for name, estimate in estimates.items()}
    times: dict[str, list[float]] = {name: [] for name in functions}
    for names in rounds(list(functions), sum(calls[name] * estimates[name] for name in calls), seconds):
        for name in names:
            if name not in failures:
                times[name].append(turn(name, calls[name]))
    return {name: failures.get(name) or Timing(tuple(times[name]), calls[name]) for name in functions}


def calls_a_turn(seconds: float, turn: float = TURN_SECONDS) -> int:
    """How many calls fill a turn.

    Args:
      seconds: Of a call.
      turn: Seconds of a turn.

    Returns:
      At least one, and not so many that a tiny call takes long to launch.
    """
    most = MOST_CALLS * max(1, round(turn / TURN_SECONDS))
    return min(most, max(1, round(turn / max(seconds, 1e-9))))


def rounds(names: list[str], round_seconds: float, seconds: float) -> list[list[str]]:
    """The order of the turns.

    Args:
      names: Who takes turns.
      round_seconds: About how long a round takes.
      seconds: About how long all rounds may take.

    Returns:
      For each round the names, rotated by one each time.
    """
    least, most = ROUNDS
    count = min(most, max(least, round(seconds / max(round_seconds, 1e-9))))
    return [names[i % len(names) :] + names[: i % len(names)] for i in range(count)] if names else []
