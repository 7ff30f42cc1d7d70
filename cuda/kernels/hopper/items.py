"""How the items of work reach the warpgroups of a thread block, whichever of them is free first.

A thread block begins with the item of its own number. When its producer has asked for all tiles of an item, it takes
the next one that no block has taken from a counter in global memory, works out what it is, and hands it on through
shared memory: a division is dear beside the tensor cores. Had it taken that one earlier, a block with a long item would
keep a second one to itself, while others have nothing left, for all of the first one's time.

| barrier | arrives | completes when |
|---|---|---|
| full | the producer's thread | an item, or the end, has been written |
| empty | one lane of each consumer warp | all of them have read it |

Who computes an item makes no difference to its results.
"""

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass.cute.arch import grid_dim
from cutlass.experimental import primitives
from kernels import ring, shared, work
from kernels.words import Uint32, view

Int32, Int64, Pointer = cutlass.Int32, cutlass.Int64, cutlass.Pointer

STAGES = 2
_ITEM = len(dataclasses.fields(work.Item))
_KEYS = _ITEM + 2
_NUMBERS = _KEYS + len(dataclasses.fields(work.Range))
_WORDS = 12  # in whole vectors of four
_END = -1


@dataclasses.dataclass(frozen=True)
class Problem:
    """Sizes and restrictions, of which items are made; see :func:`kernels.hopper.forward.forward`."""

    num_queries: Int32
    num_keys: Int32
    key_tiles: Int32
    query_heads: Int32
    kv_heads: Int32
    batches: Int32
    num_items: Int32
    section: Int32
    query_lengths: Pointer
    key_lengths: Pointer
    order: Pointer
    key_offset: Pointer
    window_left: Int32
    window_right: Int32


@dataclasses.dataclass(frozen=True)
class Job:
    """What the consumers need to know of an item.

    Attributes:
      item: Its rows and head.
      kv_index: Of batch entry and key/value head.
      row_limit: Rows from here on see nothing.
      keys: Its key tiles.
    """

    item: work.Item
    kv_index: Int32
    row_limit: Int32
    keys: work.Range

    @staticmethod
    def of_words(words: list[Int32]) -> "Job":
        """The job that :meth:`words` gave."""
        return Job(work.Item(*words[:_ITEM]), *words[_ITEM:_KEYS], work.Range(*words[_KEYS:_NUMBERS]))

    def words(self) -> list[Int32]:
        """Its numbers."""
        item, keys = ([getattr(part, x.name) for x in dataclasses.fields(part)] for part in (self.item, self.keys))
        return [*item, self.kv_index, self.row_limit, *keys]


@dataclasses.dataclass(frozen=True)
class Handover:
    """Where the producer leaves items.

    Attributes:
      memory: int32 [stages, words].
      barriers: The full ones, then the empty ones.
    """

    memory: Pointer
    barriers: Pointer

    def full(self, stage: Int32) -> Pointer:
        """Completes when the stage has been written."""
        return self.barriers + stage

    def empty(self, stage: Int32) -> Pointer:
        """Completes when the stage has been read."""
        return self.barriers + (stage + STAGES)

    def initialize(self, consumer_warps: int) -> None:
        """By one thread, before anything waits."""
        for stage in range(STAGES):
            primitives.mbarrier_init(self.full(Int32(stage)), 1)
            primitives.mbarrier_init(self.empty(Int32(stage)), consumer_warps)


def allocate() -> Handover:
    """Shared memory for it."""
    memory, barriers = shared.words(STAGES * _WORDS), shared.words(4 * STAGES)
    return Handover(view(memory.data_ptr(), Int32), view(barriers.data_ptr(), Int64))


def job_of(item: work.Item, rows: int, problem: Problem) -> Job:
    """What an item is.

    Args:
      item: The item.
      rows: Of every item.
      problem: Sizes and restrictions.
    """
    row_limit = work.row_limit_of(item, problem.num_queries, problem.query_lengths)
    keys = work.range_of(
        item,
        rows,
        row_limit,
        problem.num_keys,
        problem.key_lengths,
        problem.order,
        problem.key_offset,
        problem.window_left,
        problem.window_right,
    )
    heads_a_group = problem.query_heads // problem.kv_heads
    return Job(item, item.batch * problem.kv_heads + item.head // heads_a_group, row_limit, keys)


@cute.jit
def next_index(counter: Pointer, num_items: Int32) -> Int32:
    """The next item of this thread block, or one from ``num_items`` on.

    Args:
      counter: int32 [], items taken besides the first one of each block; null if each block has one item.
      num_items: Items there are.
    """
    index = num_items
    if counter.toint() != 0:
        blocks, _, _ = grid_dim()
        taken = primitives.inline_ptx(
            "atom.relaxed.gpu.global.add.u32 {$w0}, [{$r0}], 1;", write_only_types=[Uint32], read_only_args=[counter]
        )
        index = blocks + Int32(taken)
    return index


@cute.jit
def give(handover: Handover, place: ring.Place, job: Job) -> ring.Place:
    """Hands an item to the consumers, by the producer's thread."""
    words = [Uint32(word) for word in job.words()] + [Uint32(0)] * (_WORDS - _NUMBERS)
    ring.wait(handover.empty(place.stage), place.parity)
    target = view(handover.memory + place.stage * _WORDS, Uint32)
    for start in cutlass.range_constexpr(0, _WORDS, 4):
        (target + start).store(cutlass.Vector.from_elements(words[start : start + 4], Uint32), alignment=16)
    primitives.mbarrier_arrive(handover.full(place.stage))
    return ring.following(place, STAGES)


def end() -> Job:
    """Stands behind the last item."""
    return Job.of_words([Int32(_END)] * _NUMBERS)


@cute.jit
def take(handover: Handover, place: ring.Place) -> Job:
    """The next item, for a warp; :func:`is_item` tells whether it is one."""
    ring.wait(handover.full(place.stage), place.parity)
    source = handover.memory + place.stage * _WORDS
    words = [(source + start).load(count=4, alignment=16)[i] for start in range(0, _WORDS, 4) for i in range(4)]
    primitives.bar_warp_sync(0xFFFFFFFF)
    with cute.arch.elect_one():
        primitives.mbarrier_arrive(handover.empty(place.stage))
    return Job.of_words([cute.arch.make_warp_uniform(word) for word in words[:_NUMBERS]])


def is_item(job: Job) -> cutlass.Boolean:
    """Whether there is an item."""
    return job.item.head != _END
