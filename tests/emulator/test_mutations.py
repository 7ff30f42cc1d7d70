"""Every synchronisation fault put into a warp-specialised kernel is noticed, but for those explained here."""

import csv

import numpy as np
import pytest

from cuda.emulator import emulate
from cuda.emulator.errors import Finding
from cuda.emulator.front import Result
from cuda.emulator.mutations import UNNOTICED, Outcome, bars, mutants, save, survey, survey_launches
from cuda.emulator.mutations.mutants import moved
from cuda.emulator.mutations.survey import key_of
from cuda.emulator.program.program import Program
from cuda.emulator.ptx.parser import parse
from tests.emulator import pipeline
from tests.emulator.text import module, store_words

# The stages of the pipeline are used three times each, so that every parity comes twice.
_TILES = 6

# Family and change of the mutants that are no faults, and why.
_HARMLESS = {
    # The fence is still on the way from the stores to the copy: the copying thread makes it itself.
    ("fence.proxy.async", "behind the bar behind it"): 1,
    # The wait at the end only has to come before the CTA ends.
    ("bulk wait_group", "behind the bar behind it"): 1,
}


@pytest.fixture(scope="module")
def program() -> Program:
    return Program(parse(pipeline.kernel(_TILES)))


def _run(program: Program, seeds, limit: int = 1 << 40):
    return emulate(program, pipeline.problem(_TILES).arguments, 1, seeds=seeds, max_instructions=limit)


@pytest.fixture(scope="module")
def baseline(program):
    return _run(program, range(8))


@pytest.fixture(scope="module")
def outcomes(program, baseline) -> list[Outcome]:
    return survey(program, _run, range(8), baseline)


def test_the_kernel_has_no_faults(baseline):
    assert not baseline.findings and not baseline.varying
    np.testing.assert_array_equal(baseline.arrays[0][-1], pipeline.problem(_TILES).expected)


def test_every_fault_is_noticed(outcomes):
    left = [o.mutant for o in outcomes if o.noticed == UNNOTICED]
    counts = {key: sum((m.family, m.change) == key for m in left) for key in {(m.family, m.change) for m in left}}
    assert counts == _HARMLESS, "\n".join(map(str, left))


def test_all_kinds_of_faults_are_tried(outcomes):
    families = {o.mutant.family for o in outcomes}
    assert families == {
        "arrive", "expect", "mbarrier wait", "mbarrier.init", "tcgen05.commit", "tcgen05.wait::ld", "tcgen05.wait::st",
        "tcgen05.mma", "tcgen05.cp", "tcgen05.ld", "tcgen05.st", "fence.proxy.async", "fence.mbarrier_init", "bar",
        "bulk commit_group", "bulk wait_group", "elect",
    }  # fmt: skip


def test_how_faults_are_noticed(outcomes):
    """By the schedule or by happens-before; some kinds only ever by one."""
    by = {(o.mutant.family, o.mutant.change): o.noticed for o in outcomes}
    assert by["fence.proxy.async", "removed"] == by["fence.mbarrier_init", "removed"] == "proxy"
    assert by["tcgen05.mma", "scale factors of A one column on"] == "wrong result"
    assert by["tcgen05.wait::ld", "removed"] == "race"
    assert by["expect", "bytes + 16"] == "deadlock"
    assert {"lifetime", "issue", "BarrierFault", "MemoryFault"} <= {o.noticed for o in outcomes}


def test_an_altered_program_equals_one_made_from_its_kernel(program):
    """What is shared with the program of the kernel does not change what the mutant does."""
    chosen = {("mbarrier wait", "removed"), ("tcgen05.ld", "in front of the wait before it")}
    for mutant in mutants(program.kernel):
        if (mutant.family, mutant.change) in chosen:
            quick, full = (_said(p) for p in (program.altered(mutant.kernel), Program(mutant.kernel)))
            assert quick == full


def test_an_altered_program_may_have_a_branch_elsewhere(program):
    kernel = program.kernel
    branch = next(i for i in kernel.instructions if i.opcode == "bra" and i.guard is not None)
    behind = kernel.instructions[branch.index + 1]
    swapped = moved(kernel, branch.index + 1, branch.index)
    assert swapped.instructions[branch.index].text == behind.text
    assert _said(program.altered(swapped)) == _said(Program(swapped))


