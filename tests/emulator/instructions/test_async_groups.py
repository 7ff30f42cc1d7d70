"""Groups of asynchronous operations, lane by lane."""

from __future__ import annotations

import numpy as np

from cuda.emulator.instructions.async_groups import AsyncGroups
from cuda.emulator.ptx.syntax import Instruction

_LOW, _HIGH = np.arange(32) < 16, np.arange(32) >= 16


def _add(groups: AsyncGroups, mask: np.ndarray | None, name: str) -> None:
    groups.add(mask, lambda: True, None, Instruction(name, (), None, False, 1, name, 0))


def _due(groups: AsyncGroups, mask: np.ndarray | None, keep: int) -> list[str]:
    return [tracked.instruction.opcode for tracked in groups.due(mask, keep)]


def test_all_but_the_newest_groups():
    groups = AsyncGroups()
    for name in "abc":
        _add(groups, None, name)
        groups.commit(None)
    _add(groups, None, "open")
    assert _due(groups, None, 0) == ["a", "b", "c"]
    assert _due(groups, None, 2) == ["a"]
    assert _due(groups, None, 3) == []
    assert _due(groups, None, -1) == ["a", "b", "c", "open"]


def test_empty_groups_count():
    groups = AsyncGroups()
    _add(groups, None, "a")
    groups.commit(None)
    assert _due(groups, None, 1) == []
    groups.commit(None)
    assert _due(groups, None, 1) == ["a"]


def test_each_lane_has_its_own_groups():
    groups = AsyncGroups()
    _add(groups, _LOW, "low")
    _add(groups, _HIGH, "high")
    groups.commit(_LOW)
    assert _due(groups, None, 0) == ["low"]
    assert _due(groups, _HIGH, 0) == []
    groups.commit(_HIGH)
    assert _due(groups, _HIGH, 0) == ["high"]
    assert _due(groups, _LOW, 0) == ["low"]
    groups.commit(_LOW)
    assert _due(groups, None, 1) == ["low"]


def test_what_was_waited_for_is_forgotten():
    groups = AsyncGroups()
    for name in "aab":
        _add(groups, None, name)
    groups.commit(None)
    groups.drop(groups.due(None, 0)[1:])
    assert _due(groups, None, 0) == ["a"]
