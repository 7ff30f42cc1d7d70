"""Exchanges between the lanes of a warp, and named barriers."""

import itertools

import numpy as np

from tests.emulator.kernels.case import Case, entry

_LANES = np.arange(32)
_PARTIAL = 0x000FFFF5
"""Members of the exchanges in divergent code."""


def _source_lanes(mode: str, b: np.ndarray, c: int) -> tuple[np.ndarray, np.ndarray]:
    """From which lane each lane reads, and whether that was in range; the PTX ISA's definition of shfl."""
    segment = c >> 8 & 31
    b, limit = b & 31, (_LANES & segment) | (c & 31 & ~segment)
    if mode == "up":
        source, valid = _LANES - b, _LANES - b >= limit
    else:
        source = {"down": _LANES + b, "bfly": _LANES ^ b, "idx": (_LANES & segment) | (b & ~segment)}[mode]
        valid = source <= limit
    return np.where(valid, source, _LANES), valid


def _shuffles(rng: np.random.Generator) -> Case:
    values = rng.integers(0, 2**32, 32, np.uint32)
    per_lane = rng.integers(0, 64, 32, np.uint32)
    body, expected = "", []
    clamps = {"up": (0, 0x1800, 0x1C00), "down": (31, 0x181F, 0x1003), "bfly": (31, 0x1C1F, 3), "idx": (31, 0x181F, 7)}
    for mode, cs in clamps.items():
        for b, c in itertools.product((0, 1, 5, 17, "%r12"), cs):
            body += f"shfl.sync.{mode}.b32 %r20|%p1, %r11, {b}, {c}, 0xffffffff;\nselp.u32 %r21, 1, 0, %p1;\n"
            body += f"st.global.v2.u32 [%d1+{256 * len(expected)}], {{%r20, %r21}};\n"
            source, valid = _source_lanes(mode, per_lane.astype(int) if b == "%r12" else np.full(32, b), c)
            expected.append(np.stack([values[source], valid], -1))
    prologue = """
mul.wide.u32 %d1, %r0, 4;
add.u64 %d2, %values, %d1;
ld.global.u32 %r11, [%d2];
add.u64 %d2, %lanes, %d1;
ld.global.u32 %r12, [%d2];
mul.wide.u32 %d1, %r0, 8;
add.u64 %d1, %out, %d1;
"""
    out = np.stack(expected).astype(np.uint32)
    ptx = entry({"values": "pointer", "lanes": "pointer", "out": "pointer"}, prologue + body)
    return Case("shfl", ptx, (values, per_lane, np.zeros_like(out)), {2: out})


def _store_words(count: int) -> str:
    return "".join(f"st.global.u32 [%d1+{128 * i}], %r{20 + i};\n" for i in range(count))


def _in_divergent_code(name: str, instructions: str, count: int, values: np.ndarray, expected: np.ndarray) -> Case:
    """Runs instructions on %r11 (%d3 with its upper half from %r11 too) in the member lanes only."""
    body = f"""
mul.wide.u32 %d1, %r0, 4;
add.u64 %d2, %values, %d1;
ld.global.u32 %r11, [%d2];
mov.b64 %d3, {{%r11, %r11}};
add.u64 %d1, %out, %d1;
mov.u32 %r12, {_PARTIAL};
shr.u32 %r13, %r12, %r0;
and.b32 %r13, %r13, 1;
setp.eq.u32 %p0, %r13, 0;
setp.gt.s32 %p1, %r11, 0;
@%p0 bra OTHERS;
{instructions}
{_store_words(count)}
OTHERS:
"""
    out = np.full((count, 32), 0xDEAD, np.uint32)
    members = (_PARTIAL >> _LANES & 1).astype(bool)
    ptx = entry({"values": "pointer", "out": "pointer"}, body)
    return Case(name, ptx, (values, out), {1: np.where(members, expected, out).astype(np.uint32)})


def _bits(lanes: np.ndarray) -> int:
    return int((lanes.astype(np.uint64) << _LANES.astype(np.uint64)).sum())


