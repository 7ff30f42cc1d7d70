import numpy as np
import pytest

from cuda.emulator import Output, emulate
from cuda.emulator.errors import MemoryFaultError, UnsupportedInstructionError
from tests.emulator.kernels.case import entry

_LANES = np.arange(32)


def _run(parameters, body, arguments, **options):
    return emulate(entry(parameters, body), arguments, 1, block=options.pop("block", 32), **options)


def test_narrow_values_are_extended_by_their_type():
    values = np.arange(-16, 16, dtype=np.int8)
    body = """
cvt.u64.u32 %d1, %r0;
add.u64 %d2, %a, %d1;
ld.global.s8 %r10, [%d2];
ld.global.u8 %r11, [%d2];
ld.global.s8 %h1, [%d2];
ld.global.s8 %d5, [%d2];
cvt.s32.s16 %r12, %h1;
shr.s64 %d5, %d5, 8;
cvt.u32.u64 %r13, %d5;
mul.wide.u32 %d1, %r0, 16;
add.u64 %d2, %out, %d1;
st.global.v4.b32 [%d2], {%r10, %r11, %r12, %r13};
"""
    result = _run({"a": "pointer", "out": "pointer"}, body, [values, Output(np.zeros((32, 4), np.int32))])
    wide = values.astype(np.int32)
    expected = np.stack([wide, values.view(np.uint8), wide, np.where(wide < 0, -1, 0)], -1)
    np.testing.assert_array_equal(result.arrays[0][1], expected)


def test_vectors_through_shared_memory_and_generic_addresses():
    body = """
mul.wide.u32 %d1, %r0, 32;
add.u64 %d2, %a, %d1;
ld.global.v8.b32 {%r10, %r11, %r12, %r13, %r14, %r15, %r16, %r17}, [%d2];
shl.b32 %r20, %r0, 5;
add.u32 %r20, %r1, %r20;
st.shared.v4.b32 [%r20], {%r17, %r16, %r15, %r14};
cvt.u64.u32 %d3, %r20;
st.v2.b64 [%d3+16], {0, -1};
ld.v4.b32 {%r10, _, %r12, %r13}, [%d3];
ld.shared.v2.b64 {%d5, %d6}, [%r20+16];
add.u64 %d2, %out, %d1;
st.v4.b32 [%d2], {%r10, %r11, %r12, %r13};
st.global.v2.b64 [%d2+16], {%d5, %d6};
"""
    values = np.random.default_rng(0).integers(0, 2**32, (32, 8), np.uint32)
    parameters = {"a": "pointer", "out": "pointer"}
    result = _run(parameters, body, [values, Output(np.zeros_like(values))], shared_bytes=1024)
    expected = values[:, [7, 1, 5, 4, 0, 0, 0, 0]]
    expected[:, 4:6], expected[:, 6:] = 0, 0xFFFFFFFF
    np.testing.assert_array_equal(result.arrays[0][1], expected)


def test_one_generic_load_reads_several_spaces():
    body = """
shl.b32 %r10, %r0, 2;
add.u32 %r11, %r1, %r10;
add.u32 %r12, %r0, 1000;
st.shared.b32 [%r11], %r12;
bar.warp.sync 0xffffffff;
cvt.u64.u32 %d1, %r10;
add.u64 %d2, %a, %d1;
add.u64 %d4, %b, %d1;
cvt.u64.u32 %d3, %r11;
and.b32 %r13, %r0, 3;
setp.eq.u32 %p1, %r13, 1;
setp.eq.u32 %p2, %r13, 2;
selp.b64 %d2, %d3, %d2, %p1;
selp.b64 %d2, %d4, %d2, %p2;
ld.b32 %r14, [%d2];
add.u64 %d2, %out, %d1;
st.global.b32 [%d2], %r14;
"""
    a, b = np.arange(32, dtype=np.uint32), np.arange(500, 532, dtype=np.uint32)
    parameters = {"a": "pointer", "b": "pointer", "out": "pointer"}
    result = _run(parameters, body, [a, b, Output(np.zeros(32, np.uint32))], shared_bytes=128)
    np.testing.assert_array_equal(result.arrays[0][2], np.choose(_LANES % 4, [a, _LANES + 1000, b, a]))


def test_parameters_by_name_and_by_address():
    body = """
ld.param.b8 %r10, [n+1];
ld.param.s16 %r11, [n];
mov.b64 %d1, n;
cvta.param.u64 %d2, %d1;
ld.b32 %r12, [%d2];
ld.param.b32 %r13, [%d1];
st.global.v4.b32 [%out], {%r10, %r11, %r12, %r13};
"""
    result = _run({"out": "pointer", "n": "s32"}, body, [Output(np.zeros(4, np.uint32)), 0x1234FEDC])
    assert result.arrays[0][0].tolist() == [0xFE, 0xFFFFFEDC, 0x1234FEDC, 0x1234FEDC]


def test_of_lanes_that_store_to_one_address_the_highest_wins():
    body = "setp.lt.u32 %p1, %r0, 21;\n@%p1 st.global.b32 [%out], %r0;"
    assert _run({"out": "pointer"}, body, [np.zeros(1, np.uint32)]).arrays[0][0] == 20


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("ld.shared.v4.b32 {%r10, %r11, %r12, %r13}, [%r1+8];", "16 bytes is misaligned"),
        ("ld.global.b64 %d1, [%out+4];", "8 bytes is misaligned"),
        ("ld.global.v2.b32 {%r10, %r11}, [%out+4];", "8 bytes is misaligned"),
        ("ld.shared.b32 %r10, [%r1];", "never written"),
        ("ld.shared.b32 %r10, [%r1+64];", "which has 64"),
        ("st.shared.b32 [%r1+-4], 0;", "which has 64"),
        ("ld.global.b32 %r10, [%out+64];", "has 64"),
        ("mov.b64 %d1, 0;\nld.b32 %r10, [%d1];", "shared bytes"),
        ("mov.b64 %d1, 0x800000000;\nld.b32 %r10, [%d1];", "in no buffer"),
        ("mov.b64 %d1, out;\nst.b32 [%d1], 0;", "writes to the parameters"),
        ("ld.param.b32 %r10, [out+8];", "behind the parameters"),
        ("add.u32 %r10, %r1, 0x1000000;\nst.shared::cluster.b32 [%r10], 0;", "CTA rank 1 of 1"),
    ],
)
def test_faults(body, message):
    with pytest.raises(MemoryFaultError, match=message) as caught:
        _run({"out": "pointer"}, body, [np.zeros(16, np.uint32)], shared_bytes=64)
    assert "line " in str(caught.value)


def test_a_shared_cta_access_does_not_reach_another_cta():
    body = """
mov.u32 %r10, %cluster_ctarank;
xor.b32 %r10, %r10, 1;
mapa.shared::cluster.u32 %r11, %r1, %r10;
st.shared.b32 [%r11], 0;
"""
    with pytest.raises(MemoryFaultError, match="without ::cluster"):
        emulate(entry({}, body), [], 2, block=32, cluster=2, shared_bytes=64)


@pytest.mark.parametrize(
    "instruction", ["ld.const.b32 %r10, [%r1];", "ld.shared.b128 %r10, [%r1];", "ld.shared.wide.b32 %r10, [%r1];"]
)
def test_unknown_forms(instruction):
    with pytest.raises(UnsupportedInstructionError, match="is not supported"):
        _run({}, instruction, [])
