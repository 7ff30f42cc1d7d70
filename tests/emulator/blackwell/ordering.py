"""In which order asynchronous operations take effect, and what the waits and fences add."""

import numpy as np

from tests.emulator.blackwell import operands
from tests.emulator.blackwell.operands import NVF4, Image, Tensor
from tests.emulator.blackwell.probe import (
    IMAGE,
    Probe,
    Question,
    commit,
    copy,
    copy_tensor,
    everyone,
    fill_shared,
    fill_tensor,
    mma,
    one_thread,
    passed,
    program,
    wait,
)
from tests.emulator.tensor_core import layouts

_ROUNDS = 50
_BURST = 8  # MMAs in flight when something might overtake them
_RACE = frozenset({"race"})


def _page(exponent: int) -> np.ndarray:
    """512 bytes of equal UE4M3 scale factors."""
    return np.full(512, int(operands.power(exponent, "ue4m3")), np.uint8)


def _page_descriptor(address: int) -> int:
    return layouts.matrix_descriptor("none", address, 128, 128)


def _constant(n: int, value: float) -> np.ndarray:
    return np.full((n, 128), value, np.float32)


def _bf16(rng: np.random.Generator, rows: int, k: int = 16) -> np.ndarray:
    return operands.random_codes(rng, (rows, k), "bf16")


def _bf16_descriptor(n: int) -> int:
    return layouts.instruction_descriptor(128, n, 1, 1)


def _values(codes: np.ndarray, element: str = "bf16") -> np.ndarray:
    return layouts.decoded(codes, element)


# ---- from one thread ----


def _scales_overwritten(side: str) -> Probe:
    """A copy of scale factors right behind MMAs that read those columns, and an MMA that reads the new ones."""
    n, image = 128, Image()
    a, b = (
        image.k_major(operands.ones(128, 64, "e2m1"), "e2m1", "32B", start, dense=True)
        for start in (IMAGE, IMAGE + 4096)
    )
    pages = [IMAGE + 8192 + 512 * i for i in range(2)]
    for exponent, start in enumerate(pages):
        image.put(start + np.arange(512), _page(exponent))
    sfa, sfb = 256, 260
    changed, other = (sfa, sfb) if side == "A" else (sfb, sfa)

    def multiply(d: int, accumulate: bool) -> str:
        return mma(
            NVF4.kind, NVF4.descriptor(128, n), a, b, d, accumulate=accumulate, scales=(sfa, sfb), vector=NVF4.vector
        )

    def refresh(page: int, column: int) -> str:
        return copy("32x128b.warpx4", column, _page_descriptor(pages[page]))

    issue = refresh(0, other) + refresh(0, changed)
    issue += "".join(multiply(0, i > 0) for i in range(_BURST))
    issue += refresh(1, changed) + multiply(n, False)
    body = fill_shared("image", image.size) + one_thread(issue + commit()) + wait() + copy_tensor("d", 0, 2 * n)
    expected = np.concatenate([_constant(n, 64 * _BURST), _constant(n, 128)])
    return Probe(
        f"scale factors of {side}",
        program(dict.fromkeys(("image", "d"), "pointer"), body),
        (image.data, np.zeros_like(expected)),
        {1: expected},
        shared_bytes=IMAGE + image.size,
        rounds=_ROUNDS,
    )


def _accumulators_as_operand() -> Probe:
    """D of a burst of MMAs is A of the next one, which has another D."""
    rng = np.random.default_rng(1)
    n, d0, d1 = 16, 0, 32
    a, b, c = (operands.random_codes(rng, (rows, k), "tf32") for rows, k in ((128, 8), (n, 8), (n, n)))
    image = Image()
    places = [
        image.k_major(x, "tf32", mode, start)
        for x, mode, start in ((a, "32B", IMAGE + 2048), (b, "32B", IMAGE), (c, "64B", IMAGE + 1024))
    ]
    descriptor = layouts.instruction_descriptor(128, n, 2, 2)
    issue = "".join(mma("tf32", descriptor, places[0], places[1], d0, accumulate=i > 0) for i in range(_BURST))
    for step in range(2):
        issue += mma(
            "tf32", descriptor, d0 + 8 * step, places[2] + 2 * step, d1, accumulate=step > 0, tensor_memory_a=True
        )
    first = _BURST * operands.product(_values(a, "tf32"), _values(b, "tf32"))
    expected = operands.words_of(operands.product(first, _values(c, "tf32")))
    body = fill_shared("image", image.size) + one_thread(issue + commit()) + wait() + copy_tensor("d", d1, n)
    return Probe(
        "D read as A",
        program(dict.fromkeys(("image", "d"), "pointer"), body),
        (image.data, np.zeros_like(expected)),
        {1: expected},
        shared_bytes=IMAGE + image.size,
        rounds=_ROUNDS,
    )


