"""Questions to a Blackwell GPU, and the launches that answer them."""

import dataclasses
import itertools
import re
import zlib

import numpy as np

from cuda.emulator.errors import EmulationError
from cuda.emulator.front import emulate
from tests.emulator import launches
from tests.emulator.device import TiledMap
from tests.emulator.kernels.case import Case

# Shared memory: mbarriers and the address of tensor memory, then what a probe puts there.
IMAGE = 1024
_ALLOCATED = 512
_MAX_BARRIERS = 16
_WAITS, _WAIT_NANOSECONDS = 1000, 1_000_000
_CONVERGE = "bar.warp.sync 0xffffffff;"
_PARAMETERS = {"map": ".param .align 64 .b8 {}[128]", "pointer": ".param .u64 {}"}


@dataclasses.dataclass(frozen=True, eq=False)
class Probe(Case):
    """A launch of one CTA of 128 threads, or of a pair of them.

    Attributes:
      target: architecture that the text is for.
      findings: kinds of findings that the emulator reports.
      fault: what the emulator raises instead of giving a result; `expected` is then for the hardware alone.
      bounds: by place in `buffers`, the largest absolute error, where results are approximate.
      alternatives: by place in `buffers`, the arrays of which every word must come; which, is left to the hardware.
      rounds: launches on the hardware, where an order of events is in question.
    """

    shared_bytes: int = IMAGE
    target: str = "sm_100f"
    findings: frozenset[str] = frozenset()
    fault: type[EmulationError] | None = None
    bounds: dict[int, np.ndarray] = dataclasses.field(default_factory=dict)
    alternatives: dict[int, tuple[np.ndarray, ...]] = dataclasses.field(default_factory=dict)
    rounds: int = 1


@dataclasses.dataclass(frozen=True)
class Question:
    """Something that the emulator assumes.

    Attributes:
      title: the question.
      answer: what the emulator says.
      source: what that rests on.
      otherwise: what would change in our kernels if the answer is no.
      probes: launches that must leave what the answer says.
    """

    title: str
    answer: str
    source: str
    otherwise: str
    probes: tuple[Probe, ...]


def on_emulator(probe: Probe) -> list[list[np.ndarray]]:
    """Arrays after one launch, or after four where order matters; what is found must be what the probe says."""
    seeds = range(4) if probe.rounds > 1 else (zlib.crc32(probe.name.encode()) % 100,)
    arguments = [launches.tensor_map(x) if isinstance(x, TiledMap) else x for x in probe.arguments]
    result = emulate(
        probe.ptx, arguments, probe.grid, cluster=probe.cluster, shared_bytes=probe.shared_bytes, seeds=seeds
    )
    kinds = {finding.kind for finding in result.findings}
    assert kinds == probe.findings, "\n".join(map(str, result.findings))
    return result.arrays


def assert_expected(probe: Probe, arrays: list[np.ndarray]) -> None:
    """Bit for bit, but that every NaN is as good as another, or within the bounds of the probe."""
    for place, expected in probe.expected.items():
        actual = arrays[place]
        if place in probe.bounds:
            wrong = ~(np.abs(actual.astype(np.float64) - expected) <= probe.bounds[place])
        else:
            wrong = ~_equal(actual, expected)
        if wrong.any():
            at = [tuple(map(int, index)) for index in np.argwhere(wrong)[:8]]
            shown = ", ".join(f"{index}: {actual[index]} instead of {expected[index]}" for index in at)
            raise AssertionError(f"{probe.name}: {int(wrong.sum())} of {wrong.size} words of array {place}: {shown}")
    for place, choices in probe.alternatives.items():
        same = [_equal(arrays[place], choice) for choice in choices]
        print(f"{probe.name}: of {arrays[place].size} words, {[int(x.sum()) for x in same]} are as each alternative")
        assert np.any(same, axis=0).all(), f"{probe.name}: array {place} has words of no alternative"


