"""How the backward goes through its rings: their stages, and who arrives."""

import cutlass
import cutlass.cute as cute
from cutlass.cute.arch import lane_idx
from cutlass.experimental import primitives

Int32, Pointer = cutlass.Int32, cutlass.Pointer

STAGES = 3
CONSUMER_WARPS = 8


@cute.jit
def arrive(barrier: Pointer) -> None:
    """Arrives by one lane, after all lanes of the warp."""
    primitives.bar_warp_sync(0xFFFFFFFF)
    if lane_idx() == 0:
        primitives.mbarrier_arrive(barrier)


@cute.jit
def next_stage(stage: Int32, parity: Int32) -> tuple[Int32, Int32]:
    """The stage after this one, and its parity."""
    stage += 1
    if stage == STAGES:
        stage, parity = Int32(0), parity ^ 1
    return stage, parity
