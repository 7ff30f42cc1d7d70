"""Rings of tiles in shared memory, filled by the copy engine.

| barrier | arrives | completes when |
|---|---|---|
| full | the producer's thread, with the bytes that it expects | a stage has been written |
| empty | one lane of each consumer warp | all of them have read a stage |

A stage's barriers complete once a round; who waits for a round's barrier waits for its parity. Consumers start with
parity 0, the producer with 1, since all stages are empty at first.
"""

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass.cute.arch import lane_idx
from cutlass.experimental import primitives
from kernels import shared
from kernels.words import Uint8, view

Int32, Int64, Pointer = cutlass.Int32, cutlass.Int64, cutlass.Pointer

STAGES = 3
CONSUMER_WARPS = 8
_ALIGNMENT = 1024  # of rows with permuted chunks


@dataclasses.dataclass(frozen=True)
class Ring:
    """Stages of one operand.

    Attributes:
      memory: Of the stages.
      barriers: The full ones, then the empty ones.
      bytes: Of a stage.
    """

    memory: Pointer
    barriers: Pointer
    bytes: cutlass.Constexpr[int]

    def stage(self, index: Int32) -> Pointer:
        """Start of a stage."""
        return self.memory + index * self.bytes

    def full(self, stage: Int32) -> Pointer:
        """Completes when the stage has been written."""
        return self.barriers + stage

    def empty(self, stage: Int32) -> Pointer:
        """Completes when the stage has been read."""
        return self.barriers + (stage + STAGES)

    def initialize(self) -> None:
        """By one thread, before anything waits."""
        for stage in range(STAGES):
            primitives.mbarrier_init(self.full(Int32(stage)), 1)
            primitives.mbarrier_init(self.empty(Int32(stage)), CONSUMER_WARPS)


def allocate(*stage_bytes: int) -> list[Ring]:
    """Rings with stages of these sizes."""
    memories = [shared.words(STAGES * size // 4, _ALIGNMENT) for size in stage_bytes]
    barriers = [shared.words(4 * STAGES) for _ in stage_bytes]
    return [
        Ring(view(memory.data_ptr(), Uint8), view(words.data_ptr(), Int64), size)
        for memory, words, size in zip(memories, barriers, stage_bytes, strict=True)
    ]


@cute.jit
def wait(barrier: Pointer, parity: Int32) -> None:
    """Waits until the barrier has completed the phase of this parity."""
    while not primitives.mbarrier_try_wait_parity(barrier, parity):
        pass


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
