"""Whole programs with tensor memory: allocation, order, and what is reported when a step is missing."""

from __future__ import annotations

import numpy as np
import pytest

from cuda.emulator.errors import DeadlockError, EmulationError, MemoryFaultError, UnsupportedInstructionError
from cuda.emulator.front import Output, Result, emulate
from tests.emulator.tensor_core import layouts
from tests.emulator.text import module, store_words

_COLUMNS = 64
_THREADS = 128
_IMAGE = 8192  # bytes of shared memory with operands, at the start of `buffer`
_BARRIER, _ADDRESS = _IMAGE, _IMAGE + 8

# %r1: thread, %r2: warp, %r3: shared buffer, %r4: mbarrier, %r5: tensor memory with the lanes of the warp.
_START = f"""
    mov.u32 %r1, %tid.x;
    shr.u32 %r2, %r1, 5;
    mov.u32 %r3, buffer;
    add.u32 %r4, %r3, {_BARRIER};
    setp.eq.u32 %p1, %r1, 0;
    setp.ne.u32 %p2, %r2, 0;
"""
_ALLOCATE = f"""
    @%p2 bra ALLOCATED;
    add.u32 %r6, %r3, {_ADDRESS};
    tcgen05.alloc.cta_group::GROUP.sync.aligned.shared::cta.b32 [%r6], {_COLUMNS};
    tcgen05.relinquish_alloc_permit.cta_group::GROUP.sync.aligned;
ALLOCATED:
"""
_FIND = f"""
    tcgen05.fence::after_thread_sync;
    ld.shared.b32 %r7, [%r3+{_ADDRESS}];
    shl.b32 %r5, %r2, 21;
    add.u32 %r5, %r5, %r7;
"""
_FREE = f"""
    tcgen05.fence::before_thread_sync;
    SYNC
    @%p2 bra FREED;
    tcgen05.dealloc.cta_group::GROUP.sync.aligned.b32 %r7, {_COLUMNS};
FREED:
"""


def _program(body: str, parameters: str, group: int = 1, *, target: str = "sm_100a") -> str:
    sync = "bar.sync 0;" if group == 1 else "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
    text = (_START + body).replace("SYNC", sync).replace("GROUP", str(group))
    return module(text, parameters, target=target, shared=_IMAGE + 16, threads=_THREADS)


_ROUND_TRIP = (
    _ALLOCATE
    + """
    bar.sync 0;
"""
    + _FIND
    + """
    mul.lo.u32 %r10, %r1, 3;
    add.u32 %r11, %r10, 1;
    tcgen05.st.sync.aligned.32x32b.x2.b32 [%r5+6], {%r10, %r11};
    tcgen05.wait::st.sync.aligned;
    tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r12, %r13}, [%r5+6];
    tcgen05.wait::ld.sync.aligned;
"""
    + store_words(["%r12", "%r13"])
    + _FREE
)


def _run(ptx: str, arguments: list, **options) -> Result:
    return emulate(ptx, arguments, grid=options.pop("grid", 1), seeds=range(3), **options)


def test_store_and_load() -> None:
    result = _run(_program(_ROUND_TRIP, "p"), [Output(np.zeros((2, _THREADS), np.uint32))])
    assert not result.findings
    for (words,) in result.arrays:
        np.testing.assert_array_equal(words, 3 * np.arange(_THREADS) + [[0], [1]])


_REDUCING = _ROUND_TRIP.replace(
    "tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r12, %r13}, [%r5+6];",
    "tcgen05.ld.red.sync.aligned.32x32b.x2.max.NaN.f32 {%r12, %r13}, %r14, [%r5+6];",
).replace(store_words(["%r12", "%r13"]), store_words(["%r12", "%r13", "%r14"]))


