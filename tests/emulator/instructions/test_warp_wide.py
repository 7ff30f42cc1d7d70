import numpy as np
import pytest

from cuda.emulator import Output, emulate
from cuda.emulator.errors import DeadlockError, UnsupportedInstructionError
from tests.emulator.kernels.case import entry

_LANES = np.arange(32)


def _run(body, out, parameters=None, arguments=(), **options):
    parameters = {"out": "pointer"} | (parameters or {})
    return emulate(entry(parameters, body), [Output(out), *arguments], 1, **({"block": 32} | options))


_STORE = "mul.wide.u32 %d1, %r0, 4;\nadd.u64 %d1, %out, %d1;\nst.global.b32 [%d1], {};\n"


def test_a_shuffle_from_a_uniform_lane_stays_uniform():
    """The loop that it bounds runs as often in all lanes; the value is that of lane 5 plus 16."""
    body = f"""
add.u32 %r10, %r0, 16;
shfl.sync.idx.b32 %r11|%p1, %r10, 5, 31, -1;
mov.u32 %r12, 0;
LOOP:
add.u32 %r12, %r12, 3;
add.s32 %r11, %r11, -1;
setp.ne.u32 %p2, %r11, 0;
@%p2 bra LOOP;
selp.b32 %r13, %r12, 0, %p1;
{_STORE.format("%r13")}
"""
    np.testing.assert_array_equal(_run(body, np.zeros(32, np.uint32)).arrays[0][0], np.full(32, 63))


def test_a_register_as_the_source_lane():
    body = f"""
xor.b32 %r10, %r0, 3;
mul.lo.u32 %r11, %r0, 10;
shfl.sync.idx.b32 %r12, %r11, %r10, 31, -1;
{_STORE.format("%r12")}
"""
    np.testing.assert_array_equal(_run(body, np.zeros(32, np.uint32)).arrays[0][0], 10 * (_LANES ^ 3))


def test_halves_of_a_warp_work_on_their_own():
    body = f"""
setp.lt.u32 %p1, %r0, 16;
@%p1 bra FIRST;
shfl.sync.bfly.b32 %r10, %r0, 1, 31, 0xffff0000;
redux.sync.add.u32 %r11, %r10, 0xffff0000;
bra DONE;
FIRST:
shfl.sync.down.b32 %r10, %r0, 1, 31, 0x0000ffff;
setp.ge.u32 %p2, %r10, 8;
vote.sync.ballot.b32 %r11, %p2, 0x0000ffff;
DONE:
add.u32 %r10, %r10, %r11;
{_STORE.format("%r10")}
"""
    result = _run(body, np.zeros(32, np.uint32))
    ballot = sum(1 << i for i in range(16) if min(i + 1, 16) >= 8)
    expected = np.where(_LANES < 16, np.minimum(_LANES + 1, 16) + ballot, (_LANES ^ 1) + sum(range(16, 32)))
    # Lane 15 reads lane 16, which is not a member.
    np.testing.assert_array_equal(np.delete(result.arrays[0][0], 15), np.delete(expected, 15))
    (finding,) = result.findings
    assert finding.kind == "register" and "lane 15" in finding.text and "reads lane 16" in finding.text


def test_member_masks_that_differ_between_lanes():
    """Even and odd lanes vote and reduce among themselves, by one instruction."""
    body = """
setp.ge.u32 %p1, %r0, 8;
and.b32 %r10, %r0, 1;
mov.u32 %r11, 0x55555555;
shl.b32 %r11, %r11, %r10;
vote.sync.ballot.b32 %r12, %p1, %r11;
redux.sync.max.s32 %r13, %r0, %r11;
elect.sync %r14|%p2, %r11;
match.any.sync.b32 %r15, %r10, %r11;
selp.b32 %r16, 1, 0, %p2;
mul.wide.u32 %d1, %r0, 16;
add.u64 %d1, %out, %d1;
st.global.v4.b32 [%d1], {%r12, %r13, %r14, %r16};
"""
    result = _run(body, np.zeros((32, 4), np.uint32))
    even = [0x55555500, 30, 0, 0]
    odd = [0xAAAAAA00, 31, 1, 0]
    expected = np.array([odd if lane & 1 else even for lane in _LANES])
    expected[:2, 3] = 1
    np.testing.assert_array_equal(result.arrays[0][0], expected)
    assert not result.findings


def test_votes_of_each_kind():
    votes = "".join(
        f"vote.sync.{mode}.pred %p{10 + i}, %p{p}, -1;\nselp.b32 %r{10 + i}, {1 << i}, 0, %p{10 + i};\n"
        for i, (mode, p) in enumerate((m, p) for m in ("all", "any", "uni") for p in (1, 2, 3))
    )
    total = "".join(f"or.b32 %r9, %r9, %r{10 + i};\n" for i in range(9))
    body = f"""
setp.lt.u32 %p1, %r0, 32;
setp.lt.u32 %p2, %r0, 9;
setp.gt.u32 %p3, %r0, 40;
{votes}
mov.u32 %r9, 0;
{total}
{_STORE.format("%r9")}
"""
    np.testing.assert_array_equal(_run(body, np.zeros(32, np.uint32)).arrays[0][0], np.full(32, 0b101_011_001))