def _operand_overwritten() -> Probe:
    """A in tensor memory is overwritten by the D of the next MMA, as S of the next block overwrites P."""
    rng = np.random.default_rng(2)
    n, d, s = 128, 128, 0
    p, v, q, k = (_bf16(rng, rows) for rows in (128, n, 128, n))
    image, tensor = Image(), Tensor(8)
    tensor.operand(p, "bf16", 0)
    places = [image.k_major(x, "bf16", "32B", IMAGE + 4096 * i) for i, x in enumerate((v, q, k))]
    issue = "".join(
        mma("f16", _bf16_descriptor(n), s + 64, places[0], d, accumulate=i > 0, tensor_memory_a=True)
        for i in range(_BURST)
    )
    issue += mma("f16", _bf16_descriptor(n), places[1], places[2], s)
    body = (
        fill_shared("image", image.size)
        + fill_tensor("words", s + 64, 8)
        + one_thread(issue + commit())
        + wait()
        + copy_tensor("d", 0, 2 * n)
    )
    outputs = [operands.product(_values(q), _values(k)), _BURST * operands.product(_values(p), _values(v))]
    expected = np.concatenate([operands.words_of(x) for x in outputs])
    return Probe(
        "A overwritten by D",
        program(dict.fromkeys(("image", "words", "d"), "pointer"), body),
        (image.data, tensor.words, np.zeros_like(expected)),
        {2: expected},
        shared_bytes=IMAGE + image.size,
        rounds=_ROUNDS,
    )


def _later_commit() -> Probe:
    """A burst, its commit, a small MMA, its commit: the threads wait for the second commit alone."""
    rng = np.random.default_rng(3)
    n, small = 256, 16
    a, b = _bf16(rng, 128), _bf16(rng, n)
    image = Image()
    places = [image.k_major(x, "bf16", "32B", IMAGE + 4096 * i) for i, x in enumerate((a, b))]
    issue = "".join(mma("f16", _bf16_descriptor(n), *places, accumulate=i > 0) for i in range(_BURST))
    issue += commit(0) + mma("f16", _bf16_descriptor(small), *places, n) + commit(1)
    body = (
        fill_shared("image", image.size)
        + one_thread(issue)
        + wait(1)
        + passed(0, "over")
        + copy_tensor("d", 0, n + small)
    )
    product = operands.words_of(operands.product(_values(a), _values(b)))
    expected = np.concatenate([_BURST * product, product[:small]])
    return Probe(
        "the second of two commits",
        program(dict.fromkeys(("image", "d", "over"), "pointer"), body, barriers=2),
        (image.data, np.zeros_like(expected), np.zeros(128, np.uint32)),
        {1: expected, 2: np.ones(128, np.uint32)},
        shared_bytes=IMAGE + image.size,
        rounds=_ROUNDS,
    )


# ---- loads ----

_LOADED = 32


