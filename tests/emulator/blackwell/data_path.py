"""Where A and D of an MMA lie in tensor memory."""

import dataclasses

import numpy as np

from cuda.emulator.errors import DescriptorFaultError
from tests.emulator.blackwell import operands
from tests.emulator.blackwell.fragments import store_registers
from tests.emulator.blackwell.operands import MXF8, NVF4, Form, Image, Tensor
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

_KINDS = {"bf16": "f16", "f16": "f16", "tf32": "tf32", "e4m3": "f8f6f4", "e2m1": "f8f6f4", "e2m3": "f8f6f4"}
_K = {"bf16": 16, "f16": 16, "tf32": 8, "e4m3": 32, "e2m1": 32, "e2m3": 32}
_A, _SFA, _SFB = 256, 288, 296
_UNTOUCHED = 0x12345678


def _descriptor(m: int, n: int, a: str, b: str, d: int = 1) -> int:
    return layouts.instruction_descriptor(m, n, layouts.FORMAT_FIELDS[a], layouts.FORMAT_FIELDS[b], d=d)


def _expected(a: np.ndarray, b: np.ndarray, a_element: str, b_element: str) -> np.ndarray:
    return operands.product(layouts.decoded(a, a_element), layouts.decoded(b, b_element))


def _probe(name: str, image: Image, words: np.ndarray, first: int, issue: str, expected: np.ndarray) -> Probe:
    """D, (N, 128), from column 0 on; `words` go to the columns from `first` on."""
    body = (
        fill_shared("image", image.size)
        + fill_tensor("words", first, len(words))
        + one_thread(issue + commit())
        + wait()
        + copy_tensor("d", 0, len(expected))
    )
    return Probe(
        name,
        program(dict.fromkeys(("image", "words", "d"), "pointer"), body),
        (image.data, words, np.zeros_like(expected)),
        {2: expected},
        shared_bytes=IMAGE + image.size,
    )


# ---- A in tensor memory ----


def _a_operand(a_element: str, b_element: str, steps: int = 2) -> Probe:
    rng = np.random.default_rng(1)
    k, n = _K[a_element], 16
    a = operands.random_codes(rng, (128, steps * k), a_element)
    b = operands.random_codes(rng, (n, steps * k), b_element)
    tensor, image = Tensor(512), Image()
    for step in range(steps):
        tensor.operand(a[:, step * k : step * k + k], a_element, _A + 8 * step)
    place = image.k_major(b, b_element, "64B", IMAGE)
    issue = "".join(
        mma(
            _KINDS[a_element],
            _descriptor(128, n, a_element, b_element),
            _A + 8 * step,
            place + 2 * step,
            accumulate=step > 0,
            tensor_memory_a=True,
        )
        for step in range(steps)
    )
    expected = operands.words_of(_expected(a, b, a_element, b_element))
    words = tensor.words[_A : _A + 8 * steps].copy()
    return _probe(f"{a_element} times {b_element}", image, words, _A, issue, expected)


def _scaled_a_operand(form: Form, element: str) -> Probe:
    rng = np.random.default_rng(2)
    n, steps = 16, 2
    a = operands.random_codes(rng, (128, steps * form.k), element)
    b = operands.random_codes(rng, (n, steps * form.k), form.element)
    sfa, sfb = (operands.power(rng.integers(-2, 3, (rows, steps * form.factors)), form.scale) for rows in (128, n))
    tensor, image = Tensor(512), Image()
    place = image.k_major(b, form.element, "64B", IMAGE, dense=form.dense)
    issue = ""
    for step in range(steps):
        tensor.operand(a[:, step * form.k : (step + 1) * form.k], element, _A + 8 * step, dense=form.dense)
        part = slice(step * form.factors, (step + 1) * form.factors)
        tensor.scales(sfa[:, part], _SFA + 4 * step)
        tensor.scales(sfb[:, part], _SFB + 4 * step)
        descriptor = form.descriptor(128, n)
        if not form.dense:
            descriptor += (layouts.FORMAT_FIELDS[element] - layouts.FORMAT_FIELDS[form.element]) << 7
        scales = (_SFA + 4 * step, _SFB + 4 * step)
        issue += mma(
            form.kind, descriptor, _A + 8 * step, place + 2 * step, accumulate=step > 0, scales=scales,
            vector=form.vector, tensor_memory_a=True,
        )  # fmt: skip
    expected = operands.product(
        layouts.decoded(a, element),
        layouts.decoded(b, form.element),
        *(operands.scale_values(x, form.scale) for x in (sfa, sfb)),
    )
    words = tensor.words[_A : _A + 48].copy()
    return _probe(f"{form.kind}: {element} times {form.element}", image, words, _A, issue, operands.words_of(expected))


