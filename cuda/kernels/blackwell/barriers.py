"""The barriers of the forward: what each says, who arrives, and which of its phases is meant.

Every barrier is there once for each stage. A *use* of a barrier is a phase: use n of it is over when all have arrived
for the n-th time, counted from 0. Who waits for something to be there waits for the use of the same number; who waits
for something to be free, which it is at first, waits for the use before.
"""

import enum

import cutlass
import cutlass.cute as cute
from cutlass.cute.arch import lane_idx
from cutlass.experimental import primitives
from kernels import ring, shared
from kernels.blackwell.tensor_memory import STAGES
from kernels.words import view

Int32, Int64, Pointer = cutlass.Int32, cutlass.Int64, cutlass.Pointer

_WARPS = 4


class Barrier(enum.Enum):
    """Name, arrivals, and how often it is used: once a tile of keys, or once an item."""

    QUERY_FULL = enum.auto(), 1
    """The copy engine, with the bytes: query rows and their scale factors are there. Once an item; for the issuer."""
    QUERY_FREE = enum.auto(), 1
    """The tensor core: the item's last Q K has read them. Once an item; for the producer."""
    SCORES_FULL = enum.auto(), 1
    """The tensor core: Q K is done, and every earlier product with it. Once a tile; for the softmax."""
    SCORES_LOADED = enum.auto(), _WARPS
    """Softmax warps: the scores are in registers, their columns free. Once a tile; for the issuer."""
    P_FULL = enum.auto(), _WARPS
    """Softmax warps: P and its scale factors are in tensor memory. Once a tile; for the issuer."""
    OUTPUT_FULL = enum.auto(), 1
    """The tensor core: the item's last P V is done. Once an item; for the correction."""
    OUTPUT_READY = enum.auto(), _WARPS
    """Correction warps: the accumulators may be added to. Direct-P: once an item, when they have been stored; with a
    running maximum once a tile, since they are rescaled before each. For the issuer."""
    FACTORS_FULL = enum.auto(), _WARPS
    """Softmax warps: the rows' factors are in shared memory. Used as OUTPUT_READY is; for the correction."""
    FACTORS_FREE = enum.auto(), _WARPS
    """Correction warps: they have been read. Likewise; for the softmax."""

    @property
    def place(self) -> int:
        """Of the first of its barriers."""
        return (self.value[0] - 1) * STAGES

    @property
    def arrivals(self) -> int:
        """How many complete a phase."""
        return self.value[1]


def allocate() -> Pointer:
    """Memory of all of them."""
    return view(shared.words(2 * STAGES * len(Barrier)).data_ptr(), Int64)


def initialize(barriers: Pointer) -> None:
    """By one thread, before anything waits."""
    for barrier in Barrier:
        for stage in range(STAGES):
            primitives.mbarrier_init(barriers + (barrier.place + stage), barrier.arrivals)


def at(barriers: Pointer, barrier: Barrier, stage: Int32 | int) -> Pointer:
    """The barrier of a stage."""
    return barriers + (stage + barrier.place)


def wait_until_there(barriers: Pointer, barrier: Barrier, stage: Int32 | int, use: Int32) -> None:
    """Waits for a use."""
    ring.wait(at(barriers, barrier, stage), use & 1)
    primitives.tcgen05_fence("after_thread_sync")


def wait_until_free(barriers: Pointer, barrier: Barrier, stage: Int32 | int, use: Int32) -> None:
    """Waits for the use before this one, if there is one."""
    ring.wait(at(barriers, barrier, stage), use & 1 ^ 1)
    primitives.tcgen05_fence("after_thread_sync")


@cute.jit
def arrive(barriers: Pointer, barrier: cutlass.Constexpr, stage: Int32) -> None:
    """Arrives by one lane, after all lanes of the warp."""
    primitives.tcgen05_fence("before_thread_sync")
    primitives.bar_warp_sync(0xFFFFFFFF)
    if lane_idx() == 0:
        primitives.mbarrier_arrive(at(barriers, barrier, stage))