@pytest.mark.parametrize("target", ["sm_103a", "sm_103f"])
def test_a_load_with_the_maximum(target: str) -> None:
    result = _run(_program(_REDUCING, "p", target=target), [Output(np.zeros((3, _THREADS), np.uint32))])
    assert not result.findings
    for (words,) in result.arrays:
        np.testing.assert_array_equal(words, 3 * np.arange(_THREADS) + [[0], [1], [1]])


@pytest.mark.parametrize("target", ["sm_100a", "sm_100f"])
def test_targets_without_loads_with_the_maximum(target: str) -> None:
    with pytest.raises(UnsupportedInstructionError, match=rf"line \d+.*{target} has no tcgen05\.ld\.red"):
        _run(_program(_REDUCING, "p", target=target), [Output(np.zeros((3, _THREADS), np.uint32))])


def test_a_maximum_of_columns_that_were_never_written() -> None:
    ptx = _program(
        _REDUCING.replace("[%r5+6];\n    tcgen05.wait::ld", "[%r5+7];\n    tcgen05.wait::ld"), "p", target="sm_103a"
    )
    with pytest.raises(MemoryFaultError, match="never written"):
        _run(ptx, [Output(np.zeros((3, _THREADS), np.uint32))])


def test_a_store_takes_effect_at_its_wait() -> None:
    ptx = _program(_ROUND_TRIP.replace("tcgen05.wait::st.sync.aligned;", ""), "p")
    with pytest.raises(MemoryFaultError, match="never written"):
        _run(ptx, [Output(np.zeros((2, _THREADS), np.uint32))])


def test_columns_that_are_not_freed() -> None:
    ptx = _program(_ROUND_TRIP.replace("tcgen05.dealloc", "// "), "p")
    result = _run(ptx, [Output(np.zeros((2, _THREADS), np.uint32))])
    assert result.of_kind("leak")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (f"[%r6], {_COLUMNS}", "[%r6], 48", "48 columns are no power of two"),
        (f"%r7, {_COLUMNS}", "%r7, 32", "32 columns at 0 are no allocation"),
        ("[%r5+6]", "[%r5+63]", "not all allocated"),
    ],
)
def test_misuse_of_columns(old: str, new: str, message: str) -> None:
    ptx = _program(_ROUND_TRIP, "p").replace(old, new)
    with pytest.raises(MemoryFaultError, match=message):
        _run(ptx, [Output(np.zeros((2, _THREADS), np.uint32))])


def test_freeing_what_loads_may_still_read() -> None:
    uses = store_words(["%r12", "%r13"])
    body = _ROUND_TRIP.replace("tcgen05.wait::ld.sync.aligned;", "").replace(uses + _FREE, _FREE + uses)
    result = _run(_program(body, "p"), [Output(np.zeros((2, _THREADS), np.uint32))])
    assert any("dealloc" in finding.text for finding in result.of_kind("race"))


def test_an_allocation_waits_for_columns() -> None:
    body = f"""
    add.u32 %r6, %r3, {_ADDRESS};
    add.u32 %r8, %r3, {_ADDRESS + 4};
    setp.gt.u32 %p3, %r2, 1;
    @%p3 bra DONE;
    @%p2 bra SECOND;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r6], 512;
    ld.shared.b32 %r7, [%r6];
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r7, 512;
    bra DONE;
SECOND:
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r8], 512;
    ld.shared.b32 %r7, [%r8];
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r7, 512;
DONE:
"""
    assert not _run(_program(body, ""), []).findings
    never_freed = body.replace("tcgen05.dealloc", "// ")
    with pytest.raises(DeadlockError, match="512 free columns of tensor memory"):
        _run(_program(never_freed, ""), [])


# ---- products ----

