"""Races that no order of the turns may hide, and order that no order of the turns may undo."""

import numpy as np
import pytest

from cuda.emulator import emulate
from tests.emulator.text import module

# %r1 is the thread, %r8 the address of its word of the buffer at %r20, %d2 that of its word of the array at %d1.
_START = """
    mov.u32 %r1, %tid.x; mov.u32 %r20, buffer; shl.b32 %r8, %r1, 2; add.u32 %r8, %r8, %r20; shr.u32 %r2, %r1, 5;
    mov.b16 %h1, 7; setp.eq.u32 %p10, %r1, 0; ld.param.u64 %d1, [a0]; mul.wide.u32 %d2, %r1, 4; add.u64 %d2, %d2, %d1;
"""
_DELAY = "mov.u32 %r9, 0; D: add.u32 %r9, %r9, 1; setp.lt.u32 %p11, %r9, 5000; @%p11 bra D;"


def _races(start: str, *warps: str, seeds: int = 6, threads: int | None = None, **options) -> list[str]:
    """What each seed says of its races; after the start, warp i runs `warps[i]`."""
    body = _START + start
    for i, part in enumerate(warps):
        body += f"\n setp.eq.u32 %p0, %r2, {i}; @!%p0 bra N{i};\n {part}\n N{i}:"
    text = module(body, "p", shared=2048, threads=threads or 32 * len(warps))
    options = {"grid": 1, "max_instructions": 200_000} | options
    runs = [emulate(text, [np.zeros(64, np.uint32)], seeds=[seed], **options) for seed in range(seeds)]
    assert not any(finding.kind != "race" for run in runs for finding in run.findings)
    return ["; ".join(finding.text for finding in run.findings) for run in runs]


# A bulk copy reads 256 bytes that the other warp overwrites much later, with nothing between them.
_BULK_STORE = """
    @!%p10 bra S; cp.async.bulk.global.shared::cta.bulk_group [%d1], [%r20], 256; cp.async.bulk.commit_group;
    cp.async.bulk.wait_group.read 0; S: bar.warp.sync -1;
"""


@pytest.mark.parametrize("own", ["", "st.shared.u32 [%r8], 2;"], ids=["untouched", "half overwritten"])
def test_what_a_bulk_copy_read_is_remembered_until_all_of_it_is_overwritten(own):
    start = "st.shared.u32 [%r8], 1; fence.proxy.async.shared::cta; bar.sync 0;"
    races = _races(start, _BULK_STORE + own, _DELAY + "st.shared.u32 [%r8], 2;")
    assert all("by cp of warp 0" in text for text in races)


@pytest.mark.parametrize("own", ["", "st.global.u32 [%d2], 2;"], ids=["untouched", "half overwritten"])
def test_what_an_asynchronous_copy_read_is_remembered(own):
    copy = """
    shl.b32 %r3, %r1, 3; cvt.u64.u32 %d3, %r3; add.u64 %d3, %d3, %d1; add.u32 %r4, %r20, %r3;
    cp.async.ca.shared.global [%r4], [%d3], 8; cp.async.wait_all;
    """
    assert all(_races("", copy + own, _DELAY + "st.global.u32 [%d2], 2;"))


@pytest.mark.parametrize("own", ["", "ld.global.u32 %r5, [%d2];"], ids=["unread", "read"])
def test_a_read_does_not_hide_what_a_reduction_wrote(own):
    reduce = _BULK_STORE.replace("cp.async.bulk.global", "cp.reduce.async.bulk.global").replace(
        "bulk_group [", "bulk_group.add.u32 ["
    )
    start = "st.shared.u32 [%r8], 1; fence.proxy.async.shared::cta; bar.sync 0;"
    reduce = reduce.replace("wait_group.read", "wait_group")
    assert all(_races(start, reduce + own, _DELAY + "ld.global.u32 %r5, [%d2];"))


def test_an_atomic_does_not_hide_the_reads_before_it():
    # The atomic comes after the copy's read, the other warp's does not.
    start = "st.shared.u32 [%r8], 1; fence.proxy.async.shared::cta; bar.sync 0;"
    add = "atom.shared.add.u32 %r5, [%r8], 1;"
    same = "and.b32 %r8, %r8, -129;" + add
    assert all("by cp of warp 0" in text for text in _races(start, _BULK_STORE + add, _DELAY + same))


