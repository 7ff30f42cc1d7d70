"""tcgen05.commit, .wait and .fence."""

from __future__ import annotations

import numpy as np
import pytest

from cuda.emulator.errors import BarrierFaultError, MemoryFaultError, UnsupportedInstructionError
from cuda.emulator.machine.barriers import MBarrier
from tests.emulator.instructions.bench import START, Bench, run_handler

_COMMIT = "tcgen05.commit.cta_group::{}.mbarrier::arrive::one.shared::cluster.b64 [%r1];"
_MULTICAST = "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%r1], %h1;"


def _barriers(bench: Bench, count: int) -> list[MBarrier]:
    found = []
    for cta in bench.ctas:
        found.append(MBarrier(f"mbarrier {cta.rank}", count, cta.warps[0].actor, bench.monitor))
        cta.shared.place_barrier(START, found[-1])
        if bench.monitor is not None:
            bench.monitor.publish(cta.warps[0].actor)
    return found


def test_an_arrival_in_any_cta_of_the_cluster() -> None:
    bench = Bench(2)
    barriers = _barriers(bench, 2)
    bench.one(_COMMIT.format(1), 1 << 24 | START)
    assert [b.pending for b in barriers] == [2, 1]


@pytest.mark.parametrize(("mask", "pending"), [(0b0011, [1, 1, 2, 2]), (0b1010, [2, 1, 2, 1])])
def test_arrivals_at_the_same_place_of_several_ctas(mask: int, pending: list[int]) -> None:
    bench = Bench(4)
    barriers = _barriers(bench, 2)
    bench.one(_MULTICAST, 2 << 24 | START, mask, cta=2)
    assert [b.pending for b in barriers] == pending


def test_a_cta_that_is_not_in_the_cluster() -> None:
    bench = Bench(2)
    _barriers(bench, 1)
    with pytest.raises(MemoryFaultError, match="CTA rank 3"):
        bench.one(_MULTICAST, START, 0b1000)


def test_no_barrier_there() -> None:
    with pytest.raises(BarrierFaultError, match="no mbarrier was initialised"):
        Bench().one(_COMMIT.format(1), START)


def test_a_whole_warp_that_commits() -> None:
    bench = Bench()
    (barrier,) = _barriers(bench, 40)
    bench.run(_COMMIT.format(1), START)
    assert barrier.pending == 8
    assert [kind for kind, _ in bench.findings] == ["issue"]


def test_a_commit_covers_the_products_before_it() -> None:
    bench = Bench(races=True)
    (barrier,) = _barriers(bench, 1)
    tensor = bench.ctas[0].tensor
    bench.fill_tensor(0, np.zeros((8, 128), np.uint32))
    bench.one("tcgen05.shift.cta_group::1.down [%r1];", 0)
    bench.one(_COMMIT.format(1), START)
    reader = bench.ctas[0].warps[1]
    text = "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r1}, [%r2];"
    bench.run(text, 0)
    assert {kind for kind, _ in bench.findings} == {"race"}
    bench.findings.clear()
    bench.monitor.acquire(barrier, reader.actor)
    bench.run(text, 32 << 16, warp=1)
    assert not bench.findings
    assert tensor.written[:8].all()


@pytest.mark.parametrize("text", ["tcgen05.fence::before_thread_sync;", "tcgen05.fence::after_thread_sync;"])
def test_fences_do_nothing(text: str) -> None:
    assert Bench().run(text) is None


@pytest.mark.parametrize(
    "text", ["tcgen05.commit.cta_group::1.b64 [%r1];", "tcgen05.commit.mbarrier::arrive::one.b64 [%r1];"]
)
def test_unsupported_forms(text: str) -> None:
    with pytest.raises(UnsupportedInstructionError):
        run_handler(text)