def _loads(name: str, between: str, after: str, findings: frozenset[str]) -> Probe:
    """Every warp loads D; then thread 0 lets an MMA overwrite it.

    `between` is what stands between the load and the barrier, `after` what follows the issue of the MMA.
    """
    rng = np.random.default_rng(4)
    n = _LOADED
    a, b = _bf16(rng, 128), _bf16(rng, n)
    image = Image()
    places = [image.k_major(x, "bf16", "32B", IMAGE + 4096 * i) for i, x in enumerate((a, b))]
    old = (rng.integers(-8, 9, (n, 128)) * 0.5).astype(np.float32)
    new = operands.words_of(operands.product(_values(a), _values(b)))
    body = (
        fill_shared("image", image.size)
        + fill_tensor("words", 0, n)
        + f"tcgen05.ld.sync.aligned.32x32b.x{n}.b32 {_listed(n)}, [%own];\n"
        + between
        + everyone()
        + one_thread(mma("f16", _bf16_descriptor(n), *places) + commit())
        + after
        + wait()
        + copy_tensor("d", 0, n)
    )
    raced = "race" in findings
    return Probe(
        name,
        program(dict.fromkeys(("image", "words", "loaded", "d"), "pointer"), body),
        (image.data, old.view(np.uint32), np.zeros_like(old), np.zeros_like(new)),
        {3: new} if raced else {2: old, 3: new},
        shared_bytes=IMAGE + image.size,
        findings=findings,
        alternatives={2: (old, new)} if raced else {},
        rounds=_ROUNDS,
    )


def _listed(count: int) -> str:
    return "{" + ", ".join(f"%r{32 + i}" for i in range(count)) + "}"


def _store(count: int, pointer: str = "loaded") -> str:
    lines = ["mul.wide.u32 %d0, %thread, 4;", f"add.u64 %d0, %{pointer}, %d0;"]
    lines += [f"st.global.b32 [%d0+{512 * i}], %r{32 + i};" for i in range(count)]
    return "\n".join(lines) + "\n"


_WAIT_LD = "tcgen05.wait::ld.sync.aligned;\n"

# ---- stores ----


def _stored(waits: bool) -> Probe:
    """A in tensor memory is stored anew, with or without tcgen05.wait::st before the barrier, and multiplied."""
    rng = np.random.default_rng(5)
    n = 16
    old, new, b = _bf16(rng, 128), _bf16(rng, 128), _bf16(rng, n)
    image, tensors = Image(), (Tensor(8), Tensor(8))
    for tensor, codes in zip(tensors, (old, new), strict=True):
        tensor.operand(codes, "bf16", 0)
    place = image.k_major(b, "bf16", "32B", IMAGE)
    wait_st = "tcgen05.wait::st.sync.aligned;\n"
    load = ["mul.wide.u32 %d0, %thread, 4;", "add.u64 %d0, %new, %d0;"]
    load += [f"ld.global.b32 %r{32 + i}, [%d0+{512 * i}];" for i in range(8)]
    body = (
        fill_shared("image", image.size)
        + fill_tensor("words", 256, 8)
        + "\n".join(load)
        + f"\nadd.u32 %r31, %own, 256;\ntcgen05.st.sync.aligned.32x32b.x8.b32 [%r31], {_listed(8)};\n"
        + (wait_st if waits else "")
        + everyone()
        + one_thread(mma("f16", _bf16_descriptor(n), 256, place, tensor_memory_a=True) + commit())
        + wait()
        + ("" if waits else wait_st)
        + copy_tensor("d", 0, n)
    )
    results = [operands.words_of(operands.product(_values(x), _values(b))) for x in (new, old)]
    return Probe(
        "with wait::st" if waits else "without wait::st",
        program(dict.fromkeys(("image", "words", "new", "d"), "pointer"), body),
        (image.data, tensors[0].words, tensors[1].words, np.zeros_like(results[0])),
        {3: results[0]} if waits else {},
        shared_bytes=IMAGE + image.size,
        findings=frozenset() if waits else _RACE,
        alternatives={} if waits else {3: (results[0], results[1])},
        rounds=_ROUNDS,
    )


# ---- shared memory and other threads ----


