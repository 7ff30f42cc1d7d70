import re

import pytest

from cuda.emulator.program.registers import early_uses
from cuda.emulator.ptx.parser import parse
from tests.emulator.text import module

ACCUMULATORS = "{" + ", ".join(f"%f{i}" for i in range(4)) + "}"
MMA = f"wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {ACCUMULATORS}, %d1, %d2, 1, 1, 1, 0, 0;"
FROM_REGISTERS = (
    f"wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {ACCUMULATORS}, {{%r1, %r2, %r3, %r4}}, %d2, 1, 1, 1, 0;"
)
FENCE, COMMIT = "wgmma.fence.sync.aligned;", "wgmma.commit_group.sync.aligned;"
WAIT, WAIT_ONE = "wgmma.wait_group.sync.aligned 0;", "wgmma.wait_group.sync.aligned 1;"
WRITE = "add.f32 %f0, %f9, %f9;"


def _findings(*statements: str) -> list[str]:
    return [str(f) for f in early_uses(parse(module("\n".join(statements), target="sm_90a")))]


@pytest.mark.parametrize(
    "statements",
    [
        (WRITE, FENCE, MMA, COMMIT, WAIT, "add.f32 %f9, %f0, %f1;"),
        (FENCE, MMA, MMA, COMMIT, WAIT),
        ("mov.b32 %r1, 0;", FENCE, FROM_REGISTERS, COMMIT, WAIT, "mov.b32 %r1, 1;"),
        (FENCE, MMA, COMMIT, MMA, COMMIT, WAIT, "add.f32 %f9, %f0, %f1;"),
        (FENCE, "mov.b32 %f0, %f9;", MMA, COMMIT, WAIT),
        # Registers that no wgmma uses are free.
        (FENCE, MMA, COMMIT, "add.f32 %f9, %f10, %f11;", WAIT),
    ],
)
def test_nothing_is_found_in_correct_code(statements):
    assert not _findings(*statements)


@pytest.mark.parametrize(
    "statements, message",
    [
        ((FENCE, MMA, COMMIT, "add.f32 %f9, %f1, %f1;", WAIT), "add.f32 .* uses %f1, which a wgmma uses"),
        ((FENCE, FROM_REGISTERS, COMMIT, "mov.b32 %r3, 1;", WAIT), "uses %r3, which a wgmma uses"),
        ((FENCE, MMA, COMMIT, MMA, COMMIT, WAIT_ONE, "add.f32 %f9, %f1, %f1;"), "uses %f1, which a wgmma uses"),
        ((FENCE, WRITE, MMA, COMMIT, WAIT), "wgmma.* uses %f0, which was written without a wgmma.fence"),
        (("add.u32 %r2, %r9, 1;", FROM_REGISTERS, COMMIT, WAIT), "uses %r2, which was written without"),
        # Only on one of two ways.
        ((FENCE, MMA, COMMIT, "@%p1 bra SKIP;", WAIT, "SKIP: add.f32 %f9, %f2, %f2;"), "uses %f2, which a wgmma uses"),
        ((MMA, COMMIT, WAIT), "may have no wgmma.fence before it"),
        (("@%p1 bra SKIP;", FENCE, "SKIP:", MMA, COMMIT, WAIT), "may have no wgmma.fence before it"),
        # From one round of a loop to the next.
        ((FENCE, "L:", MMA, COMMIT, WAIT, WRITE, "@%p1 bra L;"), "uses %f0, which was written without"),
    ],
)
def test_early_uses_are_found(statements, message):
    found = _findings(*statements)
    assert len(found) == 1
    assert re.search(message, found[0])


@pytest.mark.parametrize(
    ("commits", "wait", "found"),
    [(COMMIT, "", 1), (COMMIT, WAIT_ONE, 1), (COMMIT, WAIT, 0), (COMMIT + COMMIT, WAIT_ONE, 0)],
)
def test_a_loop_may_commit_more_groups_than_it_waits_for(commits, wait, found):
    loop = (FENCE, "L:", MMA, commits, "@%p1 bra L;", wait, "add.f32 %f9, %f0, %f1;")
    assert len(_findings(*loop)) == found


def test_loads_of_tensor_memory_need_no_wait_for_their_registers():
    assert not _findings("tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r1}, [%r2];", "add.u32 %r3, %r1, 1;")
