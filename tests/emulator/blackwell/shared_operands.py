"""Matrix descriptors: where the elements of A and B lie in shared memory."""

import numpy as np

from tests.emulator.blackwell import operands
from tests.emulator.blackwell.operands import NVF4, Image, Tensor
from tests.emulator.blackwell.probe import (
    IMAGE,
    Probe,
    Question,
    commit,
    copy_tensor,
    fill_shared,
    fill_tensor,
    mma,
    one_thread,
    program,
    wait,
)
from tests.emulator.tensor_core import layouts

_ROWS = 128
_KINDS = {"bf16": "f16", "f16": "f16", "tf32": "tf32", "e4m3": "f8f6f4", "e2m1": "f8f6f4", "e3m2": "f8f6f4"}
_K = {"bf16": 16, "f16": 16, "tf32": 8, "e4m3": 32, "e2m1": 32, "e3m2": 32}
_SPANS = {"32B": 32, "64B": 64, "128B": 128}
_SFA, _SFB = 256, 260


def _probe(name: str, image: Image, issue: str, expected: np.ndarray, words: np.ndarray | None = None) -> Probe:
    """D, (N, 128), after `issue`; `words` go to the columns of scale factors."""
    scales = fill_tensor("words", _SFA, len(words)) if words is not None else ""
    body = fill_shared("image", image.size) + scales + one_thread(issue + commit()) + wait()
    names = ("image", "d") + (("words",) if words is not None else ())
    return Probe(
        name,
        program(dict.fromkeys(names, "pointer"), body + copy_tensor("d", 0, len(expected))),
        (image.data, np.zeros_like(expected), *(() if words is None else (words,))),
        {1: expected},
        shared_bytes=IMAGE + image.size,
    )


def _expected(a: np.ndarray, b: np.ndarray, a_element: str, b_element: str) -> np.ndarray:
    return operands.words_of(operands.product(layouts.decoded(a, a_element), layouts.decoded(b, b_element)))


def _descriptor(n: int, a: str, b: str, m: int = _ROWS, transpose: tuple[int, int] = (0, 0)) -> int:
    return layouts.instruction_descriptor(m, n, layouts.FORMAT_FIELDS[a], layouts.FORMAT_FIELDS[b], transpose=transpose)


# ---- K contiguous ----


def _fp4_steps(mode: str) -> Probe:
    """All steps of K64 of rows as long as the swizzling pattern, each 32 bytes after the last."""
    rng = np.random.default_rng(2)
    span, n = _SPANS[mode], 16
    steps = span // 32
    a, b = (operands.random_codes(rng, (rows, 2 * span), "e2m1") for rows in (_ROWS, n))
    sfa, sfb = (operands.power(rng.integers(-2, 3, (rows, 4 * steps)), "ue4m3") for rows in (_ROWS, n))
    # B starts where its pattern does, but not at a multiple of 1024 bytes if the pattern is smaller.
    b_start = IMAGE + _ROWS * span + (8 * span if mode != "128B" else 0)
    image, tensor = Image(), Tensor(32)
    places = [image.k_major(x, "e2m1", mode, start, dense=True) for x, start in ((a, IMAGE), (b, b_start))]
    for step in range(steps):
        tensor.scales(sfa[:, 4 * step : 4 * step + 4], 4 * step)
        tensor.scales(sfb[:, 4 * step : 4 * step + 4], 16 + 4 * step)
    issue = "".join(
        mma(
            NVF4.kind,
            NVF4.descriptor(_ROWS, n),
            places[0] + 2 * step,
            places[1] + 2 * step,
            accumulate=step > 0,
            scales=(_SFA + 4 * step, _SFA + 16 + 4 * step),
            vector=NVF4.vector,
        )
        for step in range(steps)
    )
    expected = operands.product(
        *(layouts.decoded(x, "e2m1") for x in (a, b)), *(operands.scale_values(x, "ue4m3") for x in (sfa, sfb))
    )
    return _probe(f"e2m1 in {span}-byte rows", image, issue, operands.words_of(expected), tensor.words)