def _said(program: Program) -> str:
    try:
        return "\n".join(sorted(f.text for f in _run(program, [0], 10_000).findings))
    except Exception as e:
        return str(e)


def test_tables_and_plot(outcomes, tmp_path):
    save(outcomes, tmp_path / "survey")
    text = (tmp_path / "survey.md").read_text()
    assert f"| all | {len(outcomes)} | {len(outcomes) - sum(_HARMLESS.values())} |" in text
    assert "| arrive: removed | 2 | 2 | 2 deadlock |" in text
    with open(tmp_path / "survey.csv") as file:
        assert len(list(csv.DictReader(file))) == len(outcomes)
    pytest.importorskip("matplotlib")
    bars({"pipeline": outcomes}, tmp_path / "bars.png")
    assert (tmp_path / "bars.png").read_bytes().startswith(b"\x89PNG")


def test_a_kernel_that_varies_cannot_be_surveyed():
    """Its arrays cannot say what is wrong."""
    racing = module(
        "mov.u32 %r1, %tid.x; shr.u32 %r2, %r1, 5; mov.u32 %r3, buffer; st.shared.u32 [%r3], %r2;"
        "bar.sync 0; ld.shared.u32 %r4, [%r3];" + store_words(["%r4"]),
        "p", shared=16, threads=64,
    )  # fmt: skip
    program = Program(parse(racing))

    def run(program, seeds, limit):
        return emulate(program, [np.zeros(64, np.uint32)], 1, seeds=seeds)

    with pytest.raises(ValueError, match="differ between seeds"):
        survey(program, run, range(8))


def test_what_one_launch_does_not_show_is_tried_in_the_next(program, baseline):
    tried = {"blind": 0, "seeing": 0}

    def blind(program, seeds, limit):
        tried["blind"] += 1
        return Result(arrays=[baseline.arrays[0]] * len(seeds), instructions=len(seeds))

    def seeing(program, seeds, limit):
        tried["seeing"] += 1
        return _run(program, seeds, limit)

    outcomes = survey_launches(program, [blind, seeing, blind], [0])
    every = list(mutants(program.kernel))
    assert [o.mutant.instruction for o in outcomes] == [mutant.instruction for mutant in every]
    left = sum(o.noticed == UNNOTICED for o in outcomes)
    assert 0 < left < len(every)
    # A run of the kernel itself comes first in each launch.
    assert tried == {"blind": 1 + len(every) + 1 + left, "seeing": 1 + len(every)}


def test_findings_are_told_apart_by_their_lines():
    one = Finding("race", "the read by warp 3 at line 7: ld is not ordered after the write by warp 1 at line 5: st")
    other = Finding("race", "the read by warp 2 at line 7: ld is not ordered after the write by warp 0 at line 5: st")
    assert key_of(one) == key_of(other) == ("race", "7", "5")
    assert key_of(one) != key_of(Finding("proxy", one.text))


_LOOP = """
    mov.u32 %r1, 0;
BEGIN:
    add.u32 %r1, %r1, 1;
    setp.lt.u32 %p1, %r1, 4;
    @%p1 bra BEGIN;
    mov.u32 %r2, 5;
    @%p1 bra AFTER;
    mov.u32 %r3, 6;
AFTER:
    mov.u32 %r4, 7;"""


@pytest.mark.parametrize(
    ("source", "target", "begin", "after"),
    # In front of a loop that only its own branch enters; behind a block; where the moved one's label stays behind.
    [(4, 1, 2, 7), (4, 7, 1, 7), (7, 4, 1, 8), (7, 6, 1, 8)],
)
def test_labels_stay_with_what_they_mark(source, target, begin, after):
    kernel = parse(module(_LOOP))
    result = moved(kernel, source, target)
    assert [i.index for i in result.instructions] == list(range(len(kernel.instructions)))
    assert sorted(i.line for i in result.instructions) == [i.line for i in kernel.instructions]
    labels = {name.split("@")[0]: index for name, index in result.labels.items()}
    assert labels == {"BEGIN": begin, "AFTER": after}
    place = target if target < source else target - 1
    assert result.instructions[place].line == kernel.instructions[source].line
