"""cta_group::2: which CTA of a pair holds what, and who hears of the end."""

import numpy as np

from tests.emulator.blackwell import operands
from tests.emulator.blackwell.operands import NVF4, Form, Image, Tensor
from tests.emulator.blackwell.probe import (
    IMAGE,
    Probe,
    Question,
    commit,
    copy,
    copy_tensor,
    fill_shared,
    fill_tensor,
    mma,
    one_thread,
    passed,
    program,
    wait,
)
from tests.emulator.tensor_core import layouts

_PAIR = (2, 1, 1)
_CTAS = 2
_MEET = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;\n"


def _both(parts: list[np.ndarray]) -> np.ndarray:
    """The two CTAs' parts of an array, one after the other."""
    return np.concatenate(parts)


def _probe(
    name: str,
    images: list[Image],
    issue: str,
    expected: list[np.ndarray],
    *,
    words: list[np.ndarray] | None = None,
    first: int = 0,
    target: str = "sm_100f",
) -> Probe:
    """D of both CTAs, from column 0 on, after what thread 0 of the even CTA issues."""
    body = fill_shared("image", images[0].size)
    if words is not None:
        body += fill_tensor("words", first, len(words[0]))
    body += _MEET + one_thread(issue + commit(group=2, ctas=3), of_pair=True) + wait()
    body += copy_tensor("d", 0, len(expected[0]))
    names = ("image", "d") + (("words",) if words is not None else ())
    assert images[0].size == images[1].size
    return Probe(
        name,
        program(dict.fromkeys(names, "pointer"), body, group=2, target=target),
        (
            _both([image.data for image in images]),
            np.zeros_like(_both(expected)),
            *(() if words is None else (_both(words),)),
        ),
        {1: _both(expected)},
        shared_bytes=IMAGE + images[0].size,
        grid=_PAIR,
        cluster=_PAIR,
        target=target,
    )