def _generic_writes(fenced: bool) -> Probe:
    """Scale factors written by st.shared and copied by tcgen05.cp behind a barrier, with or without the proxy fence."""
    old, new = _page(0), np.random.default_rng(6).integers(0, 127, 512, np.uint8)
    body = (
        fill_shared("image", 512)
        + f"""
mul.wide.u32 %d0, %thread, 4;
add.u64 %d0, %new, %d0;
ld.global.b32 %r30, [%d0];
shl.b32 %r31, %thread, 2;
add.u32 %r31, %shared, %r31;
st.shared.b32 [%r31+{IMAGE}], %r30;
{"fence.proxy.async.shared::cta;" if fenced else ""}
"""
        + everyone()
        + one_thread(copy("32x128b.warpx4", 0, _page_descriptor(IMAGE)) + commit())
        + wait()
        + copy_tensor("d", 0, 4)
    )
    images = [np.tile(page.view(np.uint32).reshape(32, 4).T, (1, 4)) for page in (new, old)]
    return Probe(
        "with the fence" if fenced else "without the fence",
        program(dict.fromkeys(("image", "new", "d"), "pointer"), body, columns=32),
        (old, new.view(np.uint32), np.zeros_like(images[0])),
        {2: images[0]} if fenced else {},
        shared_bytes=IMAGE + 512,
        findings=frozenset() if fenced else frozenset({"proxy"}),
        alternatives={} if fenced else {2: (images[0], images[1])},
        rounds=_ROUNDS,
    )


def _copy_by_another_warp() -> Probe:
    """Warp 1 copies scale factors, a barrier, and warp 0 multiplies without waiting for the end of the copy."""
    n, image, tensor = 16, Image(), Tensor(8)
    a, b = (
        image.k_major(operands.ones(rows, 64, "e2m1"), "e2m1", "32B", start, dense=True)
        for rows, start in ((128, IMAGE), (n, IMAGE + 4096))
    )
    page = IMAGE + 8192
    image.put(page + np.arange(512), _page(1))
    tensor.scales(np.full((128, 4), int(operands.power(0, "ue4m3"))), 0)
    tensor.scales(np.full((n, 4), int(operands.power(0, "ue4m3"))), 4)
    body = (
        fill_shared("image", image.size)
        + fill_tensor("words", 256, 8)
        + "setp.ne.u32 %p0, %thread, 32; @%p0 bra COPY_ISSUED;\n"
        + copy("32x128b.warpx4", 256, _page_descriptor(page))
        + commit(1)
        + "COPY_ISSUED:\nbar.warp.sync 0xffffffff;\n"
        + everyone()
        + one_thread(mma(NVF4.kind, NVF4.descriptor(128, n), a, b, scales=(256, 260), vector=NVF4.vector) + commit())
        + wait()
        + wait(1)
        + copy_tensor("d", 0, n)
    )
    return Probe(
        "copy by warp 1, MMA by warp 0",
        program(dict.fromkeys(("image", "words", "d"), "pointer"), body, barriers=2),
        (image.data, tensor.words, _constant(n, 0)),
        {},
        shared_bytes=IMAGE + image.size,
        findings=_RACE,
        alternatives={2: (_constant(n, 128), _constant(n, 64))},
        rounds=_ROUNDS,
    )


def _phases() -> Probe:
    """What try_wait says of both parities of a fresh barrier, and after one phase."""
    tests = "".join(
        f"""
mbarrier.try_wait.parity.shared::cta.b64 %p2, [%shared], {parity}, 1000;
selp.b32 %r{20 + 2 * round_ + parity}, 1, 0, %p2;
"""
        + ("mbarrier.arrive.shared::cta.b64 _, [%shared];\n" if (round_, parity) == (0, 1) else "")
        for round_ in range(2)
        for parity in range(2)
    )
    stores = "".join(f"st.global.b32 [%said+{4 * i}], %r{20 + i};\n" for i in range(4))
    return Probe(
        "both parities",
        program({"said": "pointer"}, one_thread(tests + stores), columns=32),
        (np.full(4, 9, np.uint32),),
        {0: np.array([0, 1, 1, 0], np.uint32)},
    )