def _members() -> np.ndarray:
    return (_PARTIAL >> _LANES & 1).astype(bool)


def _votes(rng: np.random.Generator) -> Case:
    values = rng.integers(-2, 3, 32).astype(np.int32).view(np.uint32)
    positive = (values.view(np.int32) > 0) & _members()
    rows = [_bits(positive), int(positive[_members()].all()), int(positive.any()), 0, 0, 1]
    instructions = "vote.sync.ballot.b32 %r20, %p1, %r12;\n"
    instructions += "".join(
        f"vote.sync.{mode}.pred %p2, {predicate}, %r12;\nselp.u32 %r{21 + i}, 1, 0, %p2;\n"
        for i, (mode, predicate) in enumerate(
            (("all", "%p1"), ("any", "%p1"), ("uni", "%p1"), ("any", "%p0"), ("uni", "!%p0"))
        )
    )
    return _in_divergent_code("vote", instructions, 6, values, np.repeat(np.array(rows)[:, None], 32, 1))


def _matches(rng: np.random.Generator) -> Case:
    values = rng.integers(0, 4, 32).astype(np.uint32)
    members = _members()
    same = np.array([_bits((values == value) & members) for value in values])
    rows = [same, same, np.zeros(32), np.zeros(32), np.full(32, _PARTIAL), np.ones(32)]
    instructions = """
match.any.sync.b32 %r20, %r11, %r12;
match.any.sync.b64 %r21, %d3, %r12;
match.all.sync.b32 %r22|%p2, %r11, %r12;
selp.u32 %r23, 1, 0, %p2;
match.all.sync.b32 %r24|%p2, %r12, %r12;
selp.u32 %r25, 1, 0, %p2;
"""
    return _in_divergent_code("match", instructions, 6, values, np.stack(rows))


def _reductions(rng: np.random.Generator) -> Case:
    values = rng.integers(0, 2**32, 32, np.uint32)
    inside, signed = values[_members()], values.view(np.int32)[_members()]
    with np.errstate(over="ignore"):
        rows = [inside.sum(dtype=np.uint32), inside.min(), inside.max(), signed.sum(dtype=np.int32), signed.min()]
    rows += [signed.max(), np.bitwise_and.reduce(inside), np.bitwise_or.reduce(inside), np.bitwise_xor.reduce(inside)]
    kinds = ("add.u32", "min.u32", "max.u32", "add.s32", "min.s32", "max.s32", "and.b32", "or.b32", "xor.b32")
    instructions = "".join(f"redux.sync.{kind} %r{20 + i}, %r11, %r12;\n" for i, kind in enumerate(kinds))
    expected = np.array([int(row) & 0xFFFFFFFF for row in rows], np.uint32)
    return _in_divergent_code("redux", instructions, 9, values, np.repeat(expected[:, None], 32, 1))


def _elections(rng: np.random.Generator) -> Case:
    values = rng.integers(0, 2**32, 32, np.uint32)
    leader = int(np.argmax(_members()))
    instructions = "elect.sync %r20|%p2, %r12;\nselp.u32 %r21, 1, 0, %p2;\n"
    rows = np.stack([np.full(32, leader), leader == _LANES])
    return _in_divergent_code("elect", instructions, 2, values, rows)


def _divergent_shuffle(rng: np.random.Generator) -> Case:
    values = rng.integers(0, 2**32, 32, np.uint32)
    # The lowest member broadcasts, then the members exchange in pairs.
    leader = int(np.argmax(_members()))
    instructions = (
        f"shfl.sync.idx.b32 %r20, %r11, {leader}, 31, %r12;\nshfl.sync.bfly.b32 %r21|%p2, %r11, 2, 31, %r12;\n"
    )
    partner = _LANES ^ 2
    exchanged = np.where(_members()[partner], values[partner], 0xDEAD)
    instructions += "shr.u32 %r30, %r12, 0;\nxor.b32 %r31, %r0, 2;\nshr.u32 %r30, %r30, %r31;\nand.b32 %r30, %r30, 1;\n"
    instructions += "setp.eq.u32 %p3, %r30, 0;\n@%p3 mov.u32 %r21, 0xdead;\n"
    return _in_divergent_code(
        "shfl_divergent", instructions, 2, values, np.stack([np.full(32, values[leader]), exchanged])
    )


