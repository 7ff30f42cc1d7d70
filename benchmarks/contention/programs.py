"""PTX in which two warpgroups keep the tensor cores busy while other warps repeat one instruction."""

import dataclasses

_CHAINS = 16  # values of a warp, each used again seven instructions later at the earliest: latency does not count
_REPEATS = 8
ACCUMULATORS = 64
PRODUCTS = 8
"""Of 64 x 128 accumulators, in one iteration."""
INSTRUCTIONS = _CHAINS * _REPEATS
"""In one iteration."""
MMA_THREADS = 256
OUTLASTING = 3
"""Iterations of the products for one of the instructions, so that they go on until the last instruction is done."""

TENSOR_CORES: dict[str, tuple[str, str, str] | None] = {
    "idle": None,
    "float16": ("m64n128k16.f32.f16.f16", "%left", "1, 1, 0, 0"),
    "E4M3, A in registers": ("m64n128k32.f32.e4m3.e4m3", "{%zero, %zero, %zero, %zero}", "1, 1"),
}
"""What the tensor cores do: shape, A operand and the rest of the instruction."""


@dataclasses.dataclass(frozen=True)
class Instruction:
    """An instruction to repeat.

    Attributes:
      name: For tables.
      ptx: With {d} for the value that it changes, {a} and {b} for others; x are float32, r are words.
      sass: What the assembler makes of it, for readers.
    """

    name: str
    ptx: str
    sass: str


STREAM = (
    Instruction("float32 multiply-add", "fma.rn.f32 %x{d}, %x{d}, %x{a}, %x{b};", "FFMA"),
    Instruction("float32 add", "add.rn.f32 %x{d}, %x{d}, %x{a};", "FADD"),
    Instruction("float32 multiply, saturating", "mul.rn.sat.f32 %x{d}, %x{d}, %x{a};", "FMUL.SAT"),
    Instruction("float32 maximum", "max.NaN.f32 %x{d}, %x{a}, %x{b};", "FMNMX"),
    Instruction("integer maximum of three", "max.s32 %r{d}, %r{d}, %r{a}; max.s32 %r{d}, %r{d}, %r{b};", "VIMNMX3"),
    Instruction(
        "add and clamp two 16-bit integers",
        "add.s16x2 %word, %r{d}, %r{a}; min.relu.s16x2 %r{d}, %word, %r{b};",
        "VIADDMNMX",
    ),
    Instruction("logic of three words", "lop3.b32 %r{d}, %r{d}, %r{a}, %r{b}, 0x6A;", "LOP3"),
    Instruction("bytes of two words", "prmt.b32 %r{d}, %r{d}, %r{a}, 0x7531;", "PRMT"),
    Instruction("select", "selp.f32 %x{d}, %x{d}, %x{a}, %chosen;", "FSEL"),
    Instruction("integer multiply-add", "mad.lo.s32 %r{d}, %r{d}, %r{a}, %r{b};", "IMAD"),
    Instruction("multiply two float16", "mul.rn.f16x2 %r{d}, %r{d}, %r{a};", "HMUL2"),
    Instruction("add two float16", "add.rn.f16x2 %r{d}, %r{d}, %r{a};", "HADD2"),
    Instruction("two float32 to float16", "cvt.rz.f16x2.f32 %r{d}, %x{d}, %x{a}; mov.b32 %x{d}, %r{d};", "F2FP.F16"),
    Instruction(
        "four float32 to E4M3, two instructions",
        "cvt.rn.satfinite.e4m3x2.f32 %low, %x{d}, %x{a}; cvt.rn.satfinite.e4m3x2.f32 %high, %x{a}, %x{b}; "
        "mov.b32 %x{d}, {{%low, %high}};",
        "F2FP.E4M3",
    ),
    Instruction("exponential", "ex2.approx.ftz.f32 %x{d}, %x{d};", "MUFU.EX2"),
    Instruction("shuffle", "shfl.sync.bfly.b32 %r{d}, %r{d}, 1, 31, -1;", "SHFL"),
)