QUESTIONS = (
    Question(
        "May a thread copy new scale factors behind an MMA that reads the old ones?",
        "Yes: the tcgen05 operations of one thread take effect in the order of issue.",
        "ISA 9.7.16.6.2 lists copy -> mma, not mma -> copy. NVIDIA's NVFP4 GEMM and HAO's FP4 attention refill scale "
        "columns so, with no commit between; Triton's tutorial on tcgen05.copy says that all are done in order.",
        "Two pages of scale factors for each operand, or a commit and a wait between P V and the next Q K.",
        (_scales_overwritten("A"), _scales_overwritten("B")),
    ),
    Question(
        "Are MMAs of one thread with different accumulators in order?",
        "Yes: one may read as A what an earlier one accumulates, and its D may overwrite an earlier one's A.",
        "ISA 9.7.16.6.2 lists pairs with the same accumulator and shape alone. FA4 and CUTLASS's FMHA write S over P "
        "of the block before from the same thread.",
        "A commit and a wait between P V and the Q K that overwrites P, or no sharing of columns by S and P.",
        (_accumulators_as_operand(), _operand_overwritten()),
    ),
    Question(
        "What has happened when the second of two commits of a thread arrives?",
        "All operations before it, those of the first commit too, and the arrival of the first commit.",
        "ISA 9.7.16.12.1 (all prior operations of the thread); the order of the arrivals is reading alone.",
        "Barriers that stand for earlier ones: the correction warps do not wait for the O of each block.",
        (_later_commit(),),
    ),
    Question(
        "May registers that tcgen05.ld loads be used without tcgen05.wait::ld?",
        "Yes: an instruction that uses one waits for it.",
        "ISA 9.7.16.6.4.5 (register dependencies are respected); NVIDIA's NVFP4 GEMM has no wait::ld.",
        "Nothing: the kernels wait, but compilers move uses across the wait.",
        (
            _loads("used at once", _store(_LOADED) + _WAIT_LD, "", frozenset()),
            _loads("waited for, used later", _WAIT_LD, _store(_LOADED), frozenset()),
        ),
    ),
    Question(
        "Does the use of a loaded register also end the load's read of tensor memory?",
        "Yes: a barrier after the use orders the load before an MMA that overwrites the columns.",
        "Reading alone: ISA 9.7.16.6.4.5 says that a register dependency implies no other order. NVIDIA's NVFP4 GEMM "
        "hands its accumulators on so.",
        "Nothing: the kernels wait before they arrive at the barrier of the MMA.",
        (_loads("used, no wait::ld", _store(_LOADED), "", frozenset()),),
    ),
    Question(
        "What does tcgen05.wait::ld add?",
        "Without it and without a use, an MMA behind a barrier may overwrite the columns first: the emulator reports a "
        "race. The hardware is asked how often that happens.",
        "ISA 9.7.16.8.5, example 1.",
        "Nothing: the kernels wait.",
        (_loads("neither wait::ld nor use", "", _store(_LOADED), _RACE),),
    ),
    Question(
        "When does an MMA see what tcgen05.st has stored?",
        "After wait::st of the storing warp and a barrier. Without wait::st the emulator lets the store come as late "
        "as it may, and reports a race. The hardware is asked how often the MMA comes first.",
        "ISA 9.7.16.8.5, example 2.",
        "Nothing: P and its scale factors are handed over after wait::st.",
        (_stored(True), _stored(False)),
    ),
    Question(
        "Does tcgen05.cp need fence.proxy.async behind st.shared?",
        "Yes: the emulator reports its absence. The hardware is asked how often the copy reads the bytes before.",
        "ISA 9.7.16.6.5. HAO's FP4 attention leaves the fence out.",
        "Nothing if yes. If never, P could go without its fence, if its scale factors passed through shared memory.",
        (_generic_writes(True), _generic_writes(False)),
    ),
    Question(
        "Is a copy by one warp ordered before an MMA by another, with a barrier and fences between?",
        "No: the emulator knows no order of the operations of different warps without a commit, and reports a race. "
        "It is stricter than the ISA here.",
        "ISA 9.7.16.6.4.3 says yes.",
        "Nothing: one warp issues all copies and MMAs.",
        (_copy_by_another_warp(),),
    ),
    Question(
        "What does mbarrier.try_wait.parity say?",
        "True for the parity of the phase before the current one, so for parity 1 of a fresh barrier; false, after a "
        "limited time, for the current one.",
        "ISA 9.7.13.15.16; Hopper is asked the same by tests/emulator/kernels/mbarriers.py.",
        "Nothing.",
        (_phases(),),
    ),
)
