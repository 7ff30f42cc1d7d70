"""What a streaming multiprocessor does in a clock: rates, each with where it is published."""

import dataclasses

SUB_PARTITIONS = 4
"""Each has a quarter of a warpgroup's warps, and issues one warp instruction a clock."""


@dataclasses.dataclass(frozen=True)
class Machine:
    """A GPU.

    Attributes:
      name: Of the GPU.
      multiprocessors: That run thread blocks.
      clock: Hertz.
      exponentials: Exponentials a clock of a multiprocessor.
    """

    name: str
    multiprocessors: int
    clock: float
    exponentials: int


def mufu_clocks(exponentials: int) -> int:
    """Clocks in which a sub-partition computes the exponentials of a warp.

    Args:
      exponentials: A clock of the multiprocessor.

    Returns:
      Clocks.
    """
    return 32 * SUB_PARTITIONS // exponentials


GB200 = Machine("GB200", 152, 2.062e9, 16)
B200 = Machine("B200", 148, 1.965e9, 16)
B300 = Machine("B300", 148, 2.032e9, 32)
GB300 = Machine("GB300", 148, 2.070e9, 32)
MACHINES = (GB200, B200, B300, GB300)

PRODUCT_CLOCKS = 79
"""Of an M128 N128 tcgen05.mma of any kind: K is 16 for bfloat16, 32 for 8 bits, 64 for 4 bits."""

IDEAL_PRODUCT_CLOCKS = 64
"""The same at the peak rate, 8192 bfloat16 FLOP a clock."""

BARRIER_CLOCKS = 80
"""From an arrival at a shared-memory barrier until a warp that waits for it goes on."""

TMEM_CLOCKS = 220
"""From a tensor-memory load or store to its end, besides its transfer of a column a clock.

Fitted, to one published time alone (FlashAttention-4 on B200, sequences of 32768): no measurement was found. It stands for
everything in the hand-offs that is not known, as the latency of a product.
"""

RATES = (
    ("FFMA, FMUL, FADD", "128 lanes", "CUDA C++ Programming Guide, arithmetic throughput; stall counts"),
    ("FFMA2, FMUL2, FADD2", "64 lanes, two results each", "stall counts: 2 between neighbours"),
    ("IMAD, IDP, HFMA2", "64 lanes", "stall counts: 2 between neighbours"),
    ("ALU (FMNMX3, FSEL, LOP3, PRMT, SHF, ...)", "64 lanes", "Programming Guide; stall counts: 2 between neighbours"),
    ("F2FP to bfloat16, E2M1", "64 lanes", "hao-ai-lab/flash-attention-fp4: 62 and 57 measured on GB300"),
    ("F2FP to E4M3", "32 lanes", "the same: 32 measured on GB300"),
    ("MUFU.EX2, sm_100", "16 lanes", "FlashAttention-4, arXiv 2603.05451; stall counts: 8 between neighbours"),
    ("MUFU.EX2, sm_103", "32 lanes", "hao-ai-lab/flash-attention-fp4: measured; stall counts: 4 between neighbours"),
    ("LDTM, STTM", "a column of 128 lanes", "assumed: no published measurement was found"),
    ("LDS, STS", "32 lanes", "stall counts: 4 between neighbours"),
    ("tcgen05.mma M128 N128", f"one in {PRODUCT_CLOCKS} clocks", "hao-ai-lab/flash-attention-fp4: measured on GB300"),
    ("mbarrier, arrival to waiter", f"{BARRIER_CLOCKS} clocks", "the same: 71 to 85 in the kernel"),
    ("LDTM, STTM latency", f"{TMEM_CLOCKS} clocks", "fitted to one published time: FlashAttention-4, B200, 32768 keys"),
)
"""Per clock of a multiprocessor. Stall counts are those that ptxas writes into the code."""
