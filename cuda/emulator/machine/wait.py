"""Why a warp cannot go on."""

from __future__ import annotations

from collections.abc import Callable


class Wait:
    """Why a warp cannot go on.

    Attributes:
      ready: polled; true when the instruction should be tried again.
      describe: one phrase for the report of a deadlock.
      may_time_out: the instruction may also return unsuccessfully (try_wait).
    """

    __slots__ = ("describe", "may_time_out", "ready")

    def __init__(self, ready: Callable[[], bool], describe: Callable[[], str], may_time_out: bool = False) -> None:
        self.ready, self.describe, self.may_time_out = ready, describe, may_time_out
