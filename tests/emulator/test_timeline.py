import numpy as np

from cuda.emulator import Output, emulate
from cuda.emulator.timeline import Timeline
from tests.emulator.text import module

BULK = module(
    """
    ld.param.u64 %d1, [a0]; mov.b32 %r2, buffer; mov.u32 %r1, %tid.x; setp.ge.u32 %p1, %r1, 32; @%p1 bra END;
    elect.sync _|%p2, -1; @!%p2 bra WAIT;
    st.shared.b32 [%r2], 7; st.shared.b32 [%r2+4], 7; st.shared.b32 [%r2+8], 7; st.shared.b32 [%r2+12], 7;
    fence.proxy.async.shared::cta;
    cp.async.bulk.global.shared::cta.bulk_group [%d1], [%r2], 16;
    cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
    WAIT: bar.warp.sync -1;
    END: bar.sync 0;
    """,
    "p",
    shared=16,
    threads=64,
)


def test_events_of_warps_and_engines(tmp_path):
    timeline = Timeline()
    result = emulate(BULK, [Output(np.zeros(4, np.uint32))], 1, trace=timeline)
    assert (result.arrays[0][0] == 7).all()
    rows = timeline.rows()
    assert list(rows) == ["warp 0 of CTA (0, 0, 0)", "tma warp 0 of CTA (0, 0, 0)", "warp 1 of CTA (0, 0, 0)"]
    assert all(start >= 0 and length > 0 for bars in rows.values() for start, length, _ in bars)
    assert (
        sum(length for bars in (rows[r] for r in rows if not r.startswith("tma")) for _, length, _ in bars)
        == result.instructions
    )
    timeline.draw(tmp_path / "timeline.png", "a bulk copy")
    assert (tmp_path / "timeline.png").read_bytes()[:4] == b"\x89PNG"


def test_waits_and_what_code_does():
    timeline = Timeline()
    emulate(BULK, [Output(np.zeros(4, np.uint32))], 1, trace=timeline)
    (start, end, _) = max(wait for wait in timeline.waits if wait[2] == "warp 1 of CTA (0, 0, 0)")
    effect = next(end for _, end, who, _ in timeline.events if who.startswith("tma"))
    assert start < effect < end
    colours = {colour for _, _, colour in timeline.rows()["warp 0 of CTA (0, 0, 0)"]}
    (copy,) = {colour for _, _, colour in timeline.rows()["tma warp 0 of CTA (0, 0, 0)"]}
    assert copy in colours
