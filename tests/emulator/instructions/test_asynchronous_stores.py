import numpy as np
import pytest

from cuda.emulator import Output, emulate
from cuda.emulator.errors import BarrierFaultError, MemoryFaultError, UnsupportedInstructionError
from tests.emulator.kernels.case import entry

# Each of two CTAs initialises an mbarrier behind 512 bytes of data, and finds the other CTA's data and mbarrier.
_START = """
mov.u32 %r2, %cluster_ctarank;
xor.b32 %r3, %r2, 1;
mapa.shared::cluster.u32 %r4, %r1, %r3;
setp.eq.u32 %p0, %r0, 0;
@%p0 mbarrier.init.shared::cta.b64 [%r1+512], 1;
fence.mbarrier_init.release.cluster;
@%p0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1+512], {nbytes};
shl.b32 %r10, %r0, 4;
add.u32 %r5, %r1, %r10;
add.u32 %r6, %r4, %r10;
st.shared.v4.b32 [%r5], {{1, 2, 3, 4}};
barrier.cluster.arrive;
barrier.cluster.wait;
mad.lo.u32 %r12, %r2, 100, %r0;
"""
_END = """
{wait}
ld.shared.v4.b32 {{%r20, %r21, %r22, %r23}}, [%r5];
mad.lo.u32 %r14, %r2, 32, %r0;
mul.wide.u32 %d1, %r14, 16;
add.u64 %d1, %out, %d1;
st.global.v4.b32 [%d1], {{%r20, %r21, %r22, %r23}};
barrier.cluster.arrive;
barrier.cluster.wait;
"""
_WAIT = """
WAIT:
mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p1, [%r1+512], 0;
@!%p1 bra WAIT;
"""
_COMPLETION = "shared::cluster.mbarrier::complete_tx::bytes"


def _run(instruction, nbytes, wait=_WAIT):
    text = entry({"out": "pointer"}, _START.format(nbytes=nbytes) + instruction + _END.format(wait=wait))
    outputs = [Output(np.zeros((2, 32, 4), np.uint32))]
    return emulate(text, outputs, 2, block=32, cluster=2, shared_bytes=520, seeds=range(4))


def _passed_on(rank):
    return (100 * (1 - rank) + np.arange(32))[:, None]


def test_a_vector_is_stored_in_the_other_cta():
    result = _run(f"st.async.weak.{_COMPLETION}.v4.b32 [%r6], {{%r12, %r12, 7, %r12}}, [%r4+512];", 512)
    for (out,) in result.arrays:
        for rank in (0, 1):
            expected = np.repeat(_passed_on(rank), 4, 1)
            expected[:, 2] = 7
            np.testing.assert_array_equal(out[rank], expected)
    assert not result.findings


def test_a_reduction_in_the_other_cta():
    result = _run(f"red.async.relaxed.cluster.{_COMPLETION}.add.u32 [%r6+4], %r12, [%r4+512];", 128)
    for (out,) in result.arrays:
        for rank in (0, 1):
            np.testing.assert_array_equal(out[rank], np.array([1, 2, 3, 4]) + np.array([0, 1, 0, 0]) * _passed_on(rank))
    assert not result.findings


def test_without_a_wait_there_is_a_race():
    assert _run(f"st.async.{_COMPLETION}.b32 [%r6], %r12, [%r4+512];", 128, wait="").of_kind("race")


def test_faults():
    with pytest.raises(BarrierFaultError, match="not in the CTA of the destination"):
        _run(f"st.async.{_COMPLETION}.b32 [%r6], %r12, [%r1+512];", 128)
    with pytest.raises(MemoryFaultError, match="8 bytes is misaligned"):
        _run(f"st.async.{_COMPLETION}.v2.b32 [%r6+4], {{%r12, %r12}}, [%r4+512];", 128)
    with pytest.raises(UnsupportedInstructionError, match="exch of b32"):
        _run(f"red.async.{_COMPLETION}.exch.b32 [%r6], %r12, [%r4+512];", 128)
