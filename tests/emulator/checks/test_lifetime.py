"""What uses the shared memory of a CTA has to be over when the CTA ends."""

import numpy as np
import pytest

from cuda.emulator import Output, Result, emulate
from tests.emulator.text import module

_WORDS = 32

_START = """
    mov.u32 %r1, buffer;
    mov.u32 %r2, %tid.x;
    mad.lo.u32 %r3, %r2, 4, %r1;
    setp.eq.u32 %p1, %r2, 0;
    mov.u32 %r5, %cluster_ctarank;
    setp.ne.u32 %p2, %r5, 0;
"""


def _run(body: str, parameters: str = "", arguments=(), ctas: int = 1) -> Result:
    ptx = module(_START + body, parameters, target="sm_90a", shared=1024)
    return emulate(ptx, list(arguments), ctas, cluster=ctas, seeds=range(4))


_STORE = """
    st.shared.u32 [%r3], %r2;
    fence.proxy.async.shared::cta;
    bar.warp.sync 0xffffffff;
    ld.param.u64 %d1, [a0];
    @%p1 cp.async.bulk.global.shared::cta.bulk_group [%d1], [%r1], 128;
    cp.async.bulk.commit_group;
"""


@pytest.mark.parametrize(
    ("wait", "found"),
    [("", True), ("cp.async.bulk.wait_group.read 1;", True), ("cp.async.bulk.wait_group.read 0;", False)],
)
def test_a_bulk_store_reads_its_source_before_the_end(wait: str, found: bool):
    result = _run(_STORE + wait, "p", [Output(np.zeros(_WORDS, np.uint32))])
    assert {f.kind for f in result.findings} == ({"lifetime"} if found else set())


@pytest.mark.parametrize(("wait", "found"), [("", True), ("cp.async.wait_all;", False)])
def test_a_copy_lands_before_the_end(wait: str, found: bool):
    body = f"""
    ld.param.u64 %d1, [a0];
    mul.wide.u32 %d2, %r2, 4;
    add.s64 %d1, %d1, %d2;
    cp.async.ca.shared.global [%r3], [%d1], 4;
    {wait}"""
    result = _run(body, "p", [np.arange(_WORDS, dtype=np.uint32)])
    assert bool(result.of_kind("lifetime")) == found


# CTA 1 uses the shared memory of CTA 0.
_PEER = """
    mov.u32 %r4, 0;
    mapa.shared::cluster.u32 %r4, %r1, %r4;
    @%p1 mbarrier.init.shared::cta.b64 [%r1+512], 1;
    fence.mbarrier_init.release.cluster;
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    @!%p2 bra USED;
    {use}
USED:
    {end}
"""
_USES = {
    "arrival": "@%p1 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r4+512];",
    "store": "@%p1 st.shared::cluster.u32 [%r4], %r2;",
}
_BOTH_END = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
_WAIT = """
    @%p2 bra END;
WAIT:
    mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p3, [%r1+512], 0;
    @!%p3 bra WAIT;
END:"""


@pytest.mark.parametrize("use", _USES)
def test_another_cta_may_come_too_late(use: str):
    late = _run(_PEER.format(use=_USES[use], end=""), ctas=2)
    (finding,) = late.of_kind("lifetime")
    assert "CTA (0, 0, 0) by warp 0 of CTA (1, 0, 0)" in finding.text
    assert not _run(_PEER.format(use=_USES[use], end=_BOTH_END), ctas=2).findings


def test_an_arrival_that_is_waited_for_is_over():
    assert not _run(_PEER.format(use=_USES["arrival"], end=_WAIT), ctas=2).findings
    store_too = _USES["arrival"] + _USES["store"]
    assert _run(_PEER.format(use=store_too, end=_WAIT), ctas=2).of_kind("lifetime")
