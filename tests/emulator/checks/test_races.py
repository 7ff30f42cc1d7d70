"""Races that the order of the turns must not hide."""

import numpy as np

from cuda.emulator import Result, emulate
from tests.emulator.text import module

# Warp i runs the i-th part; %r1 is the thread, %r8 the address of its word of the buffer at %r20.
_START = """
    mov.u32 %r1, %tid.x; mov.u32 %r20, buffer; shl.b32 %r8, %r1, 2; add.u32 %r8, %r8, %r20; shr.u32 %r2, %r1, 5;
    mov.b16 %h1, 7; setp.eq.u32 %p10, %r1, 0; ld.param.u64 %d1, [a0]; mul.wide.u32 %d2, %r1, 4; add.u64 %d2, %d2, %d1;
"""
_DELAY = "mov.u32 %r9, 0; D{0}: add.u32 %r9, %r9, 1; setp.lt.u32 %p11, %r9, 5000; @%p11 bra D{0};"


def _run(common: str, parts: list[str] | None = None, seeds: int = 6, threads: int | None = None, **options) -> Result:
    body = _START + common
    for i, part in enumerate(parts or ()):
        body += f"\nsetp.eq.u32 %p0, %r2, {i}; @!%p0 bra N{i};\n{part}\nN{i}:"
    threads = threads or 32 * len(parts or [""])
    text = module(body, "p", shared=2048, threads=threads)
    options = {"grid": 1, "max_instructions": 200_000} | options
    return emulate(text, [np.zeros(64, np.uint32)], seeds=range(seeds), **options)


def _races(*args, **options) -> list[int]:
    """How many races each seed finds."""
    seeds = options.pop("seeds", 6)
    runs = [_run(*args, seeds=seeds, **options)] if seeds == 1 else None
    if runs is None:
        options.setdefault("seeds", 1)
    return [len(r.of_kind("race")) for r in runs or []]


# ---- operations without an order of their own ----

_BULK_STORE = """
    @!%p10 bra S; cp.async.bulk.global.shared::cta.bulk_group [%d1], [%r20], 256; cp.async.bulk.commit_group;
    cp.async.bulk.wait_group.read 0; S: bar.warp.sync -1;
"""
