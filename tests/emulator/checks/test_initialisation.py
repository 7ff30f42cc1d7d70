"""Who sees that an mbarrier has been initialised, and who may do it."""

import numpy as np
import pytest

from cuda.emulator import Result, emulate
from tests.emulator.text import module

# The barrier at 512 counts the bytes of a copy to the start of the buffer.
_COPY = """
    mov.u32 %r1, buffer;
    mov.u32 %r2, %tid.x;
    setp.eq.u32 %p1, %r2, 0;
    {init}
    {fence}
    bar.sync 0;
    ld.param.u64 %d1, [a0];
    setp.eq.u32 %p2, %r2, 32;
    @%p2 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1+512], 128;
    @%p2 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%d1], 128, [%r1+512];
WAIT:
    mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r1+512], 0;
    @!%p3 bra WAIT;
"""
_INIT = "@%p1 mbarrier.init.shared::cta.b64 [%r1+512], 1;"


def _run(init: str, fence: str) -> Result:
    ptx = module(_COPY.format(init=init, fence=fence), "p", target="sm_90a", shared=1024, threads=64)
    return emulate(ptx, [np.arange(32, dtype=np.uint32)], 1, seeds=range(4))


@pytest.mark.parametrize(
    ("fence", "kinds"),
    [
        ("", {"proxy"}),
        ("fence.mbarrier_init.release.cluster;", set()),
        ("fence.proxy.async.shared::cta;", set()),
        ("fence.acq_rel.cta;", {"proxy"}),
    ],
)
def test_the_asynchronous_proxy_needs_a_fence(fence: str, kinds: set):
    assert {f.kind for f in _run(_INIT, fence).findings} == kinds


def test_a_fence_in_front_of_the_initialisation_is_none():
    assert _run("fence.mbarrier_init.release.cluster;" + _INIT, "").of_kind("proxy")


def test_one_thread_initialises():
    by_a_warp = "setp.lt.u32 %p4, %r2, 32; @%p4 mbarrier.init.shared::cta.b64 [%r1+512], 1;"
    (finding,) = _run(by_a_warp, "fence.mbarrier_init.release.cluster;").findings
    assert finding.kind == "issue" and "32 threads of a warp initialise" in finding.text