def test_a_ring_of_bulk_stores_needs_both_of_its_barriers():
    ring = """
    mov.u32 %r7, 0;
    L: st.shared.u32 [%r8], %r7; fence.proxy.async.shared::cta; bar.sync 0;
    @!%p10 bra S; cp.async.bulk.global.shared::cta.bulk_group [%d1], [%r20], 256; cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0; S: {barrier}
    add.u32 %r7, %r7, 1; setp.lt.u32 %p11, %r7, 3; @%p11 bra L;
    """
    assert not any(_races(ring.format(barrier="bar.sync 0;"), threads=64))
    assert all(_races(ring.format(barrier=""), threads=64))


# ---- accesses narrower than a word ----


@pytest.mark.parametrize("bits, step", [(8, 1), (16, 2)])
def test_a_neighbour_does_not_replace_the_record_of_a_narrow_write(bits, step):
    races = _races(
        "@%p10 st.shared.u32 [%r20], 0; bar.sync 0;",
        f"st.shared.u{bits} [%r20], %h1;",
        f"st.shared.u{bits} [%r20+{step}], %h1; bar.arrive 1, 64;",
        f"bar.sync 1, 64; ld.shared.u{bits} %h2, [%r20];",
    )
    assert all("by warp 0" in text for text in races)


@pytest.mark.parametrize("bits, step", [(8, 1), (16, 2)])
def test_a_neighbour_does_not_replace_the_record_of_a_narrow_read(bits, step):
    races = _races(
        "@%p10 st.shared.u32 [%r20], 0; bar.sync 0;",
        f"st.shared.u{bits} [%r20], %h1;",
        f"ld.shared.u{bits} %h2, [%r20]; ld.shared.u{bits} %h3, [%r20+{step}];",
    )
    assert all(races)


def test_narrow_and_wide_accesses_are_compared_by_bytes():
    def races(first: str, second: str) -> list[str]:
        return _races("st.shared.u32 [%r8], 1; bar.sync 0;", first, second)

    narrow, wide = "@%p10 st.shared.u8 [%r20+3], %h1;", "ld.shared.v2.u32 {{%r5, %r6}}, [%r20+{}];"
    assert all(races(narrow, wide.format(0)))
    assert not any(races(narrow, wide.format(8)))
    assert not any(races(narrow, "ld.shared.u8 %h2, [%r20+2];"))


def test_what_was_recorded_in_words_is_kept_in_bytes():
    # The copy reads words; then a narrow write makes bytes of the cells, and a wide one comes without order.
    start = "st.shared.u32 [%r8], 1; fence.proxy.async.shared::cta; bar.sync 0;"
    narrow = "@%p10 st.shared.u8 [%r20+1024], %h1;"
    assert all("by cp of warp 0" in t for t in _races(start, _BULK_STORE + narrow, _DELAY + "st.shared.u32 [%r8], 2;"))


# ---- one instruction ----


@pytest.mark.parametrize(
    "store",
    [
        "st.shared.u32 [%r20], %r1;",
        "st.global.u32 [%d1], %r1;",
        "and.b32 %r3, %r1, 15; shl.b32 %r3, %r3, 2; add.u32 %r3, %r3, %r20; st.shared.u32 [%r3], %r1;",
        "and.b32 %r3, %r1, 15; mul.wide.u32 %d3, %r3, 4; add.u64 %d3, %d3, %d1; st.global.u32 [%d3], %r1;",
        "setp.lt.u32 %p1, %r1, 2; @%p1 st.shared.u32 [%r20], %r1;",
    ],
)
def test_lanes_store_different_values_to_one_address(store):
    assert all("lanes of warp 0" in text for text in _races("", store, seeds=2))
    assert not any(_races("", "mov.u32 %r1, 5;" + store, seeds=2))


def test_values_that_differ_in_what_is_not_stored_are_the_same():
    assert not any(_races("", "cvt.u16.u32 %h1, %r1; shl.b16 %h1, %h1, 8; st.shared.u8 [%r20], %h1;", seeds=1))


@pytest.mark.parametrize(
    "write", ["st.global.u32 [%d2], 1;", "atom.global.add.u32 %r5, [%d2], 1;", "st.global.u8 [%d2], %h1;"]
)
def test_constant_loads_of_what_the_kernel_wrote(write):
    read = "and.b32 %r3, %r1, 31; mul.wide.u32 %d2, %r3, 4; add.u64 %d2, %d2, %d1; ld.global{}.u32 %r5, [%d2];"
    wait = "bar.sync 0;"
    races = _races("", write + wait, wait + read.format(".nc"))
    assert all("constant memory (.nc)" in text for text in races)
    assert not any(_races("", write + wait, wait + read.format("")))
    assert not any(_races("", write + wait, wait + read.format(".nc").replace("[%d2]", "[%d2+128]")))


