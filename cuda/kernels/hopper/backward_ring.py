"""Who arrives at the barriers of the backward's rings."""

import cutlass
import cutlass.cute as cute
from cutlass.cute.arch import lane_idx
from cutlass.experimental import primitives

Int32, Pointer = cutlass.Int32, cutlass.Pointer

CONSUMERS = 2
"""Warpgroups that compute."""
WARPGROUP_WARPS = 4
CONSUMER_WARPS = WARPGROUP_WARPS * CONSUMERS


@cute.jit
def arrive(barrier: Pointer) -> None:
    """Arrives by one lane, after all lanes of the warp."""
    primitives.bar_warp_sync(0xFFFFFFFF)
    if lane_idx() == 0:
        primitives.mbarrier_arrive(barrier)
