"""Special registers, shared variables, and the data movement that the generator does itself."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..errors import UnsupportedInstructionError
from ..instructions.handler import Handler, Value
from ..ptx.syntax import Register

# Registers `%shared:name` hold the address of a shared variable.
SHARED_PREFIX = "%shared:"

# Set when a warp starts; those named here differ between lanes.
VARYING = (
    "%tid.x",
    "%tid.y",
    "%tid.z",
    "%laneid",
    "%lanemask_eq",
    "%lanemask_lt",
    "%lanemask_le",
    "%lanemask_gt",
    "%lanemask_ge",
)
_THE_SAME = {
    *(f"%{what}.{axis}" for what in ("ntid", "ctaid", "nctaid") for axis in "xyz"),
    *(f"%{what}.{axis}" for what in ("clusterid", "nclusterid", "cluster_ctaid", "cluster_nctaid") for axis in "xyz"),
    "%cluster_ctarank",
    "%cluster_nctarank",
    "%is_explicit_cluster",
    "%warpid",
    "%nwarpid",
    "%smid",
    "%nsmid",
    "%gridid",
    "%dynamic_smem_size",
    "%total_smem_size",
    "WARP_SZ",
}
_CLOCKS = {"%clock": "u32", "%clock_hi": "u32", "%clock64": "u64", "%globaltimer": "u64", "%globaltimer_lo": "u32"}


def kind_of(name: str) -> str:
    """The array type of a special register."""
    if name.startswith(SHARED_PREFIX):
        return "u4"
    if name == "%is_explicit_cluster":
        return "b1"
    if name in VARYING or name in _THE_SAME:
        return "u4"
    raise UnsupportedInstructionError(f"the special register {name} is not supported")


def values(names: set[str], cta, index: int, tid: np.ndarray) -> dict[str, object]:
    """The special registers of a warp of a CTA, by name."""
    machine = cta.machine
    lane = np.arange(32, dtype=np.uint32)
    cluster, grid, block = machine.cluster, machine.grid, machine.block
    one = np.uint32(1)
    known: dict[str, object] = {
        "%tid.x": (tid % block[0]).astype(np.uint32),
        "%tid.y": (tid // block[0] % block[1]).astype(np.uint32),
        "%tid.z": (tid // (block[0] * block[1])).astype(np.uint32),
        "%laneid": lane,
        "%lanemask_eq": one << lane,
        "%lanemask_lt": (one << lane) - one,
        "%lanemask_le": (np.uint64(2) << lane.astype(np.uint64)).astype(np.uint32) - one,
        "%lanemask_gt": ~((np.uint64(2) << lane.astype(np.uint64)).astype(np.uint32) - one),
        "%lanemask_ge": ~((one << lane) - one),
        "%warpid": index,
        "%nwarpid": len(cta.warps),
        "%smid": machine.place_of(cta),
        "%nsmid": machine.grid[0] * machine.grid[1] * machine.grid[2],
        "%gridid": 0,
        "%cluster_ctarank": cta.rank,
        "%cluster_nctarank": cluster[0] * cluster[1] * cluster[2],
        "%is_explicit_cluster": cluster != (1, 1, 1),
        "%dynamic_smem_size": machine.shared_bytes,
        "%total_smem_size": machine.shared_bytes + machine.static_shared_bytes,
        "WARP_SZ": 32,
    }
    for i, axis in enumerate("xyz"):
        known[f"%ntid.{axis}"] = block[i]
        known[f"%ctaid.{axis}"] = cta.index[i]
        known[f"%nctaid.{axis}"] = grid[i]
        known[f"%clusterid.{axis}"] = cta.index[i] // cluster[i]
        known[f"%nclusterid.{axis}"] = grid[i] // cluster[i]
        known[f"%cluster_ctaid.{axis}"] = cta.index[i] % cluster[i]
        known[f"%cluster_nctaid.{axis}"] = cluster[i]
    for name, (offset, _) in machine.kernel.shared_variables.items():
        known[SHARED_PREFIX + name] = cta.shared.base + offset
    return {name: known[name] for name in names}


def is_clock(name: str) -> bool:
    return name in _CLOCKS


def clock(name: str, destination: Register) -> Handler:
    """Reading a clock gives the emulator's time, in instructions."""
    return Handler(lambda warp, mask: warp.machine.now, outputs=[Value(destination, _CLOCKS[name])], uniform="always")


def select(chooser, a, b):
    return np.where(chooser, a, b)


def join(low, high):
    """Two 32-bit halves as one 64-bit value."""
    return low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32)


def unpack(kind: str, width: int, part: int) -> Callable:
    """One part of a value, `width` bits wide; parts of 8 bits are held in 16."""
    shift = np.dtype(kind).type(part * width)
    held = np.dtype(f"u{max(2, width // 8)}")
    if width >= 16:
        return lambda whole: (whole >> shift).astype(held)
    return lambda whole: (whole >> shift).astype(held) & held.type(0xFF)


def pack(kind: str, width: int) -> Callable:
    """Several parts as one value, the first in the lowest bits."""
    whole = np.dtype(kind).type

    def function(*parts):
        result = parts[0].astype(whole)
        for i, part in enumerate(parts[1:], 1):
            result = result | part.astype(whole) << whole(i * width)
        return result

    if width == 8:
        return lambda *parts: function(*[p & np.uint16(0xFF) for p in parts])
    return function


def extend(kind: str, held: str) -> Callable:
    """A narrow value in a wider register: extended by its sign if its type is signed."""
    wide = np.dtype(("i" if kind[0] == "i" else "u") + held[1])
    return lambda x: x.astype(wide).view(held)
