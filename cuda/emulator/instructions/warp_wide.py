"""What the lanes of a warp do together: shfl, vote, match, redux, elect and activemask.

The lanes that a member mask names meet first. A lane that is not named in its own member mask, and a shuffle from a
lane that does not take part, are reported (kind "register").
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np

from ..ptx.syntax import SINK, Immediate, Instruction, Pair
from .handler import Handler, Value, handles, per_lane, unsupported
from .thread_barriers import gathered

_LANE = np.arange(32)
_BIT = np.uint32(1) << _LANE.astype(np.uint32)
_ALL = 0xFFFFFFFF
_FIRST = _LANE == 0
_FIRST.flags.writeable = False


def _running(mask: np.ndarray | None) -> int:
    """The lanes that run, as bits."""
    return _ALL if mask is None else int(_BIT[mask].sum())


def _check_members(warp, mask: np.ndarray | None, members, instruction: Instruction) -> None:
    if isinstance(members, int) and members == _ALL:
        return
    if isinstance(members, int):
        outside = _running(mask) & ~members
    else:
        outside = int(_BIT[((members & _BIT) == 0) & (mask if mask is not None else True)].sum())
    if outside:
        warp.machine.report(
            "register", f"{instruction.where} is executed by lanes {outside:#010x}, which its member mask does not name"
        )


def _by_members(mask: np.ndarray | None, members) -> list[tuple[int, np.ndarray]]:
    """Each member mask with the lanes that run and give it."""
    running = np.ones(32, bool) if mask is None else mask
    if isinstance(members, int):
        return [(members, running)]
    return [(int(m), running & (members == m)) for m in np.unique(members[running])]


def _together(
    instruction: Instruction, source: Value, members, target: Value, function: Callable[..., int], dtype: type
) -> Handler:
    """A handler for `function(values, lanes, members) -> value for these lanes`, which is the same in all of them."""

    def run(warp, mask, value, members):
        wait = gathered(warp, mask, members)
        if wait is not None:
            return wait
        _check_members(warp, mask, members, instruction)
        result: np.ndarray = np.zeros(32, dtype)
        for named, running in _by_members(mask, members):
            values = np.full(32, value)[running] if isinstance(value, int) else value[running]
            one = function(values, _LANE[running], named)
            if isinstance(members, int):
                return one
            result[running] = one
        return result

    return Handler(run, [source, Value(members, "b32")], [target], convergent=True, uniform="lane")


@handles("shfl.sync")
def shuffle(instruction: Instruction) -> Handler:
    """shfl.sync.mode.b32 destination{|in range}, source, lane or distance, clamp and segment mask, members."""
    mode = instruction.parts[2]
    if mode not in ("up", "down", "bfly", "idx"):
        raise unsupported(instruction)
    target, source, distance, bounds, members = instruction.operands
    targets = (target.first, target.second) if isinstance(target, Pair) else (target, SINK)
    kept = [i for i in (0, 1) if targets[i] != SINK]
    # From one lane of the whole warp, whichever it is.
    whole = mode == "idx" and isinstance(bounds, Immediate) and bounds.value == 31

    def run(warp, mask, value, distance, bounds, members):
        wait = gathered(warp, mask, members)
        if wait is not None:
            return wait
        of_all = mask is None and isinstance(members, int) and members == _ALL
        lane, in_range = _sources(mode, distance, bounds)
        if not of_all:
            _check_members(warp, mask, members, instruction)
            _check_sources(warp, mask, lane, members, instruction)
        if whole and isinstance(distance, int) and isinstance(members, int):
            results: tuple = (value if isinstance(value, int) else int(value[distance & 31]), True)
        else:
            results = (per_lane(value, np.uint32)[lane], in_range)
        return tuple(results[i] for i in kept) if len(kept) > 1 else results[kept[0]]

    inputs = [Value(source, "b32"), Value(distance, "u32"), Value(bounds, "u32"), Value(members, "b32")]
    return Handler(
        run,
        inputs,
        [Value(targets[i], ("b32", "pred")[i]) for i in kept],
        convergent=True,
        uniform="lane" if whole else "never",
    )


def _sources(mode: str, distance, bounds) -> tuple[np.ndarray, np.ndarray]:
    """The lane that each lane reads, and whether that is in the range of the shuffle (else it reads itself)."""
    if isinstance(distance, int) and isinstance(bounds, int):
        return _sources_of_numbers(mode, distance, bounds)
    return _new_sources(mode, distance, bounds)


@lru_cache(maxsize=512)
def _sources_of_numbers(mode: str, distance: int, bounds: int) -> tuple[np.ndarray, np.ndarray]:
    found = _new_sources(mode, distance, bounds)
    for array in found:
        array.flags.writeable = False
    return found


def _new_sources(mode: str, distance, bounds) -> tuple[np.ndarray, np.ndarray]:
    distance, bounds = np.asarray(distance, np.int64) & 31, np.asarray(bounds, np.int64)
    segment, clamp = bounds >> 8 & 31, bounds & 31
    lowest, highest = _LANE & segment, _LANE & segment | clamp & ~segment
    lane = {
        "up": _LANE - distance,
        "down": _LANE + distance,
        "bfly": _LANE ^ distance,
        "idx": lowest | distance & ~segment,
    }[mode]
    in_range = lane >= highest if mode == "up" else lane <= highest
    return np.where(in_range, lane, _LANE), in_range


def _check_sources(warp, mask, lane: np.ndarray, members, instruction: Instruction) -> None:
    running = np.ones(32, bool) if mask is None else mask
    named = (np.asarray(members, np.uint32) >> lane.astype(np.uint32) & 1).astype(bool)
    bad = running & ~(running[lane] & named)
    if bad.any():
        warp.machine.report(
            "register",
            f"{instruction.where}: lane {int(_LANE[bad][0])} of {warp.name} reads lane {int(lane[bad][0])}, "
            "which does not take part",
        )


_VOTES: dict[str, Callable[..., int | bool]] = {
    "all": lambda values, lanes, members: bool(values.all()),
    "any": lambda values, lanes, members: bool(values.any()),
    "uni": lambda values, lanes, members: bool(values.all() or not values.any()),
    "ballot": lambda values, lanes, members: int(_BIT[lanes[values.astype(bool)]].sum()),
}


@handles("vote.sync")
def vote(instruction: Instruction) -> Handler:
    """vote.sync.{all,any,uni}.pred and vote.sync.ballot.b32 destination, {!}predicate, members."""
    mode = instruction.parts[2]
    if mode not in _VOTES:
        raise unsupported(instruction)
    target, source, members = instruction.operands
    kind, dtype = ("b32", np.uint32) if mode == "ballot" else ("pred", bool)
    return _together(instruction, Value(source, "pred"), members, Value(target, kind), _VOTES[mode], dtype)


def _signed(function: Callable) -> Callable:
    return lambda values, lanes, members: int(function(values.astype(np.uint32).view(np.int32))) & _ALL


def _unsigned(function: Callable) -> Callable:
    return lambda values, lanes, members: int(function(values.astype(np.uint32))) & _ALL


def _float_extreme(largest: bool, absolute: bool, propagates_nan: bool) -> Callable:
    """min or max of float32: -0 is below +0, and NaN is ignored unless it propagates."""

    def function(values, lanes, members) -> int:
        bits = values.astype(np.uint32)
        if absolute:
            bits = bits & np.uint32(0x7FFFFFFF)
        nan = (bits & np.uint32(0x7FFFFFFF)) > 0x7F800000
        if nan.all() or (propagates_nan and nan.any()):
            return 0x7FFFFFFF
        bits = bits[~nan]
        signed = bits.view(np.int32)
        order = np.where(signed < 0, signed ^ np.int32(0x7FFFFFFF), signed)
        return int(bits[np.argmax(order) if largest else np.argmin(order)])

    return function


def _redux_function(instruction: Instruction) -> Callable:
    operation, *modifiers, element = instruction.parts[2:]
    if element == "f32" and operation in ("min", "max") and set(modifiers) <= {"abs", "NaN"}:
        return _float_extreme(operation == "max", "abs" in modifiers, "NaN" in modifiers)
    known: dict[tuple[str, str], Callable] = {
        ("add", "u32"): _unsigned(lambda v: v.sum(dtype=np.uint64)),
        ("add", "s32"): _unsigned(lambda v: v.sum(dtype=np.uint64)),
        ("min", "u32"): _unsigned(np.min),
        ("max", "u32"): _unsigned(np.max),
        ("min", "s32"): _signed(np.min),
        ("max", "s32"): _signed(np.max),
        ("and", "b32"): _unsigned(np.bitwise_and.reduce),
        ("or", "b32"): _unsigned(np.bitwise_or.reduce),
        ("xor", "b32"): _unsigned(np.bitwise_xor.reduce),
    }
    if modifiers or (operation, element) not in known:
        raise unsupported(instruction)
    return known[operation, element]


@handles("redux.sync")
def reduce(instruction: Instruction) -> Handler:
    """redux.sync.operation.type destination, source, members."""
    target, source, members = instruction.operands
    function = _redux_function(instruction)
    return _together(instruction, Value(source, "b32"), members, Value(target, "b32"), function, np.uint32)


@handles("match.any.sync")
def match_any(instruction: Instruction) -> Handler:
    """match.any.sync.type destination, source, members: the lanes with the same value."""
    target, source, members = instruction.operands
    kind = instruction.parts[-1]

    def run(warp, mask, value, members):
        wait = gathered(warp, mask, members)
        if wait is not None:
            return wait
        _check_members(warp, mask, members, instruction)
        values, result = np.full(32, value, np.uint64) if isinstance(value, int) else value, np.zeros(32, np.uint32)
        for _named, running in _by_members(mask, members):
            for one in np.unique(values[running]):
                alike = running & (values == one)
                result[alike] = _BIT[alike].sum()
        return result

    return Handler(run, [Value(source, kind), Value(members, "b32")], [Value(target, "b32")], convergent=True)


@handles("match.all.sync")
def match_all(instruction: Instruction) -> Handler:
    """match.all.sync.type destination{|predicate}, source, members: all members, or 0, by whether they agree."""
    target, source, members = instruction.operands
    kind = instruction.parts[-1]
    targets = (target.first, target.second) if isinstance(target, Pair) else (target, SINK)
    kept = [i for i in (0, 1) if targets[i] != SINK]

    def run(warp, mask, value, members):
        wait = gathered(warp, mask, members)
        if wait is not None:
            return wait
        _check_members(warp, mask, members, instruction)
        found, agree = np.zeros(32, np.uint32), np.zeros(32, bool)
        for named, running in _by_members(mask, members):
            same = isinstance(value, int) or bool((value[running] == value[running][0]).all())
            results = (named if same else 0), same
            if isinstance(members, int):
                return tuple(results[i] for i in kept) if len(kept) > 1 else results[kept[0]]
            found[running], agree[running] = results
        return tuple((found, agree)[i] for i in kept) if len(kept) > 1 else (found, agree)[kept[0]]

    return Handler(
        run,
        [Value(source, kind), Value(members, "b32")],
        [Value(targets[i], ("b32", "pred")[i]) for i in kept],
        convergent=True,
        uniform="lane",
    )


@handles("elect.sync")
def elect(instruction: Instruction) -> Handler:
    """elect.sync leader|predicate, members: the lowest member that runs is elected."""
    target, members = instruction.operands
    targets = (target.first, target.second) if isinstance(target, Pair) else (target, SINK)
    kept = [i for i in (0, 1) if targets[i] != SINK]

    of_first = tuple((0, _FIRST)[i] for i in kept) if len(kept) > 1 else (0, _FIRST)[kept[0]]

    def run(warp, mask, members):
        if mask is None and isinstance(members, int) and members & 1:
            _check_members(warp, mask, members, instruction)
            return of_first
        wait = gathered(warp, mask, members)
        if wait is not None:
            return wait
        _check_members(warp, mask, members, instruction)
        leaders, elected = np.zeros(32, np.uint32), np.zeros(32, bool)
        for named, running in _by_members(mask, members):
            first = int(np.argmax(running & (_BIT & np.uint32(named) != 0)))
            leaders[running] = first
            elected[first] = True
        results = (first if isinstance(members, int) else leaders), elected
        return tuple(results[i] for i in kept) if len(kept) > 1 else results[kept[0]]

    return Handler(
        run,
        [Value(members, "b32")],
        [Value(targets[i], ("b32", "pred")[i]) for i in kept],
        convergent=True,
        uniform=tuple(("inputs", "never")[i] for i in kept),
    )


@handles("activemask")
def active_mask(instruction: Instruction) -> Handler:
    """activemask.b32 destination."""
    (target,) = instruction.operands
    return Handler(lambda warp, mask: _running(mask), outputs=[Value(target, "b32")], uniform="always")