def _place(a: np.ndarray, b: np.ndarray, element: str, mode: str, dense: bool = False) -> tuple[list[Image], int, int]:
    """Each CTA's half of the rows of A and of the rows of B at the same places of its shared memory."""
    images, places = [], []
    for rank in range(_CTAS):
        image = Image()
        rows = [np.split(x, _CTAS)[rank] for x in (a, b)]
        start = IMAGE + -(-len(rows[0]) * 64 // 1024) * 1024
        places = [image.k_major(x, element, mode, at, dense=dense) for x, at in zip(rows, (IMAGE, start), strict=True)]
        images.append(image)
    return images, *places


def _layout(m: int, n: int) -> Probe:
    """BF16: D of both CTAs."""
    rng = np.random.default_rng(m)
    a, b = (operands.random_codes(rng, (rows, 16), "bf16") for rows in (m, n))
    images, a_place, b_place = _place(a, b, "bf16", "32B")
    product = operands.product(*(layouts.decoded(x, "bf16") for x in (a, b)))
    expected = []
    for rows in np.split(product, _CTAS):
        if m == 256:
            expected.append(operands.words_of(rows))
        else:
            # 64 rows: the low half of N in lanes 0..63, the high half in lanes 64..127.
            expected.append(np.concatenate([operands.words_of(half) for half in np.split(rows, 2, axis=1)], axis=1))
    descriptor = layouts.instruction_descriptor(m, n, 1, 1)
    return _probe(f"M={m}, N={n}", images, mma("f16", descriptor, a_place, b_place, group=2), expected)


def _scaled(m: int, n: int, form: Form, target: str = "sm_100f") -> Probe:
    """Block-scaled: which scale factors each CTA needs where."""
    rng = np.random.default_rng(m + n)
    a, b = (operands.random_codes(rng, (rows, form.k), form.element) for rows in (m, n))
    sfa, sfb = (operands.power(rng.integers(-2, 3, (rows, form.factors)), form.scale) for rows in (m, n))
    mode = "32B" if form.k == 64 else "64B"
    images, a_place, b_place = _place(a, b, form.element, mode, form.dense)
    base, sfb_column = 256, 264
    words = []
    for rank in range(_CTAS):
        tensor = Tensor(288)
        rows = np.split(sfa, _CTAS)[rank]
        tensor.scales(rows, base)
        if m == 256:
            tensor.scales(sfb, sfb_column)
        else:
            for half, quadrants in zip(np.split(sfb, 2), ((0, 1), (2, 3)), strict=True):
                tensor.scales(half, sfb_column, quadrants=quadrants)
        words.append(tensor.words[base:].copy())
    values = [operands.scale_values(x, form.scale) for x in (sfa, sfb)]
    product = operands.product(*(layouts.decoded(x, form.element) for x in (a, b)), *values)
    expected = []
    for rows in np.split(product, _CTAS):
        halves = [rows] if m == 256 else np.split(rows, 2, axis=1)
        expected.append(np.concatenate([operands.words_of(half) for half in halves], axis=1))
    issue = mma(
        form.kind, form.descriptor(m, n), a_place, b_place, scales=(base, sfb_column), vector=form.vector, group=2
    )  # fmt: skip
    name = f"{form.kind} {form.vector}, M={m}, N={n}, K={form.k}"
    return _probe(name, images, issue, expected, words=words, first=base, target=target)


def _a_operand() -> Probe:
    """A in tensor memory: each CTA has its own 128 rows."""
    rng = np.random.default_rng(3)
    n = 32
    a, b = (operands.random_codes(rng, (rows, 16), "bf16") for rows in (256, n))
    images, words = [], []
    for rank in range(_CTAS):
        image, tensor = Image(), Tensor(8)
        place = image.k_major(np.split(b, _CTAS)[rank], "bf16", "32B", IMAGE)
        tensor.operand(np.split(a, _CTAS)[rank], "bf16", 0)
        images.append(image)
        words.append(tensor.words)
    product = operands.product(*(layouts.decoded(x, "bf16") for x in (a, b)))
    expected = [operands.words_of(rows) for rows in np.split(product, _CTAS)]
    issue = mma("f16", layouts.instruction_descriptor(256, n, 1, 1), 256, place, tensor_memory_a=True, group=2)
    return _probe("BF16, M=256", images, issue, expected, words=words, first=256)


def _copied() -> Probe:
    """One tcgen05.cp of the even CTA."""
    rng = np.random.default_rng(4)
    images, expected = [], []
    for _ in range(_CTAS):
        image = Image()
        page = rng.integers(0, 256, 512, np.uint8)
        image.put(IMAGE + np.arange(512), page)
        images.append(image)
        expected.append(np.tile(page.view(np.uint32).reshape(32, 4).T, (1, 4)))
    issue = copy("32x128b.warpx4", 0, layouts.matrix_descriptor("none", IMAGE, 128, 128), group=2)
    return _probe("32x128b.warpx4", images, issue, expected)


def _signalled(ctas: int) -> Probe:
    """A commit of the even CTA; each CTA says whether its own barrier has had the arrival."""
    image = Image()
    image.put(IMAGE + np.arange(512), np.zeros(512, np.uint8))
    issue = copy("32x128b.warpx4", 0, layouts.matrix_descriptor("none", IMAGE, 128, 128), group=2)
    issue += commit(0, group=2, ctas=ctas) + commit(1, group=2, ctas=3)
    body = (
        fill_shared("image", 512)
        + _MEET
        + one_thread(issue, of_pair=True)
        + wait(1)
        + "mul.wide.u32 %d0, %rank, 512; add.u64 %said, %said, %d0;\n"
        + passed(0, "said")
    )
    expected = np.repeat(np.array([ctas & 1, ctas >> 1], np.uint32), 128)
    return Probe(
        f"mask {ctas}",
        program(dict.fromkeys(("image", "said"), "pointer"), body, group=2, columns=32, barriers=2),
        (np.tile(image.data, 2), np.zeros_like(expected)),
        {1: expected},
        shared_bytes=IMAGE + 512,
        grid=_PAIR,
        cluster=_PAIR,
    )


_NVF4_K96 = Form("mxf4nvf4", "block16", 16, "ue4m3", "e2m1", 96)

QUESTIONS = (
    Question(
        "From which CTA's shared memory come A and B of a pair, and where is D?",
        "Each CTA has half of the rows of A and half of the rows of B, at the same shared addresses; the low half of N "
        "is the even CTA's. M = 256: D of each CTA's 128 rows in its own tensor memory, all of N. M = 128: 64 rows a "
        "CTA, the low half of N in lanes 0..63, the high half in lanes 64..127.",
        "ISA 9.7.16.10.5 (layouts A and B); two NVFP4 GEMMs of NVIDIA give right results only this way.",
        "Nothing: the kernels use single CTAs.",
        (_layout(256, 32), _layout(256, 80), _layout(128, 32), _a_operand()),
    ),
    Question(
        "Where are the scale factors of a pair?",
        "In each CTA: those of its own rows of A and those of all of N; with M = 128 the low half of N in lane "
        "quadrants 0 and 1, the high half in 2 and 3, and A's 64 rows in two columns of every quadrant.",
        "A two-CTA example of NVIDIA (M = 128) and a persistent NVFP4 GEMM (M = 256) give right results only this way.",
        "Nothing: the kernels use single CTAs.",
        (_scaled(256, 32, NVF4), _scaled(128, 64, NVF4), _scaled(256, 48, operands.MXF8)),
    ),
    Question(
        "What does tcgen05.cp.cta_group::2 copy?",
        "In each CTA, its own shared memory to its own tensor memory.",
        "Reading alone: ISA 9.7.16.9.2 names the destinations only. NVIDIA's two-CTA kernels are consistent with it.",
        "Nothing: the kernels use single CTAs.",
        (_copied(),),
    ),
    Question(
        "Which barriers does a multicast commit reach?",
        "Those at the same offset in the CTAs of the mask, and no others.",
        "ISA 9.7.16.12.1.",
        "Nothing: the kernels use single CTAs.",
        tuple(_signalled(ctas) for ctas in (1, 2, 3)),
    ),
    Question(
        "How does K = 96 find its operands and scale factors?",
        "48 bytes of each row; six factors of 16 elements: four bytes of one column, two of the column four further.",
        "ISA 9.7.16.10.7.2.5 (figures not seen); CuTe DSL compiles such a kernel for compute capability 10.3.",
        "Nothing: the kernels use K = 64.",
        (_scaled(256, 32, _NVF4_K96, "sm_103a"),),
    ),
)