def _k_major(element: str, mode: str, *, leading: int = 0, gap: int = 0, n: int = 16) -> Probe:
    """All steps of one row of the pattern; `gap` bytes between groups of 8 rows."""
    rng = np.random.default_rng(3)
    span = _SPANS.get(mode, 64)
    width = span * 8 // {"bf16": 16, "tf32": 32}.get(element, 8)
    a, b = (operands.random_codes(rng, (rows, width), element) for rows in (_ROWS, n))
    stride = (8 * span if mode != "none" else 128) + gap
    size = 16 * stride if mode != "none" else span // 16 * 16 * stride
    image = Image()
    places = [
        image.k_major(x, element, mode, start, leading=leading if mode != "none" else 0, stride=stride)
        for x, start in ((a, IMAGE), (b, IMAGE + -(-size // 1024) * 1024))
    ]
    per_step = [2 if mode != "none" else 2 * (place >> 16 & 0x3FFF) for place in places]
    issue = "".join(
        mma(
            _KINDS[element],
            _descriptor(n, element, element),
            places[0] + step * per_step[0],
            places[1] + step * per_step[1],
            accumulate=step > 0,
        )
        for step in range(width // _K[element])
    )
    name = f"{element}, {mode}" + (f", leading {leading}" if leading else "") + (f", gaps of {gap}" if gap else "")
    return _probe(name, image, issue, _expected(a, b, element, element))


# ---- M or N contiguous ----


def _mn_major(element: str, mode: str, *, which: tuple[int, int] = (1, 1), n: int = 64) -> Probe:
    rng = np.random.default_rng(4)
    k = 2 * _K[element]
    a, b = (operands.random_codes(rng, (rows, k), element) for rows in (_ROWS, n))
    image = Image()
    starts = (IMAGE, IMAGE + _ROWS * k * 32 // _K[element])
    places, steps = [], []
    for codes, start, transposed in zip((a, b), starts, which, strict=True):
        if transposed:
            place = image.mn_major(codes, element, mode, start)
            # The next 16 bf16 (or 32 bytes) of K are two (or four) groups of 8 rows on.
            group = place >> (16 if mode == "none" else 32) & 0x3FFF
            steps.append(group * _K[element] // (4 if mode == "128B/32B" else 8))
        else:
            place = image.k_major(codes, element, "64B", start)
            steps.append(2)
        places.append(place)
    issue = "".join(
        mma(
            _KINDS[element],
            _descriptor(n, element, element, transpose=which),
            places[0] + step * steps[0],
            places[1] + step * steps[1],
            accumulate=step > 0,
        )
        for step in range(2)
    )
    sides = {(1, 1): "A and B", (0, 1): "B"}[which]
    return _probe(f"{element}, {mode}, {sides}", image, issue, _expected(a, b, element, element))


# ---- small elements ----


def _padded(a_element: str, b_element: str) -> Probe:
    """4- and 6-bit elements of kind::f8f6f4, sixteen of them in 16 bytes."""
    rng = np.random.default_rng(5)
    n = 16
    a, b = operands.random_codes(rng, (_ROWS, 32), a_element), operands.random_codes(rng, (n, 32), b_element)
    image = Image()
    issue = mma(
        "f8f6f4",
        _descriptor(n, a_element, b_element),
        image.k_major(a, a_element, "32B", IMAGE),
        image.k_major(b, b_element, "32B", IMAGE + 8192),
    )
    return _probe(f"{a_element} and {b_element}", image, issue, _expected(a, b, a_element, b_element))


def _descriptor_bit() -> Probe:
    """Bit 12 of the descriptor of kind::mxf4, which is reserved and which compiled kernels set."""
    image, tensor, n = Image(), Tensor(8), 8
    tensor.scales(operands.power(np.zeros((_ROWS, 4), int), "ue4m3"), 0)
    tensor.scales(operands.power(np.zeros((n, 4), int), "ue4m3"), 4)
    places = [
        image.k_major(operands.ones(rows, 64, "e2m1"), "e2m1", "32B", start, dense=True)
        for rows, start in ((_ROWS, IMAGE), (n, IMAGE + 8192))
    ]
    issue = mma(
        NVF4.kind, NVF4.descriptor(_ROWS, n) | 1 << 12, *places, scales=(_SFA, _SFB), vector=NVF4.vector
    )  # fmt: skip
    return _probe("bit 12", image, issue, np.full((n, _ROWS), 64, np.float32), tensor.words)


def _negated(bits: tuple[int, int]) -> Probe:
    rng = np.random.default_rng(6)
    n = 16
    a, b = (operands.random_codes(rng, (rows, 32), "e4m3") for rows in (_ROWS, n))
    image = Image()
    descriptor = _descriptor(n, "e4m3", "e4m3") | bits[0] << 13 | bits[1] << 14
    issue = mma(
        "f8f6f4", descriptor, image.k_major(a, "e4m3", "32B", IMAGE), image.k_major(b, "e4m3", "32B", IMAGE + 8192)
    )
    # Sums that cancel are +0.
    expected = _expected(a, b, "e4m3", "e4m3") * np.float32(1 if bits in ((0, 0), (1, 1)) else -1) + np.float32(0)
    return _probe(f"bits {bits}", image, issue, expected)


QUESTIONS = (
    Question(
        "Where are the FP4 elements of a K-major operand with swizzling?",
        "Row r, byte b at start + r // 8 * stride + r % 8 * span + b, whose bits 4.. are then exclusive-ored with bits "
        "7.. of the absolute address. So a step of K64 is 32 bytes further on in the start address, inside the "
        "pattern, and patterns of 64 and 32 bytes start at multiples of 512 and 256 bytes. Low nibble first.",
        "ISA 9.7.16.3.3 (canonical layouts) and 9.7.16.10.6; NVIDIA's NVFP4 GEMM gives right results only this way.",
        "The descriptors and the K steps of Q K (64-byte rows at D = 128) and of P V.",
        tuple(_fp4_steps(mode) for mode in _SPANS),
    ),
    Question(
        "Where are the elements of other K-major operands?",
        "As those of FP4. The leading offset is not used with swizzling; without, it is the distance of 16-byte "
        "columns.",
        "ISA 9.7.16.3 (strides); Hopper is asked the same of wgmma by tests/emulator/kernels/products.py.",
        "Descriptors of FP8 P V, of BF16 fall-backs and of the gradient products.",
        (
            *(_k_major(element, mode) for element in ("bf16", "e4m3") for mode in ("none", "32B", "64B", "128B")),
            _k_major("tf32", "128B"),
            _k_major("e4m3", "128B", leading=4096),
            _k_major("e4m3", "64B", gap=1024),
            _k_major("bf16", "none", gap=128),
        ),
    ),
    Question(
        "Where are the elements of operands whose M or N is contiguous?",
        "Rows of K of `span` bytes of M or N, 8 of them in a pattern; patterns along K are `stride` apart, chunks of "
        "`span` bytes along M or N `leading` apart (without swizzling the two change roles). 128-byte swizzling with "
        "32-byte atoms has 4 rows in a pattern.",
        "ISA 9.7.16.3.1.1 and .3.3; NVIDIA's FMHA (V in bf16, 128B) gives right results only this way. 64B, 32B, "
        "none and the 32-byte atoms rest on the ISA's text alone.",
        "V of FP8 and BF16 P V, dO and Q of the gradient products.",
        (
            *(_mn_major("bf16", mode) for mode in ("none", "32B", "64B", "128B")),
            _mn_major("bf16", "128B", which=(0, 1)),
            *(_mn_major("e4m3", mode, which=(0, 1)) for mode in ("64B", "128B")),
            _mn_major("e4m3", "none"),
            _mn_major("tf32", "128B/32B"),
        ),
    ),
    Question(
        "How do 4- and 6-bit elements of kind::f8f6f4 lie in shared memory?",
        "Sixteen of them at the start of each 16 bytes, the lowest bits first; the padding is not read.",
        "ISA 9.7.16.10.4.4 (figures).",
        "Nothing: our kernels give FP4 to the packed kinds alone.",
        (_padded("e2m1", "e4m3"), _padded("e4m3", "e2m1"), _padded("e3m2", "e2m1")),
    ),
    Question(
        "Is bit 12 of the descriptor of kind::mxf4nvf4 ignored?",
        "Yes.",
        "ISA table 44 (reserved, 0); CuTe DSL's primitives set it.",
        "The descriptor that the kernels build.",
        (_descriptor_bit(),),
    ),
    Question(
        "What do the bits that negate A and B do?",
        "Each changes the sign of the product; both together do nothing.",
        "ISA table 42.",
        "Nothing: our kernels do not set them.",
        (_negated((1, 0)), _negated((0, 1)), _negated((1, 1))),
    ),
)
