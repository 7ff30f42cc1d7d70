import numpy as np
import pytest

from cuda.emulator import Output, emulate
from cuda.emulator.errors import EmulationError, MemoryFaultError, UnsupportedInstructionError
from tests.emulator.kernels.case import entry


def _run(body, arguments=(), parameters=None, **options):
    return emulate(entry(parameters or {}, body), list(arguments), 1, **({"block": 32} | options))


def test_a_trap_ends_the_launch():
    body = "setp.eq.u32 %p1, %r0, 40;\n@%p1 trap;"
    _run(body)
    with pytest.raises(EmulationError, match=r"warp 1 of CTA .* executed trap"):
        _run(body, block=64)


@pytest.mark.parametrize("count", [16, 100, 264])
def test_register_counts_that_cannot_be(count):
    with pytest.raises(EmulationError, match="a multiple of 8 from 24 to 256"):
        _run(f"setmaxnreg.dec.sync.aligned.u32 {count};")


def test_what_has_no_effect():
    body = """
setmaxnreg.inc.sync.aligned.u32 232;
griddepcontrol.wait;
griddepcontrol.launch_dependents;
nanosleep.u32 20;
prefetch.global.L2 [%out];
createpolicy.fractional.L2::evict_first.b64 %d1, 1.0;
fence.sc.gpu;
fence.acq_rel.sys;
membar.cta;
fence.proxy.async;
fence.proxy.async.shared::cta;
fence.proxy.alias;
fence.mbarrier_init.release.cluster;
fence.acquire.sync_restrict::shared::cluster.cluster;
applypriority.global.L2::evict_normal [%out], 128;
ld.global.L1::no_allocate.L2::cache_hint.L2::256B.b32 %r10, [%out], %d1;
st.global.L2::cache_hint.b32 [%out+4], %r10, %d1;
"""
    result = _run(body, [np.array([9, 0], np.uint32)], {"out": "pointer"})
    assert result.arrays[0][0].tolist() == [9, 9]
    assert not result.findings


def test_discarded_bytes_are_undefined():
    body = "discard.global.L2 [%a], 128;\nld.global.b32 %r10, [%a+{}];"
    arguments, parameters = [np.zeros(64, np.uint32)], {"a": "pointer"}
    _run(body.format(128), arguments, parameters)
    with pytest.raises(MemoryFaultError, match="never written"):
        _run(body.format(124), arguments, parameters)


def test_unknown_fences():
    with pytest.raises(UnsupportedInstructionError):
        _run("fence.proxy.async::generic.acquire.sync_restrict::shared::cluster.cluster;")


@pytest.mark.parametrize(
    ("fence", "kinds"),
    [
        ("fence.proxy.async;\nbar.sync 0;", set()),
        ("fence.proxy.async.shared::cta;\nbar.sync 0;", set()),
        ("bar.sync 0;\nfence.proxy.async;", set()),
        ("bar.sync 0;", {"proxy"}),
        ("fence.acq_rel.cta;\nbar.sync 0;", {"proxy"}),
        ("fence.proxy.async;", {"race"}),
    ],
)
def test_a_bulk_copy_reads_what_two_warps_wrote(fence, kinds):
    body = f"""
shl.b32 %r10, %r0, 2;
add.u32 %r11, %r1, %r10;
st.shared.b32 [%r11], 0;
bar.sync 0;
st.shared.b32 [%r11], %r0;
{fence}
setp.ne.u32 %p1, %r0, 0;
@%p1 bra DONE;
cp.async.bulk.global.shared::cta.bulk_group [%out], [%r1], 256;
cp.async.bulk.commit_group;
cp.async.bulk.wait_group 0;
DONE:
"""
    found = set()
    for seed in range(4):
        result = _run(
            body, [Output(np.zeros(64, np.uint32))], {"out": "pointer"}, block=64, shared_bytes=256, seeds=[seed]
        )
        found |= {finding.kind for finding in result.findings}
        if not kinds:
            np.testing.assert_array_equal(result.arrays[0][0], np.arange(64))
    assert kinds <= found and (kinds or not found)