# ---- scopes ----

_FLAG = """
    mov.u32 %r3, %ctaid.x; setp.eq.u32 %p4, %r3, 0; @!%p10 bra E; @!%p4 bra C;
    st.global.u32 [%d1+4], 1; st.release.{release}.global.u32 [%d1], 1; bra E;
    C: ld.acquire.{acquire}.global.u32 %r5, [%d1]; setp.ne.u32 %p6, %r5, 1; @%p6 bra C; ld.global.u32 %r6, [%d1+4];
    E:
"""


@pytest.mark.parametrize("release, acquire", [("cta", "gpu"), ("gpu", "cta"), ("cta", "cta"), ("gpu", "gpu")])
def test_the_scope_of_a_cta_does_not_reach_another_one(release, acquire):
    races = _races(_FLAG.format(release=release, acquire=acquire), threads=32, grid=2, resident=2)
    assert all(("acquires" in text) == ("cta" in (release, acquire)) for text in races)
    assert all(bool(text) == ("cta" in (release, acquire)) for text in races)


def test_the_scope_of_a_cta_is_enough_within_it():
    start = "@%p10 st.shared.u32 [%r20], 0; bar.sync 0;"
    release = "@%p10 st.shared.u32 [%r20+4], 1; bar.warp.sync -1; @%p10 st.release.cta.shared.u32 [%r20], 1;"
    acquire = (
        "L: ld.acquire.cta.shared.u32 %r5, [%r20]; setp.eq.u32 %p1, %r5, 0; @%p1 bra L; ld.shared.u32 %r6, [%r20+4];"
    )
    assert not any(_races(start, release, acquire))


# ---- barriers used again ----


def test_who_waits_learns_what_its_own_use_of_a_barrier_released():
    """Barrier 1 serves warps 0 and 1, then 2 and 3; warp 0 may wake only when both are over."""
    races = _races(
        "@%p10 st.shared.u32 [%r20+4], 0; bar.sync 3, 128;",
        "bar.sync 1, 64; ld.shared.u32 %r5, [%r20]; ld.shared.u32 %r6, [%r20+4];",
        "@%p0 st.shared.u32 [%r20], 5; bar.sync 1, 64; bar.sync 2, 96;",
        "bar.sync 2, 96; st.shared.u32 [%r20+4], 1; bar.sync 1, 64;",
        "bar.sync 2, 96; bar.sync 1, 64; ld.shared.u32 %r5, [%r20+4];",
        seeds=24,
    )
    # Warp 0 reads what warp 2 writes without order, and what warp 1 has written in order.
    assert all("warp 0" in text and "warp 2" in text and "warp 1" not in text for text in races)


def test_votes_are_kept_for_those_who_wait():
    start = "mov.u32 %r9, 0;"
    loop = """
    L{0}: barrier.cta.red.popc.aligned.u32 %r5, 1, 64, %p0; add.u32 %r9, %r9, 1;
    setp.lt.u32 %p11, %r9, 6; @%p11 bra L{0};
    {1}
    """
    late = "barrier.cta.red.popc.aligned.u32 %r5, 2, 64, %p0;"
    assert not any(_races(start, late, loop.format(1, late), loop.format(2, ""), seeds=12))


# ---- lanes that parted ----

_PARTED = """
    @%p10 mbarrier.init.shared.b64 [%r20+32], 1; @%p10 st.shared.u32 [%r20], 3; bar.sync 0;
"""
_ARRIVE = "mbarrier.arrive.shared.b64 %d5, [%r20+32];"
_READ = "ld.shared.u32 %r5, [%r20];"


@pytest.mark.parametrize(
    "reader",
    [
        f"@%p10 bra A; {_READ} bra J; A: {_ARRIVE} J:",
        f"@!%p10 bra A; {_ARRIVE} bra J; A: {_READ} J:",
    ],
    ids=["read first", "arrive first"],
)
def test_either_side_of_a_branch_may_run_first(reader):
    """Lane 0 arrives for its warp while the other lanes have yet to read, or has not arrived when they do."""
    writer = "W: mbarrier.try_wait.parity.shared.b64 %p11, [%r20+32], 0; @!%p11 bra W; st.shared.u32 [%r20], 9;"
    races = _races(_PARTED, reader, writer, seeds=40)
    assert any(races) and not all(races)