_COPY_IMAGE = f"""
    ld.param.u64 %d1, [a0];
    mov.u32 %r8, %ctaid.x;
    mul.wide.u32 %d2, %r8, {_IMAGE};
    add.s64 %d1, %d1, %d2;
    mul.wide.u32 %d2, %r1, 16;
    add.s64 %d1, %d1, %d2;
    shl.b32 %r9, %r1, 4;
    add.u32 %r9, %r9, %r3;
    mov.u32 %r10, 0;
COPY:
    ld.global.v4.b32 {{%r11, %r12, %r13, %r14}}, [%d1];
    st.shared.v4.b32 [%r9], {{%r11, %r12, %r13, %r14}};
    add.s64 %d1, %d1, {16 * _THREADS};
    add.u32 %r9, %r9, {16 * _THREADS};
    add.u32 %r10, %r10, {16 * _THREADS};
    setp.lt.u32 %p3, %r10, {_IMAGE};
    @%p3 bra COPY;
    fence.proxy.async.shared::cta;
    @%p1 mbarrier.init.shared.b64 [%r4], 1;
    @%p1 fence.mbarrier_init.release.cluster;
"""
_WAIT = """
WAITING:
    mbarrier.try_wait.parity.shared.b64 %p4, [%r4], 0;
    @!%p4 bra WAITING;
    tcgen05.fence::after_thread_sync;
"""
_LOAD = """
    tcgen05.ld.sync.aligned.32x32b.x16.b32 {%r100, %r101, %r102, %r103, %r104, %r105, %r106, %r107,
        %r108, %r109, %r110, %r111, %r112, %r113, %r114, %r115}, [%r5];
    tcgen05.wait::ld.sync.aligned;
"""
_SUMS = [f"%r{i}" for i in range(100, 116)]


def _descriptor_lines(register: str, offset: int) -> str:
    """The matrix descriptor of an unswizzled operand at an offset of the buffer."""
    constant = layouts.matrix_descriptor("none", 0, 128, 256)
    return f"""
    add.u32 %r15, %r3, {offset};
    shr.u32 %r15, %r15, 4;
    cvt.u64.u32 {register}, %r15;
    or.b64 {register}, {register}, {constant};
"""


def _product(second: str = "", group: int = 1) -> str:
    """D = A B of 128 rows a CTA, 16 columns and 16 elements of K in bfloat16, with D in columns 0 to 15."""
    bits = layouts.instruction_descriptor(128 * group, 16, 1, 1)
    multicast = "" if group == 1 else ".multicast::cluster"
    mask = "" if group == 1 else ", 3"
    leader = "@!%p1 bra ISSUED;"
    if group == 2:
        leader += " setp.ne.u32 %p5, %r8, 0; @%p5 bra ISSUED;"
    mma = "tcgen05.mma.cta_group::GROUP.kind::f16 [%r7], %d10, %d11, %r16, %p6;"
    commit = f"tcgen05.commit.cta_group::GROUP.mbarrier::arrive::one.shared::cluster{multicast}.b64 [%r4]{mask};"
    return (
        _COPY_IMAGE
        + _ALLOCATE
        + "SYNC"
        + _FIND
        + leader
        + _descriptor_lines("%d10", 0)
        + _descriptor_lines("%d11", 4096)
        + f"""
    mov.u32 %r16, {bits};
    setp.ne.u32 %p6, %r1, %r1;
    {mma}
    {commit}
ISSUED:
"""
        + _WAIT
        + _LOAD
        + second.replace("MMA", mma)
        + store_words(_SUMS, "a1")
        + _FREE
    )