def _equal(actual: np.ndarray, expected: np.ndarray) -> np.ndarray:
    same = actual.view(f"u{actual.itemsize}") == expected.view(f"u{actual.itemsize}")
    return same | (np.isnan(actual) & np.isnan(expected)) if actual.dtype.kind == "f" else same


# ---- PTX ----


def program(
    parameters: dict[str, str],
    body: str,
    *,
    target: str = "sm_100f",
    group: int = 1,
    columns: int = 512,
    barriers: int = 1,
) -> str:
    """A kernel that allocates tensor memory, runs `body` and frees it.

    `body` finds %thread, %warp, %rank (of the CTA in its cluster), %shared (address of shared memory), %chunk (that
    over 16), %tensor (address of tensor memory), %own (the same at the lanes of the warp), the pointers by their names,
    and mbarriers that take one arrival.

    Args:
      parameters: name to "pointer" or "map".
      body: statements.
      target: architecture.
      group: CTAs of the tcgen05 instructions; a cluster of two CTAs synchronises at start and end.
      columns: of tensor memory.
      barriers: mbarriers, at the start of shared memory.
    """
    assert barriers <= _MAX_BARRIERS
    declared = ", ".join(_PARAMETERS[kind].format(name) for name, kind in parameters.items())
    pointers = [name for name, kind in parameters.items() if kind == "pointer"]
    loads = "\n".join(f".reg .b64 %{name}; ld.param.u64 %{name}, [{name}];" for name in pointers)
    inits = " ".join(f"mbarrier.init.shared::cta.b64 [%shared+{8 * i}], 1;" for i in range(barriers))
    body = _renumbered(body)
    cluster = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" if group == 2 else "bar.sync 0;"
    return f"""
.version 8.8
.target {target}
.address_size 64
.extern .shared .align 1024 .b8 dynamic[];
.visible .entry main({declared})
.reqntid 128, 1, 1
{{
.reg .pred %p<16>; .reg .b16 %h<16>; .reg .b32 %r<192>; .reg .f32 %f<16>; .reg .b64 %d<32>;
.reg .b32 %thread, %warp, %rank, %shared, %tensor, %own; .reg .b64 %chunk;
{loads}
mov.u32 %thread, %tid.x;
shr.u32 %warp, %thread, 5;
mov.u32 %rank, %cluster_ctarank;
mov.u32 %shared, dynamic;
cvt.u64.u32 %chunk, %shared;
and.b64 %chunk, %chunk, 0x3ffff;
shr.u64 %chunk, %chunk, 4;
setp.ne.u32 %p0, %warp, 0;
@%p0 bra ALLOCATED;
tcgen05.alloc.cta_group::{group}.sync.aligned.shared::cta.b32 [%shared+{_ALLOCATED}], {columns};
tcgen05.relinquish_alloc_permit.cta_group::{group}.sync.aligned;
ALLOCATED:
setp.ne.u32 %p0, %thread, 0;
@%p0 bra INITIALISED;
{inits}
fence.mbarrier_init.release.cluster;
INITIALISED:
{_CONVERGE}
bar.sync 0;
{cluster}
ld.shared.b32 %tensor, [%shared+{_ALLOCATED}];
shl.b32 %own, %warp, 21;
add.u32 %own, %own, %tensor;
{body}
tcgen05.fence::before_thread_sync;
bar.sync 0;
{cluster}
setp.ne.u32 %p0, %warp, 0;
@%p0 bra FREED;
tcgen05.dealloc.cta_group::{group}.sync.aligned.b32 %tensor, {columns};
FREED:
ret;
}}
"""


_labels = itertools.count()


def _label(name: str) -> str:
    return f"{name}_{next(_labels)}"


def _renumbered(body: str) -> str:
    """Equal bodies have equal labels, so that a program is made once."""
    numbers: dict[str, str] = {}
    return re.sub(r"\b([A-Z]+)_\d+\b", lambda m: numbers.setdefault(m[0], f"{m[1]}_{len(numbers)}"), body)


def _share(pointer: str, bytes_of_rank: int) -> str:
    """%d0: where this CTA's part of an array starts."""
    return f"mul.wide.u32 %d0, %rank, {bytes_of_rank}; add.u64 %d0, %d0, %{pointer};"