# ---- D ----


def _accumulators(m: int, lane: int, n: int, tensor_memory_a: bool = False, accumulate: bool = False) -> Probe:
    """All 128 lanes of D after an MMA of M rows whose D starts at a lane."""
    rng = np.random.default_rng(3)
    a, b = (operands.random_codes(rng, (rows, 16), "bf16") for rows in (m, n))
    rows = np.arange(m)
    lanes = rows if m == 128 else rows // 16 * 32 + rows % 16 + lane
    tensor, image = Tensor(512, _UNTOUCHED), Image()
    b_place = image.k_major(b, "bf16", "32B", IMAGE)
    a_place = image.k_major(a, "bf16", "32B", IMAGE + 8192)
    tensor.operand(a, "bf16", n, lanes)
    before = (rng.integers(-8, 9, (n, 128)) * 0.5).astype(np.float32)
    tensor.words[:n] = before.view(np.uint32)
    issue = mma(
        "f16",
        _descriptor(m, n, "bf16", "bf16"),
        lane << 16 | n if tensor_memory_a else a_place,
        b_place,
        lane << 16,
        tensor_memory_a=tensor_memory_a,
        accumulate=accumulate,
    )
    expected = before.copy()
    expected[:, lanes] = operands.words_of(_expected(a, b, "bf16", "bf16")) + accumulate * before[:, lanes]
    where = ", A in tensor memory" if tensor_memory_a else ""
    name = f"M={m}, lane {lane}{where}{', accumulating' if accumulate else ''}"
    return _probe(name, image, tensor.words[: n + 8].copy(), 0, issue, expected)


def _collected() -> Probe:
    """Two MMAs with the same A, which the first keeps in the collector buffer."""
    rng = np.random.default_rng(8)
    n, image = 16, Image()
    a, b, c = (operands.random_codes(rng, (rows, 16), "bf16") for rows in (128, n, n))
    places = [image.k_major(x, "bf16", "32B", start) for x, start in ((a, IMAGE + 1024), (b, IMAGE), (c, IMAGE + 512))]
    issue = ""
    for i, hint in enumerate(("fill", "lastuse")):
        one = mma("f16", _descriptor(128, n, "bf16", "bf16"), places[0], places[1 + i], n * i)
        issue += one.replace("kind::f16", f"kind::f16.collector::a::{hint}")
    expected = np.concatenate([operands.words_of(_expected(a, x, "bf16", "bf16")) for x in (b, c)])
    return _probe("fill and lastuse", image, np.zeros((1, 128), np.uint32), 64, issue, expected)


def _odd_width() -> Probe:
    probe = _accumulators(128, 0, 8)
    return dataclasses.replace(probe, name="N=8", fault=DescriptorFaultError)