def program(tensor_cores: str, instruction: Instruction) -> str:
    """An entry ``measure(times, iterations)``.

    The first 256 threads multiply, the others repeat the instruction. The first thread of each warpgroup of the first
    block stores how many clocks it took, as uint32 at the index of the warpgroup.

    Args:
      tensor_cores: One of :data:`TENSOR_CORES`.
      instruction: To repeat.
    """
    numbers = range(_CHAINS)
    lines = [
        ".version 8.0",
        ".target sm_90a",
        ".address_size 64",
        ".visible .entry measure(.param .u64 times, .param .u32 iterations) {",
        f".reg .f32 %a<{ACCUMULATORS}>; .reg .f32 %x<{_CHAINS}>; .reg .b32 %r<{_CHAINS}>; .reg .b16 %low, %high;",
        ".reg .b32 %word, %zero, %i, %iterations, %group, %thread, %block;",
        ".reg .b64 %start, %end, %times, %left, %right; .reg .pred %again, %chosen;",
        ".shared .align 1024 .b8 memory[65536];",
        "ld.param.u64 %times, [times]; ld.param.u32 %iterations, [iterations];",
        "mov.u32 %thread, %tid.x; shr.u32 %group, %thread, 7; mov.b32 %i, 0; mov.b32 %zero, 0;",
        "setp.gt.u32 %chosen, %thread, 5;",
        *(f"cvt.rn.f32.u32 %x{i}, %thread; add.u32 %r{i}, %thread, {i};" for i in numbers),
        f"bar.sync 0; setp.ge.u32 %again, %thread, {MMA_THREADS}; @%again bra REPEAT_START;",
        *_multiplying(tensor_cores),
        "REPEAT_START: mov.u64 %start, %clock64;",
        "REPEAT:",
        *(
            instruction.ptx.format(d=i, a=(i + 5) % _CHAINS, b=(i + 9) % _CHAINS)
            for _ in range(_REPEATS)
            for i in numbers
        ),
        "add.u32 %i, %i, 1; setp.lt.u32 %again, %i, %iterations; @%again bra REPEAT;",
        "mov.u64 %end, %clock64;",
        # Something must depend on the results, or the assembler leaves the work out.
        *(f"add.f32 %x0, %x0, %x{i}; xor.b32 %r0, %r0, %r{i};" for i in numbers[1:]),
        "mov.b32 %word, %x0; add.u32 %word, %word, %r0;",
        "STORE: sub.s64 %end, %end, %start; cvt.u32.u64 %r1, %end;",
        "mov.u32 %block, %ctaid.x; and.b32 %thread, %thread, 127; or.b32 %block, %block, %thread;",
        "setp.ne.u32 %again, %block, 0; mul.wide.u32 %left, %group, 4; add.s64 %times, %times, %left;",
        "@!%again st.global.u32 [%times], %r1;",
        "setp.eq.u32 %again, %word, 1234567; @%again st.global.u32 [%times+64], %word;",
        "ret; }",
    ]
    return "\n".join(lines) + "\n"


def _multiplying(tensor_cores: str) -> list[str]:
    work = TENSOR_CORES[tensor_cores]
    if work is None:
        return ["mov.b32 %word, 0; ret;"]
    shape, left, rest = work
    accumulators = ", ".join(f"%a{i}" for i in range(ACCUMULATORS))
    product = f"wgmma.mma_async.sync.aligned.{shape} {{{accumulators}}}, {left}, %right, 1, {rest};"
    return [
        *(f"mov.f32 %a{i}, 0f00000000;" for i in range(ACCUMULATORS)),
        "mov.u32 %word, memory; and.b32 %word, %word, 0x3ffff; shr.u32 %word, %word, 4; or.b32 %word, %word, 65536;",
        "mov.b32 %r0, 0x40000040; mov.b64 %left, {%word, %r0}; add.u32 %word, %word, 1024;",
        f"mul.lo.u32 %iterations, %iterations, {OUTLASTING};",
        "mov.b64 %right, {%word, %r0}; mov.u64 %start, %clock64;",
        "MULTIPLY: wgmma.fence.sync.aligned;",
        *[product] * PRODUCTS,
        "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;",
        "add.u32 %i, %i, 1; setp.lt.u32 %again, %i, %iterations; @%again bra MULTIPLY;",
        "mov.u64 %end, %clock64;",
        *(f"add.f32 %a0, %a0, %a{i};" for i in range(1, ACCUMULATORS)),
        "mov.b32 %word, %a0; bra STORE;",
    ]