def fill_shared(pointer: str, nbytes: int) -> str:
    """Copy this CTA's (nbytes,) part of an array to shared memory, from IMAGE on; publish it to the async proxy."""
    loop, end = _label("FILL"), _label("FILLED")
    return f"""
{_share(pointer, nbytes)}
shl.b32 %r0, %thread, 2;
{loop}:
setp.ge.u32 %p0, %r0, {nbytes};
@%p0 bra {end};
cvt.u64.u32 %d1, %r0;
add.u64 %d1, %d0, %d1;
ld.global.b32 %r1, [%d1];
add.u32 %r2, %shared, %r0;
st.shared.b32 [%r2+{IMAGE}], %r1;
add.u32 %r0, %r0, 512;
bra {loop};
{end}:
fence.proxy.async.shared::cta;
{everyone()}
"""


def copy_shared(pointer: str, nbytes: int, start: int = IMAGE) -> str:
    """Copy (nbytes,) of shared memory to an array."""
    loop, end = _label("COPY"), _label("COPIED")
    return f"""
shl.b32 %r0, %thread, 2;
{loop}:
setp.ge.u32 %p0, %r0, {nbytes};
@%p0 bra {end};
add.u32 %r2, %shared, %r0;
ld.shared.b32 %r1, [%r2+{start}];
cvt.u64.u32 %d1, %r0;
add.u64 %d1, %{pointer}, %d1;
st.global.b32 [%d1], %r1;
add.u32 %r0, %r0, 512;
bra {loop};
{end}:
"""


def _columns(pointer: str, column: int, columns: int, access: str) -> str:
    loop = _label("COLUMNS")
    return f"""
{_share(pointer, 512 * columns)}
mul.wide.u32 %d1, %thread, 4;
add.u64 %d0, %d0, %d1;
add.u32 %r0, %own, {column};
add.u32 %r1, %r0, {columns};
{loop}:
{access}
add.u64 %d0, %d0, 512;
add.u32 %r0, %r0, 1;
setp.ne.u32 %p0, %r0, %r1;
@%p0 bra {loop};
"""


def fill_tensor(pointer: str, column: int, columns: int) -> str:
    """Copy this CTA's (columns, 128 lanes) of an array to tensor memory; every CTA has its own part."""
    access = "ld.global.b32 %r2, [%d0]; tcgen05.st.sync.aligned.32x32b.x1.b32 [%r0], {%r2};"
    return _columns(pointer, column, columns, access) + "tcgen05.wait::st.sync.aligned;\n" + everyone()


def copy_tensor(pointer: str, column: int, columns: int) -> str:
    """Copy (columns, 128 lanes) of tensor memory to an array, in which every CTA has its own part."""
    access = """
tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r2}, [%r0];
tcgen05.wait::ld.sync.aligned;
st.global.b32 [%d0], %r2;"""
    return _columns(pointer, column, columns, access)


def everyone() -> str:
    """All threads of the CTA meet; what they did to tensor memory is ordered before what they do next."""
    return "tcgen05.fence::before_thread_sync; bar.sync 0; tcgen05.fence::after_thread_sync;\n"


def one_thread(text: str, *, of_pair: bool = False) -> str:
    """Thread 0 alone, of the even CTA alone if `of_pair`."""
    skip = _label("OTHERS")
    even = f"setp.ne.u32 %p0, %rank, 0; @%p0 bra {skip};" if of_pair else ""
    return f"setp.ne.u32 %p0, %thread, 0; @%p0 bra {skip};\n{even}\n{text}\n{skip}:\n{_CONVERGE}\n"


def commit(barrier: int = 0, *, group: int = 1, ctas: int = 0) -> str:
    """Let an mbarrier know of the end of what the thread has issued; in the CTAs of a mask if there is one."""
    multicast, mask = (".multicast::cluster", ", %h0") if ctas else ("", "")
    move = f"mov.b16 %h0, {ctas};" if ctas else ""
    return f"""
{move}
add.u32 %r0, %shared, {8 * barrier};
tcgen05.commit.cta_group::{group}.mbarrier::arrive::one.shared::cluster{multicast}.b64 [%r0]{mask};
"""