def _half_accumulators() -> Probe:
    """FP16 accumulators, twice, read with pack::16b: two columns in a register."""
    rng = np.random.default_rng(4)
    n = 16
    a, b = (operands.random_codes(rng, (rows, 16), "f16") for rows in (128, n))
    image = Image()
    places = image.k_major(a, "f16", "32B", IMAGE + 1024), image.k_major(b, "f16", "32B", IMAGE)
    once = mma("f16", _descriptor(128, n, "f16", "f16", d=0), *places)
    twice = mma("f16", _descriptor(128, n, "f16", "f16", d=0), *places, accumulate=True)
    registers = [f"%r{32 + i}" for i in range(n // 2)]
    body = (
        fill_shared("image", image.size)
        + one_thread(once + twice + commit())
        + wait()
        + f"tcgen05.ld.sync.aligned.32x32b.x8.pack::16b.b32 {{{', '.join(registers)}}}, [%own];\n"
        + "tcgen05.wait::ld.sync.aligned;\n"
        + store_registers(registers)
    )
    values = (2 * _expected(a, b, "f16", "f16")).astype(np.float16)
    expected = np.ascontiguousarray(values).view(np.uint32).T.copy()
    return Probe(
        "FP16",
        program(dict.fromkeys(("image", "out"), "pointer"), body),
        (image.data, np.zeros_like(expected)),
        {1: expected},
        shared_bytes=IMAGE + image.size,
    )


def _masked() -> Probe:
    """Lanes whose bits are set keep what they hold."""
    rng = np.random.default_rng(5)
    n, masks = 16, (0x80000001, 0xFFFF0000, 0x0F0F0F0F, 0)
    a, b = (operands.random_codes(rng, (rows, 16), "bf16") for rows in (128, n))
    image = Image()
    places = image.k_major(a, "bf16", "32B", IMAGE + 1024), image.k_major(b, "bf16", "32B", IMAGE)
    before = (rng.integers(-8, 9, (n, 128)) * 0.5).astype(np.float32)
    kept = np.unpackbits(np.array(masks, np.uint32).view(np.uint8), bitorder="little").astype(bool)
    expected = np.where(kept, before, operands.words_of(_expected(a, b, "bf16", "bf16")))
    issue = mma("f16", _descriptor(128, n, "bf16", "bf16"), *places, masks=masks)
    return _probe("masks", image, before.view(np.uint32), 0, issue, expected)


def _scaled_accumulators(shift: int) -> Probe:
    rng = np.random.default_rng(6)
    n = 16
    a, b = (operands.random_codes(rng, (rows, 16), "bf16") for rows in (128, n))
    image = Image()
    places = image.k_major(a, "bf16", "32B", IMAGE + 1024), image.k_major(b, "bf16", "32B", IMAGE)
    before = rng.integers(-8, 9, (n, 128)).astype(np.float32) * 2**shift
    expected = operands.words_of(_expected(a, b, "bf16", "bf16")) + before / np.float32(2**shift)
    issue = mma("f16", _descriptor(128, n, "bf16", "bf16"), *places, accumulate=True, scale_d=shift)
    return _probe(f"2**-{shift}", image, before.view(np.uint32), 0, issue, expected)


def _shifted_operand() -> Probe:
    """D and A after an MMA with .ashift."""
    rng = np.random.default_rng(7)
    n = 16
    a, b = (operands.random_codes(rng, (rows, 16), "bf16") for rows in (128, n))
    image, tensor = Image(), Tensor(8)
    place = image.k_major(b, "bf16", "32B", IMAGE)
    tensor.operand(a, "bf16", 0)
    issue = mma("f16", _descriptor(128, n, "bf16", "bf16"), n, place, tensor_memory_a=True)
    after = tensor.words.reshape(8, 4, 32).copy()
    after[:, :, :-1] = after[:, :, 1:].copy()
    product = operands.words_of(_expected(a, b, "bf16", "bf16"))
    expected = np.concatenate([product.view(np.uint32), after.reshape(8, 128)])
    issue = issue.replace("kind::f16", "kind::f16.ashift")
    body = (
        fill_shared("image", image.size)
        + fill_tensor("words", n, 8)
        + one_thread(issue + commit())
        + wait()
        + copy_tensor("d", 0, n + 8)
    )
    return Probe(
        "ashift",
        program(dict.fromkeys(("image", "words", "d"), "pointer"), body),
        (image.data, tensor.words, np.zeros_like(expected)),
        {2: expected},
        shared_bytes=IMAGE + image.size,
    )


QUESTIONS = (
    Question(
        "How does A lie in tensor memory?",
        "Row r in lane r; K along the columns, from the low bits of a word up: eight packed FP4 (two to a byte, low "
        "nibble first), four FP8, two BF16, one TF32 in a column. A step of K is eight columns.",
        "ISA 9.7.16.10.4 (figures); NVIDIA's FMHA (BF16 and FP8 P) and a TF32 example give right results only this "
        "way. Packed FP4: ISA figure 204 and a published kernel (MrHuff/fp4-fa4).",
        "The order in which the softmax warps pack P.",
        (
            _scaled_a_operand(NVF4, "e2m1"),
            _scaled_a_operand(operands.MXF4, "e2m1"),
            _a_operand("e4m3", "e4m3"),
            _scaled_a_operand(MXF8, "e4m3"),
            _a_operand("bf16", "bf16"),
            _a_operand("tf32", "tf32"),
        ),
    ),
    Question(
        "How do 4- and 6-bit elements of A lie in tensor memory for kind::f8f6f4?",
        "One in a byte: 6 bits in bits 0..5, 4 bits in bits 2..5.",
        "ISA 9.7.16.10.4.3, whose figures were not seen: reading alone.",
        "Nothing: our kernels give FP4 to the packed kinds alone.",
        (_a_operand("e2m1", "e4m3"), _a_operand("e2m3", "e4m3"), _scaled_a_operand(MXF8, "e2m1")),
    ),
    Question(
        "Which lanes and columns hold D?",
        "Column j holds N = j. M = 128: row r in lane r. M = 64: row r in lane r // 16 * 32 + r % 16, or 16 lanes "
        "further if the address says lane 16; the other lanes keep what they hold. A in tensor memory has the same "
        "lanes.",
        "ISA 9.7.16.10.5 (layouts D and F); M = 128: NVIDIA's GEMM and FMHA. M = 64 is reading alone.",
        "M = 128: everything. M = 64: nothing, our kernels have no such tiles.",
        (
            _accumulators(128, 0, 24 + 8),
            _accumulators(128, 0, 16, accumulate=True),
            _accumulators(64, 0, 16),
            _accumulators(64, 16, 8),
            _accumulators(64, 16, 8, tensor_memory_a=True),
            _accumulators(64, 0, 8, accumulate=True),
        ),
    ),
    Question(
        "Where are FP16 accumulators?",
        "In the low half of a column each; they are read back with pack::16b.",
        "ISA 9.7.16.10.4.1 (figure).",
        "Nothing: our kernels accumulate in FP32.",
        (_half_accumulators(),),
    ),
    Question(
        "What do disable-output-lane and scale-input-d do?",
        "Bit i of the mask keeps lane i; the old D is multiplied by 2**-scale exactly.",
        "ISA 9.7.16.10.9.1.",
        "Nothing now; scale-input-d could replace a rescaling of O.",
        (_masked(), _scaled_accumulators(1), _scaled_accumulators(15)),
    ),
    Question(
        "What does .ashift do?",
        "After the product, the lanes of A move in each lane quadrant as by tcgen05.shift.",
        "ISA 9.7.16.10.9.1; the order of product and shift, and the direction, are reading alone.",
        "Nothing: our kernels do not use it.",
        (_shifted_operand(),),
    ),
    Question(
        "Do the hints of the collector buffer change results?",
        "No, as long as A stays as it was; the emulator always reads A anew.",
        "ISA 9.7.16.10.9.1.",
        "Nothing: compiled kernels say discard.",
        (_collected(),),
    ),
    Question(
        "May N be 8, 24, ... with M = 128 and without scale factors?",
        "The emulator refuses, as CUTLASS does. The hardware is asked for the product.",
        "CUTLASS asserts multiples of 16; ISA table 39 lists steps of 8.",
        "Nothing: N is at least 64.",
        (_odd_width(),),
    ),
)
