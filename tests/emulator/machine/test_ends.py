"""How launches and warps end."""

import numpy as np
import pytest

from cuda.emulator import DeadlockError, EmulationError, Output, emulate
from tests.emulator.text import module, store_words

_BARRIER = """
    mov.u32 %r1, buffer;
    mov.u32 %r2, %tid.x;
    setp.eq.u32 %p1, %r2, 0;
    @%p1 mbarrier.init.shared::cta.b64 [%r1], 1;
    bar.warp.sync 0xffffffff;
"""


def test_a_loop_around_try_wait_that_never_ends_is_a_deadlock():
    body = _BARRIER + "WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r1], 0; @!%p2 bra WAIT;"
    with pytest.raises(DeadlockError, match="waits for parity 0"):
        emulate(module(body, target="sm_90a", shared=16), [], 1, seeds=range(8), max_instructions=10_000)


def test_a_loop_around_test_wait_ends_by_the_limit():
    body = _BARRIER + "WAIT: mbarrier.test_wait.parity.shared::cta.b64 %p2, [%r1], 0; @!%p2 bra WAIT;"
    with pytest.raises(EmulationError, match="10000 instructions were run without an end"):
        emulate(module(body, target="sm_90a", shared=16), [], 1, max_instructions=10_000)


# Warps 0 and 4 reach the same lanes of tensor memory.
_TENSOR_MEMORY = """
    mov.u32 %r1, buffer;
    mov.u32 %r2, %tid.x;
    shr.u32 %r3, %r2, 5;
    setp.ne.u32 %p1, %r3, 0;
    @%p1 bra READY;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 32;
    tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
    ld.shared.b32 %r4, [%r1];
    tcgen05.st.sync.aligned.32x32b.x1.b32 [%r4], {{%r2}};
    tcgen05.wait::st.sync.aligned;
    add.u32 %r5, %r2, 100;
    tcgen05.st.sync.aligned.32x32b.x1.b32 [%r4], {{%r5}};
    {wait}
READY:
    bar.sync 0;
    mov.u32 %r6, 0;
    setp.ne.u32 %p2, %r3, 4;
    @%p2 bra LOADED;
    ld.shared.b32 %r4, [%r1];
    tcgen05.ld.sync.aligned.32x32b.x1.b32 {{%r6}}, [%r4];
    tcgen05.wait::ld.sync.aligned;
LOADED:
    bar.sync 0;
    @!%p2 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r4, 32;
"""


@pytest.mark.parametrize("waits", [True, False])
def test_a_store_that_is_never_waited_for_races_with_its_readers(waits: bool):
    body = _TENSOR_MEMORY.format(wait="tcgen05.wait::st.sync.aligned;" if waits else "")
    # The columns are kept until the warp that stored has ended.
    body = body if waits else body.replace("@!%p2 tcgen05.dealloc", "// ")
    ptx = module(body + store_words(["%r6"]), "p", target="sm_100a", shared=16, threads=160)
    result = emulate(ptx, [Output(np.zeros(160, np.uint32))], 1, seeds=range(4))
    np.testing.assert_array_equal(result.arrays[0][0][128:], np.arange(32) + (100 if waits else 0))
    assert bool(result.of_kind("race")) != waits