def _images(rng, ctas: int) -> tuple[np.ndarray, np.ndarray]:
    """Shared memory of each CTA: A at 0, B at 4096; and the product."""
    a, b = (layouts.random_codes(rng, (rows, 16), "bf16") for rows in (128 * ctas, 16))
    images = np.zeros((ctas, _IMAGE), np.uint8)
    for cta in range(ctas):
        own = b[16 // ctas * cta : 16 // ctas * (cta + 1)]
        for rows, start in ((a[128 * cta : 128 * cta + 128], 0), (own, 4096)):
            images[cta][layouts.k_major(len(rows), 32, "none", start, 128, 256)] = layouts.packed(rows, "bf16")
    return images, (layouts.decoded(a, "bf16") @ layouts.decoded(b, "bf16").T).astype(np.float32)


def _run_product(body: str) -> tuple[Result, np.ndarray]:
    images, product = _images(np.random.default_rng(40), 1)
    return _run(_program(body, "pp"), [images, Output(np.zeros((16, _THREADS), np.float32))]), product


def test_a_product() -> None:
    result, product = _run_product(_product())
    assert not result.findings
    for _, sums in result.arrays:
        np.testing.assert_array_equal(sums.T, product)


def test_operands_without_a_proxy_fence() -> None:
    result, _ = _run_product(_product().replace("fence.proxy.async.shared::cta;", ""))
    assert result.of_kind("proxy")


@pytest.mark.parametrize("seed", range(8))
def test_results_without_a_wait(seed: int) -> None:
    """In every order: they are read before the product is there, or in no order with it."""
    ptx = _program(_product().replace(_WAIT, "tcgen05.fence::after_thread_sync;"), "pp")
    images, _ = _images(np.random.default_rng(40), 1)
    arguments = [images, Output(np.zeros((16, _THREADS), np.float32))]
    try:
        races = [finding.text for finding in emulate(ptx, arguments, grid=1, seeds=[seed]).of_kind("race")]
    except MemoryFaultError as fault:
        assert "never written" in str(fault)
    else:
        assert any("read of tensor memory" in text and "tcgen05.mma" in text for text in races)


def test_a_commit_that_is_missing() -> None:
    images, _ = _images(np.random.default_rng(40), 1)
    ptx = _program(_product(), "pp").replace("tcgen05.commit", "// ")
    with pytest.raises(DeadlockError):
        _run(ptx, [images, Output(np.zeros((16, _THREADS), np.float32))])


_AGAIN = """
    bar.sync 0;
    @!%p1 bra AGAIN;
    MMA
AGAIN:
    bar.sync 0;
"""
# The second product has to end before its columns are freed.
_AGAIN_WAIT = """
    @%p1 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r4];
LATER:
    mbarrier.try_wait.parity.shared.b64 %p4, [%r4], 1;
    @!%p4 bra LATER;
"""


@pytest.mark.parametrize("waits", [True, False])
def test_accumulators_are_read_until_wait_ld(waits: bool) -> None:
    body = _product(_AGAIN + _AGAIN_WAIT)
    result, product = _run_product(body if waits else body.replace("tcgen05.wait::ld.sync.aligned;", ""))
    races = [finding.text for finding in result.of_kind("race")]
    assert any("tcgen05.ld of warp" in text for text in races) != waits
    if waits:
        assert not result.findings
        np.testing.assert_array_equal(result.arrays[0][1].T, product)


def test_a_product_of_two_ctas() -> None:
    images, product = _images(np.random.default_rng(41), 2)
    output = "ld.param.u64 %d60, [a1];"
    of_the_cta = f"{output} mul.wide.u32 %d59, %r8, {64 * _THREADS}; add.s64 %d60, %d60, %d59;"
    ptx = _program(_product(group=2).replace(output, of_the_cta), "pp", group=2)
    result = _run(ptx, [images, Output(np.zeros((2, 16, _THREADS), np.float32))], grid=2, cluster=2)
    assert not result.findings
    for _, sums in result.arrays:
        np.testing.assert_array_equal(sums.transpose(0, 2, 1).reshape(256, 16), product)


def test_ctas_of_a_pair_that_allocate_differently() -> None:
    body = _ALLOCATE.replace(f"[%r6], {_COLUMNS}", "[%r6], %r20") + "SYNC" + _FIND
    start = "mov.u32 %r20, %ctaid.x;\n add.u32 %r20, %r20, 1;\n shl.b32 %r20, %r20, 5;"
    with pytest.raises(EmulationError, match="the other CTA"):
        _run(_program(start + body, "", group=2), [], grid=2, cluster=2)