def wait(barrier: int = 0, parity: int = 0) -> str:
    """All threads wait for a phase, but not forever, and meet."""
    loop, end = _label("WAIT"), _label("WAITED")
    return f"""
mov.u32 %r0, 0;
{loop}:
mbarrier.try_wait.parity.shared::cta.b64 %p0, [%shared+{8 * barrier}], {parity}, {_WAIT_NANOSECONDS};
@%p0 bra {end};
add.u32 %r0, %r0, 1;
setp.lt.u32 %p0, %r0, {_WAITS};
@%p0 bra {loop};
{end}:
{_CONVERGE}
bar.sync 0;
tcgen05.fence::after_thread_sync;
"""


def passed(barrier: int, pointer: str) -> str:
    """Whether the first phase of a barrier is over, as 0 or 1 for each thread."""
    return f"""
mbarrier.test_wait.parity.shared::cta.b64 %p2, [%shared+{8 * barrier}], 0;
selp.b32 %r30, 1, 0, %p2;
mul.wide.u32 %d0, %thread, 4;
add.u64 %d0, %{pointer}, %d0;
st.global.b32 [%d0], %r30;
"""


def mma(
    kind: str,
    descriptor: int,
    a: int,
    b: int,
    d: int = 0,
    *,
    accumulate: bool = False,
    scales: tuple[int, int] | None = None,
    vector: str = "",
    tensor_memory_a: bool = False,
    group: int = 1,
    masks: tuple[int, ...] = (),
    scale_d: int | None = None,
) -> str:
    """One tcgen05.mma.

    Args:
      kind: without "kind::".
      descriptor: of the instruction.
      a: matrix descriptor without the address of shared memory, or a tensor memory address from %tensor on.
      b: matrix descriptor without the address of shared memory.
      d: tensor memory address from %tensor on.
      accumulate: add to D.
      scales: tensor memory addresses of the scale factors of A and B, from %tensor on.
      vector: "block16", "scale_vec::1X", ...
      tensor_memory_a: A is in tensor memory.
      group: CTAs.
      masks: disable-output-lane words.
      scale_d: scale-input-d.
    """
    first = f"add.u32 %r4, %tensor, {a};" if tensor_memory_a else f"add.u64 %d2, %chunk, {a:#x};"
    opcode = f"tcgen05.mma.cta_group::{group}.kind::{kind}"
    operands = ["[%r3]", "[%r4]" if tensor_memory_a else "%d2", "%d3", "%r5"]
    lines = [first, f"add.u64 %d3, %chunk, {b:#x};", f"add.u32 %r3, %tensor, {d};", f"mov.b32 %r5, {descriptor:#x};"]
    if scales:
        opcode += f".block_scale.{vector}"
        lines += [f"add.u32 %r{6 + i}, %tensor, {column};" for i, column in enumerate(scales)]
        operands += ["[%r6]", "[%r7]"]
    if masks:
        lines += [f"mov.b32 %r{8 + i}, {word:#x};" for i, word in enumerate(masks)]
        operands.append("{" + ", ".join(f"%r{8 + i}" for i in range(len(masks))) + "}")
    lines += [f"mov.b32 %r16, {int(accumulate)};", "setp.ne.u32 %p1, %r16, 0;"]
    operands += ["%p1"] + ([str(scale_d)] if scale_d is not None else [])
    return "\n".join([*lines, f"{opcode} {', '.join(operands)};"]) + "\n"


def copy(shape: str, column: int, descriptor: int, *, group: int = 1) -> str:
    """One tcgen05.cp to a tensor memory address from %tensor on."""
    return f"""
add.u64 %d2, %chunk, {descriptor:#x};
add.u32 %r3, %tensor, {column};
tcgen05.cp.cta_group::{group}.{shape} [%r3], %d2;
"""
