import numpy as np
import pytest

from cuda.emulator import Output, emulate
from cuda.emulator.errors import MemoryFaultError, UnsupportedInstructionError
from tests.emulator.kernels.case import entry


def _run(parameters, body, arguments, **options):
    options = {"block": 32} | options
    return emulate(entry(parameters, body), arguments, 1, **options)


@pytest.mark.parametrize("space", ["global", "shared"])
def test_lanes_are_applied_in_order(space):
    base = "%a" if space == "global" else "%r1"
    body = f"""
st.{space}.b32 [{base}], 5;
bar.warp.sync 0xffffffff;
setp.gt.u32 %p1, %r0, 3;
@%p1 atom.{space}.add.u32 %r10, [{base}], %r0;
@!%p1 mov.b32 %r10, 0;
mul.wide.u32 %d1, %r0, 4;
add.u64 %d1, %out, %d1;
st.global.b32 [%d1], %r10;
"""
    result = _run(
        {"a": "pointer", "out": "pointer"}, body, [np.zeros(1, np.uint32), np.zeros(32, np.uint32)], shared_bytes=4
    )
    lanes = np.arange(4, 32)
    np.testing.assert_array_equal(result.arrays[0][1], [0] * 4 + (5 + np.cumsum(lanes) - lanes).tolist())


def test_a_vector_of_floats_is_added_by_elements():
    body = """
and.b32 %r10, %r0, 1;
mul.wide.u32 %d1, %r10, 16;
add.u64 %d1, %a, %d1;
cvt.rn.f32.u32 %f1, %r0;
red.global.add.v4.f32 [%d1], {%f1, 0f3F800000, %f1, 0fBF800000};
"""
    result = _run({"a": "pointer"}, body, [np.ones((2, 4), np.float32)])
    even, odd = sum(range(0, 32, 2)) + 1, sum(range(1, 32, 2)) + 1
    np.testing.assert_array_equal(result.arrays[0][0], [[even, 17, even, -15], [odd, 17, odd, -15]])


def test_float32_sums_flush_subnormals_in_global_memory_only():
    body = """
mov.b32 %f1, 0x00000003;
setp.eq.u32 %p1, %r0, 0;
@%p1 red.global.add.f32 [%a], %f1;
st.shared.b32 [%r1], 1;
@%p1 red.shared.add.f32 [%r1], %f1;
ld.shared.b32 %r10, [%r1];
st.global.b32 [%a+4], %r10;
"""
    result = _run({"a": "pointer"}, body, [np.array([1, 0], np.uint32)], shared_bytes=4)
    assert result.arrays[0][0].tolist() == [0, 4]


def test_bfloat16_sums_round_once_to_even():
    # 1 + 2^-8 is half way between 1 and the next value; 1 + 3 * 2^-8 between two of which the upper is even.
    body = """
setp.eq.u32 %p1, %r0, 0;
mov.b16 %h1, 0x3B80;
@%p1 red.global.add.noftz.bf16 [%a], %h1;
@%p1 red.global.add.noftz.bf16 [%a+2], %h1;
mov.b16 %h1, 0xFF80;
@%p1 red.global.add.noftz.bf16 [%a+4], %h1;
"""
    result = _run({"a": "pointer"}, body, [np.array([0x3F80, 0x3F81, 0x7F80], np.uint16)])
    assert result.arrays[0][0].tolist() == [0x3F80, 0x3F82, 0x7FFF]


def test_atomics_of_all_warps_of_a_grid():
    body = """
mov.u32 %r10, %ctaid.x;
mad.lo.u32 %r10, %r10, 64, %r0;
atom.global.add.u32 %r11, [%a], 1;
atom.global.max.s32 %r12, [%a+4], %r10;
red.global.xor.b32 [%a+8], %r10;
mul.wide.u32 %d1, %r11, 4;
add.u64 %d1, %out, %d1;
st.global.b32 [%d1], %r10;
"""
    counters = np.array([0, -1, 0], np.int32)
    result = emulate(
        entry({"a": "pointer", "out": "pointer"}, body), [counters, Output(np.zeros(256, np.uint32))], 4, block=64,
        seeds=range(3), resident=4,
    )  # fmt: skip
    for left, out in result.arrays:
        assert left.tolist() == [256, 255, np.bitwise_xor.reduce(np.arange(256))]
        assert sorted(out.tolist()) == list(range(256))
    assert not result.findings


def test_atomics_race_with_plain_accesses():
    body = """
setp.ge.u32 %p1, %r0, 32;
@%p1 bra OTHER;
red.global.add.u32 [%a], 1;
ret;
OTHER:
{}
"""
    for access, races in (("ld.global.b32 %r10, [%a];", True), ("ld.relaxed.gpu.global.b32 %r10, [%a];", False)):
        result = _run({"a": "pointer"}, body.format(access), [np.zeros(1, np.uint32)], block=64, seeds=range(4))
        assert bool(result.of_kind("race")) == races, access


def test_faults():
    with pytest.raises(MemoryFaultError, match="misaligned"):
        _run(
            {"a": "pointer"},
            "red.global.add.v2.f32 [%a+4], {%f1, %f1};".replace("%f1", "0f3F800000"),
            [np.zeros(4, np.uint32)],
        )
    with pytest.raises(UnsupportedInstructionError, match="add of s64"):
        _run({"a": "pointer"}, "red.global.add.s64 [%a], 1;", [np.zeros(2, np.uint64)])
    with pytest.raises(MemoryFaultError, match="never written"):
        _run({"a": "pointer"}, "red.global.add.u32 [%a], 1;", [Output(np.zeros(1, np.uint32))])