@pytest.mark.parametrize("members", [0xFFFFFFFF, 0x0000FFF0])
def test_reductions_of_floats(members):
    values = np.random.default_rng(0).standard_normal(32).astype(np.float32)
    values[5], values[7], values[9] = np.nan, -0.0, 0.0
    chosen = values[[members >> i & 1 == 1 for i in range(32)]]
    forms = {
        "min": np.nanmin(chosen), "max": np.nanmax(chosen), "min.abs": np.nanmin(abs(chosen)),
        "max.abs": np.nanmax(abs(chosen)), "max.NaN": np.nan,
    }  # fmt: skip
    reductions = "".join(
        f"redux.sync.{form}.f32 %f{2 + i}, %f1, {members};\nst.global.f32 [%d1+{4 * i}], %f{2 + i};\n"
        for i, form in enumerate(forms)
    )
    body = f"""
mul.wide.u32 %d1, %r0, 4;
add.u64 %d1, %a, %d1;
ld.global.f32 %f1, [%d1];
mul.wide.u32 %d1, %r0, 20;
add.u64 %d1, %out, %d1;
mov.u32 %r10, {members};
shr.u32 %r10, %r10, %r0;
and.b32 %r10, %r10, 1;
setp.eq.u32 %p1, %r10, 0;
@%p1 bra DONE;
{reductions}
DONE:
"""
    out = np.zeros((32, 5), np.float32)
    result = _run(body, out, {"a": "pointer"}, [values]).arrays[0][0]
    first = 0 if members == 0xFFFFFFFF else 4
    np.testing.assert_array_equal(result[first], np.array(list(forms.values()), np.float32))
    assert not result[:4].any() or first == 0
    nan = result[first, 4:5].view(np.uint32)[0]
    assert nan == 0x7FFFFFFF


def test_the_smaller_of_two_zeros_is_the_negative_one():
    body = f"""
shl.b32 %r10, %r0, 31;
mov.b32 %f1, %r10;
redux.sync.min.f32 %f2, %f1, -1;
redux.sync.max.f32 %f3, %f1, -1;
mov.b32 %r11, %f2;
mov.b32 %r12, %f3;
shr.u32 %r11, %r11, 31;
or.b32 %r12, %r12, %r11;
{_STORE.format("%r12")}
"""
    assert _run(body, np.zeros(32, np.uint32)).arrays[0][0][0] == 1


def test_matches_of_64_bit_values():
    body = """
and.b32 %r10, %r0, 3;
mov.b64 %d2, {%r10, %r10};
match.any.sync.b64 %r11, %d2, -1;
match.all.sync.b64 %r12|%p1, %d2, -1;
mov.b64 %d3, 7;
match.all.sync.b64 %r13|%p2, %d3, -1;
selp.b32 %r14, 1, 0, %p1;
selp.b32 %r15, 1, 0, %p2;
shl.b32 %r14, %r14, 1;
or.b32 %r14, %r14, %r15;
mul.wide.u32 %d1, %r0, 16;
add.u64 %d1, %out, %d1;
st.global.v4.b32 [%d1], {%r11, %r12, %r13, %r14};
"""
    out = _run(body, np.zeros((32, 4), np.uint32)).arrays[0][0]
    np.testing.assert_array_equal(out[:, 0], 0x11111111 << (_LANES % 4))
    np.testing.assert_array_equal(out[:, 1:], [[0, 0xFFFFFFFF, 1]] * 32)


def test_the_active_lanes():
    body = f"""
mov.u32 %r10, 7;
setp.lt.u32 %p1, %r0, 5;
@%p1 bra FIRST;
activemask.b32 %r10;
bra DONE;
FIRST:
elect.sync %r10|%p2, 0x1f;
@%p2 mov.u32 %r10, 99;
DONE:
{_STORE.format("%r10")}
"""
    np.testing.assert_array_equal(
        _run(body, np.zeros(32, np.uint32)).arrays[0][0], [99, 0, 0, 0, 0] + [0xFFFFFFE0] * 27
    )


def test_a_lane_outside_of_its_member_mask_is_reported():
    body = "setp.eq.u32 %p2, %r0, 0;\nvote.sync.any.pred %p1, %p2, 0x7fffffff;"
    result = _run(body + _STORE.format("%r0"), np.zeros(32, np.uint32))
    (finding,) = result.findings
    assert finding.kind == "register" and "lanes 0x80000000" in finding.text


def test_members_that_do_not_come_are_waited_for():
    body = """
setp.lt.u32 %p1, %r0, 16;
@%p1 bra FIRST;
shfl.sync.bfly.b32 %r10, %r0, 1, 31, 0xffffffff;
FIRST:
st.global.b32 [%out], %r0;
"""
    with pytest.raises(DeadlockError, match="the other lanes of its warp in 0xffffffff"):
        _run(body, np.zeros(1, np.uint32))


def test_members_that_have_exited_are_not_waited_for():
    body = f"setp.ge.u32 %p1, %r0, 20;\n@%p1 ret;\nredux.sync.add.u32 %r10, %r0, -1;\n{_STORE.format('%r10')}"
    np.testing.assert_array_equal(_run(body, np.zeros(20, np.uint32)).arrays[0][0], np.full(20, 190))


@pytest.mark.parametrize("instruction", ["redux.sync.add.f32 %f1, %f2, -1;", "vote.sync.none.pred %p1, %p2, -1;"])
def test_unknown_forms(instruction):
    with pytest.raises(UnsupportedInstructionError, match="is not supported"):
        _run(instruction, np.zeros(1, np.uint32))