# Warp 0 of CTA 0 writes a word and then a flag; CTA 1 waits for the flag and reads the word.
_MESSAGE = """
mov.u32 %r2, %ctaid.x;
setp.ne.u32 %p1, %r2, 0;
@%p1 bra RECEIVE;
st.global.b32 [%data], 42;
{release}
ret;
RECEIVE:
mov.u32 %r4, 0;
LOOP:
add.u32 %r4, %r4, 1;
setp.gt.u32 %p3, %r4, 20000;
@%p3 trap;
{acquire}
setp.eq.u32 %p2, %r3, 0;
@%p2 bra LOOP;
{behind}
ld.global.b32 %r5, [%data];
st.global.b32 [%out], %r5;
"""
_FENCE = "fence.acq_rel.gpu;"


@pytest.mark.parametrize(
    ("release", "acquire", "behind", "races"),
    [
        ("st.release.gpu.global.b32 [%flag], 1;", "ld.acquire.gpu.global.b32 %r3, [%flag];", "", False),
        ("st.relaxed.gpu.global.b32 [%flag], 1;", "ld.acquire.gpu.global.b32 %r3, [%flag];", "", True),
        ("st.release.gpu.global.b32 [%flag], 1;", "ld.relaxed.gpu.global.b32 %r3, [%flag];", "", True),
        (_FENCE + "st.relaxed.gpu.global.b32 [%flag], 1;", "ld.relaxed.gpu.global.b32 %r3, [%flag];", _FENCE, False),
        (_FENCE + "st.volatile.global.b32 [%flag], 1;", "ld.volatile.global.b32 %r3, [%flag];", "membar.gl;", False),
        ("red.release.gpu.global.add.u32 [%flag], 1;", "ld.acquire.gpu.global.b32 %r3, [%flag];", "", False),
        ("red.global.add.u32 [%flag], 1;", "ld.acquire.gpu.global.b32 %r3, [%flag];", "", True),
        (_FENCE + "red.global.add.u32 [%flag], 1;", "atom.acquire.gpu.global.add.u32 %r3, [%flag], 0;", "", False),
        ("atom.acq_rel.gpu.exch.b32 %r3, [%flag], 1;", "atom.acquire.sys.global.or.b32 %r3, [%flag], 0;", "", False),
        ("st.global.b32 [%flag], 1;", "ld.acquire.gpu.global.b32 %r3, [%flag];", "", True),
    ],
)  # fmt: skip
def test_messages_in_global_memory(release, acquire, behind, races):
    body = _MESSAGE.format(release=release, acquire=acquire, behind=behind)
    arguments = [np.zeros(1, np.uint32), np.zeros(1, np.uint32), Output(np.zeros(1, np.uint32))]
    result = emulate(
        entry({"data": "pointer", "flag": "pointer", "out": "pointer"}, body), arguments, 2, block=32, resident=2,
        seeds=range(4),
    )  # fmt: skip
    assert bool(result.of_kind("race")) == races
    if not races:
        assert [int(run[2][0]) for run in result.arrays] == [42] * 4


def test_a_release_sequence_carries_what_all_have_released():
    """Three CTAs write and count; the last reads what the others wrote."""
    body = """
mov.u32 %r2, %ctaid.x;
mul.wide.u32 %d1, %r2, 4;
add.u64 %d2, %data, %d1;
setp.eq.u32 %p0, %r0, 0;
@!%p0 ret;
st.global.b32 [%d2], %r2;
{}
setp.ne.u32 %p1, %r3, 2;
@%p1 ret;
ld.global.b32 %r4, [%data];
ld.global.b32 %r5, [%data+4];
ld.global.b32 %r6, [%data+8];
add.u32 %r4, %r4, %r5;
add.u32 %r4, %r4, %r6;
st.global.b32 [%out], %r4;
"""
    parameters = {"data": "pointer", "count": "pointer", "out": "pointer"}
    arguments = [np.zeros(3, np.uint32), np.zeros(1, np.uint32), Output(np.zeros(1, np.uint32))]
    for order, races in (("acq_rel", False), ("release", True), ("acquire", True), ("relaxed", True)):
        text = entry(parameters, body.format(f"atom.{order}.gpu.global.add.u32 %r3, [%count], 1;"))
        result = emulate(text, arguments, 3, block=32, resident=3, seeds=range(4))
        assert bool(result.of_kind("race")) == races, order
