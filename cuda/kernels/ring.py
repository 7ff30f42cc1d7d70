"""Rings of tiles in shared memory, such as those of keys and values that the copy engine fills.

| barrier | arrives | completes when |
|---|---|---|
| full | who writes | a tile has been written |
| empty | who reads | all of them have read a tile |

Where the copy engine writes, that is the producer's thread, with the bytes that it expects; warps arrive by one lane
each. What is read first has a ring of its own, such as keys before values. A stage's barriers complete once a round;
who waits for a round's barrier waits for its parity. Readers start with parity 0, writers with 1, since all stages are
empty at first.
"""

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass.experimental import primitives
from kernels import shared
from kernels.words import Uint8, view, when

Int32, Int64, Pointer = cutlass.Int32, cutlass.Int64, cutlass.Pointer

_ALIGNMENT = 1024  # of swizzled rows


@dataclasses.dataclass(frozen=True)
class Ring:
    """Stages of one operand.

    Attributes:
      memory: Of the stages.
      barriers: The full ones, then the empty ones.
      stages: Their number.
      bytes: Of a stage.
    """

    memory: Pointer
    barriers: Pointer
    stages: cutlass.Constexpr[int]
    bytes: cutlass.Constexpr[int]

    def stage(self, index: Int32) -> Pointer:
        """Start of a stage."""
        return self.memory + index * self.bytes

    def full(self, stage: Int32) -> Pointer:
        """Completes when the stage has been written."""
        return self.barriers + stage

    def empty(self, stage: Int32) -> Pointer:
        """Completes when the stage has been read."""
        return self.barriers + (stage + self.stages)

    def initialize(self, readers: int, writers: int = 1) -> None:
        """By one thread, before anything waits; so many arrive at the barriers."""
        for stage in range(self.stages):
            primitives.mbarrier_init(self.full(Int32(stage)), writers)
            primitives.mbarrier_init(self.empty(Int32(stage)), readers)


def allocate(*sizes: tuple[int, int]) -> list[Ring]:
    """Rings of these numbers of stages, and bytes of a stage."""
    memories = [shared.words(stages * size // 4, _ALIGNMENT) for stages, size in sizes]
    barriers = [shared.words(4 * stages) for stages, _ in sizes]
    return [
        Ring(view(memory.data_ptr(), Uint8), view(words.data_ptr(), Int64), *size)
        for memory, words, size in zip(memories, barriers, sizes, strict=True)
    ]


@cute.jit
def wait(barrier: Pointer, parity: Int32) -> None:
    """Waits until the barrier has completed the phase of this parity."""
    while not primitives.mbarrier_try_wait_parity(barrier, parity):
        pass


@dataclasses.dataclass(frozen=True)
class Place:
    """A place in the endless sequence of tiles that go through a ring.

    Attributes:
      stage: Where the tile lies.
      parity: Of the phase of its barriers that is waited for.
    """

    stage: Int32
    parity: Int32


def following(place: Place, stages: int) -> Place:
    """The next place."""
    wraps = place.stage == stages - 1
    return Place(when(wraps, Int32(0), place.stage + 1), when(wraps, place.parity ^ 1, place.parity))