_EXCHANGE = """
shl.b32 %r10, %r0, 2;
add.u32 %r11, %r1, %r10;
cvt.u64.u32 %d1, %r10;
add.u64 %d1, %out, %d1;
"""


def _producers_and_consumers() -> Case:
    """Warps 0 and 1 write and arrive, warps 2 and 3 wait and read; then the other way round."""
    body = f"""{_EXCHANGE}
setp.ge.u32 %p0, %r0, 64;
mul.lo.u32 %r12, %r0, 3;
@%p0 bra CONSUMER;
st.shared.u32 [%r11], %r12;
barrier.arrive 1, 128;
barrier.sync 2, 128;
ld.shared.u32 %r13, [%r11+256];
st.global.u32 [%d1], %r13;
ret;
CONSUMER:
barrier.sync 1, 128;
ld.shared.u32 %r13, [%r11+-256];
st.global.u32 [%d1], %r13;
st.shared.u32 [%r11], %r12;
barrier.arrive 2, 128;
"""
    expected = np.concatenate([3 * np.arange(64, 128), 3 * np.arange(64)]).astype(np.uint32)
    ptx = entry({"out": "pointer"}, body)
    return Case("barrier_arrive", ptx, (np.zeros(128, np.uint32),), {0: expected}, block=(128, 1, 1), shared_bytes=512)


def _divergent_barrier() -> Case:
    """The halves of each warp come to the same barrier at different instructions."""
    body = f"""{_EXCHANGE}
st.shared.u32 [%r11], %r0;
and.b32 %r12, %r0, 16;
setp.ne.u32 %p0, %r12, 0;
mov.u32 %r14, 1000;
@%p0 bra SECOND;
barrier.sync 3, 64;
mov.u32 %r14, 2000;
bra TOGETHER;
SECOND:
barrier.sync 3, 64;
TOGETHER:
sub.u32 %r15, 63, %r0;
shl.b32 %r15, %r15, 2;
add.u32 %r15, %r1, %r15;
ld.shared.u32 %r13, [%r15];
add.u32 %r13, %r13, %r14;
st.global.u32 [%d1], %r13;
"""
    threads = np.arange(64)
    expected = (63 - threads + np.where(threads & 16, 1000, 2000)).astype(np.uint32)
    ptx = entry({"out": "pointer"}, body)
    return Case("barrier_divergent", ptx, (np.zeros(64, np.uint32),), {0: expected}, block=(64, 1, 1), shared_bytes=256)


def _barrier_reductions() -> Case:
    body = f"""{_EXCHANGE}
rem.u32 %r12, %r0, 3;
setp.eq.u32 %p1, %r12, 0;
barrier.red.popc.u32 %r20, 1, %p1;
barrier.red.popc.u32 %r21, 1, !%p1;
barrier.red.or.pred %p2, 2, %p1;
barrier.red.and.pred %p3, 2, %p1;
selp.u32 %r22, 1, 0, %p2;
selp.u32 %r23, 1, 0, %p3;
st.global.u32 [%d1], %r20;
st.global.u32 [%d1+256], %r21;
st.global.u32 [%d1+512], %r22;
st.global.u32 [%d1+768], %r23;
"""
    count = sum(i % 3 == 0 for i in range(64))
    expected = np.repeat(np.array([count, 64 - count, 1, 0], np.uint32)[:, None], 64, 1)
    ptx = entry({"out": "pointer"}, body)
    return Case("barrier_red", ptx, (np.zeros((4, 64), np.uint32),), {0: expected}, block=(64, 1, 1))


def cases() -> list[Case]:
    """All cases."""
    rng = np.random.default_rng(6)
    exchanges = (_shuffles, _votes, _matches, _reductions, _elections, _divergent_shuffle)
    barriers = (_producers_and_consumers, _divergent_barrier, _barrier_reductions)
    return [make(rng) for make in exchanges] + [make() for make in barriers]
