"""Allocation of tensor memory, and movement inside it."""

import numpy as np

from tests.emulator.blackwell.probe import Probe, Question, commit, copy_tensor, fill_tensor, one_thread, program, wait


def _allocation(sizes: tuple[int, ...]) -> Probe:
    """The addresses that allocations of a warp are given, one after the other, in a CTA that has none."""
    lines, expected, first = ["setp.ne.u32 %p0, %warp, 0;", "@%p0 bra DONE;"], [], 0
    for i, size in enumerate(sizes):
        lines += [
            f"tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%shared+{8 * i}], {size};",
            f"ld.shared.b32 %r{20 + i}, [%shared+{8 * i}];",
        ]
        expected.append(first)
        first += size
    lines += ["setp.ne.u32 %p0, %thread, 0;", "@%p0 bra FREE;"]
    lines += [f"st.global.b32 [%out+{4 * i}], %r{20 + i};" for i in range(len(sizes))]
    lines += ["FREE:", "bar.warp.sync 0xffffffff;"]
    lines += [f"tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r{20 + i}, {size};" for i, size in enumerate(sizes)]
    text = f"""
.version 8.8
.target sm_100f
.address_size 64
.extern .shared .align 1024 .b8 dynamic[];
.visible .entry main(.param .u64 out)
.reqntid 128, 1, 1
{{
.reg .pred %p0; .reg .b32 %r<32>, %thread, %warp, %shared; .reg .b64 %out;
ld.param.u64 %out, [out];
mov.u32 %thread, %tid.x;
shr.u32 %warp, %thread, 5;
mov.u32 %shared, dynamic;
{chr(10).join(lines)}
DONE:
ret;
}}
"""
    return Probe(
        " and ".join(map(str, sizes)),
        text,
        (np.full(len(sizes), 0xFFFF, np.uint32),),
        {0: np.array(expected, np.uint32)},
        shared_bytes=1024,
    )


def _shifted() -> Probe:
    """tcgen05.shift at column 4 of the second lane quadrant."""
    words = np.arange(16 * 128, dtype=np.uint32).reshape(16, 128)
    expected = words.copy()
    expected[4:12, 32:63] = words[4:12, 33:64]
    issue = f"add.u32 %r3, %tensor, {32 << 16 | 4};\ntcgen05.shift.cta_group::1.down [%r3];\n"
    body = fill_tensor("words", 0, 16) + one_thread(issue + commit()) + wait() + copy_tensor("d", 0, 16)
    text = program(dict.fromkeys(("words", "d"), "pointer"), body, target="sm_100a")
    return Probe("shift", text, (words, np.zeros_like(words)), {1: expected}, target="sm_100a")


QUESTIONS = (
    Question(
        "What does tcgen05.shift move?",
        "In 32 lanes of 8 columns, each lane but the last takes what the next one holds.",
        "ISA 9.7.16.9.3; the direction, and that 32 lanes are shifted and not 128, are reading alone.",
        "Nothing: our kernels do not use it.",
        (_shifted(),),
    ),
    Question(
        "Which columns does tcgen05.alloc give?",
        "The first that are free: a CTA that allocates all 512 has column 0.",
        "Reading alone; CUTLASS reads the address from shared memory, as the ISA says.",
        "Nothing, if the kernels add the allocated address; constants in place of it would be wrong.",
        (_allocation((512,)), _allocation((256, 256)), _allocation((32, 128, 64))),
    ),
)
