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


GB200 = Machine("GB200", 152, 2.062e9, 16)
B200 = Machine("B200", 148, 1.965e9, 16)
B300 = Machine("B300", 148, 2.032e9, 32)
GB300 = Machine("GB300", 148, 2.070e9, 32)
MACHINES = (GB200, B200, B300, GB300)


@dataclasses.dataclass(frozen=True)
class Rates:
    """Clocks of a sub-partition for a warp instruction, and of hand-offs.

    Attributes:
      mufu: Of a transcendental function.
      alu: Of an integer instruction, a comparison, a selection, a conversion.
      fp8: Of a conversion to E4M3 or E5M2.
      packed: Of an instruction that computes two float32 a thread, and of an integer multiplication.
      product: Of the multiprocessor, for an M128 N128 tcgen05.mma of any kind: K is 16 for bfloat16, 32 for 8 bits, 64
        for 4 bits.
      barrier: From an arrival at a shared-memory barrier until a warp that waits for it goes on.
      maxima: Of a column of a tensor-memory load that takes the maximum; assumed to be that of any other load.
      tmem: From a tensor-memory load or store to its end, besides its transfer of a column a clock. Fitted, to one
        published time alone (FlashAttention-4 on B200, sequences of 32768): no measurement was found. It stands for
        everything in the hand-offs that is not known, as the latency of a product.
    """

    mufu: int
    alu: int = 2
    fp8: int = 4
    packed: int = 2
    product: int = 79
    barrier: int = 80
    maxima: int = 1
    tmem: int = 220


def rates_of(exponentials: int) -> Rates:
    """Rates of multiprocessors of a kind.

    Args:
      exponentials: A clock of the multiprocessor.

    Returns:
      The rates.
    """
    return Rates(32 * SUB_PARTITIONS // exponentials)


_USED = rates_of(16)

RATES = (
    ("FFMA, FMUL, FADD", "128 lanes", "CUDA C++ Programming Guide, arithmetic throughput"),
    ("FFMA2, FMUL2, FADD2", "64 lanes, two results each", "stall counts"),
    ("IMAD, IDP, HFMA2", "64 lanes", "stall counts"),
    ("ALU (FMNMX3, FSEL, LOP3, PRMT, SHF, ...)", "64 lanes", "CUDA C++ Programming Guide; stall counts"),
    ("F2FP to bfloat16, E2M1", "64 lanes", "stall counts; hao-ai-lab/flash-attention-fp4 measured 62 and 57 on GB300"),
    ("F2FP to E4M3", "32 lanes", "hao-ai-lab/flash-attention-fp4 measured 32 on GB300"),
    ("MUFU.EX2, sm_100", "16 lanes", "FlashAttention-4, arXiv 2603.05451; stall counts"),
    ("MUFU.EX2, sm_103", "32 lanes", "hao-ai-lab/flash-attention-fp4 measured 32; stall counts of sm_103a code"),
    ("LDS, STS", "32 lanes", "stall counts"),
    ("LDTM, STTM", "a column of 128 lanes", "assumed: no published measurement was found"),
    ("LDTM with maxima, sm_103", "a column of 128 lanes", "assumed, as for other loads"),
    ("tcgen05.mma, M128 N128", f"one in {_USED.product} clocks", "hao-ai-lab/flash-attention-fp4 measured on GB300"),
    ("mbarrier, arrival to waiter", f"{_USED.barrier} clocks", "the same: 71 to 85 in a kernel"),
    (
        "LDTM, STTM, latency",
        f"{_USED.tmem} clocks",
        "fitted to one published time, FlashAttention-4 on B200 with 32768 keys",
    ),
)
"""Per clock of a multiprocessor. Stall counts are those that ptxas writes into the code."""
