"""What an MMA does with values: sums, rounding, NaN, infinities, subnormal numbers."""

import numpy as np

from tests.emulator.blackwell import operands
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

_KINDS = {"bf16": "f16", "f16": "f16", "tf32": "tf32", "e4m3": "f8f6f4", "e5m2": "f8f6f4", "e2m1": "f8f6f4"}
_K = {"bf16": 16, "f16": 16, "tf32": 8}
_SFA, _SFB = 256, 260
_ROW = np.arange(128)


def _product(
    name: str,
    element: str,
    a: np.ndarray,
    b: np.ndarray,
    expected: np.ndarray,
    *,
    before: np.ndarray | None = None,
    d: int = 1,
) -> Probe:
    """D, (N, 128), of (128, K) and (N, K) codes in one instruction; `before` is D beforehand."""
    n, image = len(b), Image()
    a_place = image.k_major(a, element, "32B", IMAGE)
    b_place = image.k_major(b, element, "32B", IMAGE + 4096)
    code = layouts.FORMAT_FIELDS[element]
    descriptor = layouts.instruction_descriptor(128, n, code, code, d=d)
    issue = mma(_KINDS[element], descriptor, a_place, b_place, accumulate=before is not None)
    body = fill_shared("image", image.size)
    body += fill_tensor("words", 0, n) if before is not None else ""
    body += one_thread(issue + commit()) + wait() + copy_tensor("d", 0, n)
    names = ("image", "d") + (("words",) if before is not None else ())
    return Probe(
        name,
        program(dict.fromkeys(names, "pointer"), body),
        (image.data, np.zeros_like(expected), *(() if before is None else (before.view(np.uint32),))),
        {1: expected},
        shared_bytes=IMAGE + image.size,
    )


def _scaled(
    name: str, form: Form, a: np.ndarray, b: np.ndarray, sfa: np.ndarray, sfb: np.ndarray, expected: np.ndarray
) -> Probe:
    """The same for a block-scaled kind and codes of scale factors."""
    n, image, tensor = len(b), Image(), Tensor(8)
    tensor.scales(sfa, 0)
    tensor.scales(sfb, 4)
    a_place = image.k_major(a, form.element, "32B", IMAGE, dense=form.dense)
    b_place = image.k_major(b, form.element, "32B", IMAGE + 4096, dense=form.dense)
    issue = mma(form.kind, form.descriptor(128, n), a_place, b_place, scales=(_SFA, _SFB), vector=form.vector)
    body = fill_shared("image", image.size) + fill_tensor("words", _SFA, 8)
    body += one_thread(issue + commit()) + wait() + copy_tensor("d", 0, n)
    return Probe(
        name,
        program(dict.fromkeys(("image", "d", "words"), "pointer"), body),
        (image.data, np.zeros_like(expected), tensor.words),
        {1: expected},
        shared_bytes=IMAGE + image.size,
    )


def _alike(values: np.ndarray, n: int = 16) -> np.ndarray:
    """D whose columns are alike."""
    with np.errstate(over="ignore"):
        return np.tile(np.asarray(values).astype(np.float32), (n, 1))


def _bf16(values: np.ndarray) -> np.ndarray:
    return operands.codes_of(values, "bf16")


def _rows(terms: dict[int, np.ndarray], k: int = 16) -> np.ndarray:
    """(128, K) values: of some positions of K, the values of all rows."""
    values = np.zeros((128, k))
    for position, column in terms.items():
        values[:, position] = column
    return values


# ---- how wide a sum is ----


def _width_bf16(positions: tuple[int, int, int]) -> Probe:
    """2**e + 1 - 2**e with e = row % 32, the three terms at some positions of K."""
    big = 2.0 ** (_ROW % 32)
    a = _rows(dict(zip(positions, (big, np.ones(128), -big), strict=True)))
    return _product(f"bf16, terms {positions}", "bf16", _bf16(a), _bf16(np.ones((16, 16))), _alike(np.ones(128)))


def _width_with_accumulators() -> Probe:
    """D = 2**e, and products 1 and -2**e."""
    big = 2.0 ** (_ROW % 32)
    a = _rows({0: np.ones(128), 5: -big})
    return _product(
        "bf16, D cancels", "bf16", _bf16(a), _bf16(np.ones((16, 16))), _alike(np.ones(128)), before=_alike(big)
    )


def _width_e4m3() -> Probe:
    """2**8 + 2**(8 - e) - 2**8 with e = row % 17; in odd columns another 2**16 lies between the terms."""
    a = _rows({0: np.full(128, 256.0), 1: 2.0 ** (8 - _ROW % 17), 31: np.full(128, -256.0)}, 32)
    b = np.ones((16, 32))
    b[1::2, [0, 31]], b[1::2, 1] = 256.0, 2.0**-8
    expected = operands.words_of(a @ b.T)
    return _product("e4m3", "e4m3", operands.codes_of(a, "e4m3"), operands.codes_of(b, "e4m3"), expected)


def _width_of_blocks() -> Probe:
    """16 (2**e + 1 - 2**e), where the terms are blocks of an NVFP4 row that have scale factors of their own."""
    e = _ROW % 15
    a = operands.codes_of(np.repeat(np.array([[1.0, 1.0, -1.0, 0.0]]), 16, axis=1).repeat(128, axis=0), "e2m1")
    b = operands.ones(8, 64, "e2m1")
    codes = np.stack([operands.power(e - 6, "ue4m3"), operands.power(e * 0 - 6, "ue4m3")], axis=1)[:, [0, 1, 0, 0]]
    sfb = operands.power(np.full((8, 4), 6), "ue4m3")
    return _scaled("NVFP4", NVF4, a, b, codes, sfb, _alike(np.full(128, 16.0), 8))


# ---- rounding ----

_TERMS = np.array(
    [
        (1, 2.0**-24, 0), (1, 2.0**-24, 2.0**-31), (1, 2.0**-24, 2.0**-40), (1, 2.0**-25, 2.0**-26),
        (1, 2.0**-23, 2.0**-24), (1, 2.0**-23, 2.0**-25), (1, -(2.0**-25), 0), (1, -(2.0**-25), -(2.0**-32)),
        (1, -(2.0**-26), 0), (-1, 2.0**-26, 0), (-1, -(2.0**-24), -(2.0**-31)), (-1, -(2.0**-23), -(2.0**-24)),
        (1.5, 2.0**-24, 2.0**-31), (3, 2.0**-23, 0), (3, 2.0**-22, 2.0**-23), (2.0**20, 2.0**-4, 2.0**-12),
    ]
)  # fmt: skip


def _rounding(in_accumulators: bool) -> Probe:
    """Sums that rounding to nearest even, truncation, and dropping of the small terms tell apart."""
    terms = _TERMS[_ROW % len(_TERMS)]
    total = terms.sum(axis=1)
    a = _rows({0: terms[:, 0] * (not in_accumulators), 3: terms[:, 1], 9: terms[:, 2]})
    before = _alike(terms[:, 0]) if in_accumulators else None
    name = "D and two products" if in_accumulators else "three products"
    return _product(name, "bf16", _bf16(a), _bf16(np.ones((16, 16))), _alike(total), before=before)


def _half_sum() -> Probe:
    """2048 + 1 + 1 with FP16 accumulators."""
    a = _rows({0: np.full(128, 2048.0), 1: np.ones(128), 2: np.ones(128)})
    codes, ones = operands.codes_of(a, "f16"), operands.ones(16, 16, "f16")
    probe = _product("FP16 accumulators", "f16", codes, ones, _alike(np.zeros(128)), d=0)
    words = np.full((16, 128), int(np.float16(2050).view(np.uint16)), np.uint32)
    return Probe(probe.name, probe.ptx, (probe.arguments[0], words * 0), {1: words}, shared_bytes=probe.shared_bytes)


def _tf32() -> Probe:
    """Operands with bits below those of TF32."""
    low = np.array([0, 1, 0x0FFF, 0x1000, 0x1001, 0x1FFF, 0x3000, 0x3FFF], np.uint32)
    bits = np.uint32(0x3F800000) + low[_ROW % 8]
    a = np.zeros((128, 8), np.uint32)
    a[:, 2] = bits
    expected = (bits & np.uint32(0xFFFFE000)).view(np.float32)
    return _product("tf32", "tf32", a, operands.ones(16, 8, "tf32"), _alike(expected))


# ---- special values ----


def _special_bf16() -> Probe:
    inf, nan, big = np.inf, np.nan, 2.0**127
    terms = np.array(
        [
            (inf, 1, 0), (inf, -inf, 0), (-inf, 1, 0), (nan, 1, 0), (0, nan, 0), (big, big, 0), (big, big, -big),
            (-big, -big, 0), (big, 2.0**103, 0), (2.0**-126, 2.0**-133, 0), (2.0**-133, 0, 0), (-(2.0**-133), 0, 0),
            (2.0**-130, -(2.0**-131), 0), (0, -0.0, 0), (-0.0, -0.0, -0.0), (1, -1, 0),
        ]
    )  # fmt: skip
    terms = terms[_ROW % len(terms)]
    with np.errstate(invalid="ignore"):
        total = terms.sum(axis=1) + 0.0
    a = _rows({0: terms[:, 0], 1: terms[:, 1], 2: terms[:, 2]})
    return _product("bf16", "bf16", _bf16(a), _bf16(np.ones((16, 16))), _alike(total))


def _zero_times_infinity() -> Probe:
    b = np.zeros((16, 16))
    b[:, 1] = 1
    a = _rows({0: np.where(_ROW % 2, np.inf, 1.0), 1: np.ones(128)})
    expected = np.where(_ROW % 2, np.nan, 1.0)
    return _product("bf16, infinity times zero", "bf16", _bf16(a), _bf16(b), _alike(expected))


def _special_accumulators() -> Probe:
    """D that is NaN, infinite or subnormal, to which products are added."""
    cases = np.array(
        [
            (np.nan, 1), (np.inf, 1), (np.inf, -np.inf), (2.0**-140, 0), (-(2.0**-149), 0), (2.0**-140, 2.0**-133),
            (-0.0, 0), (np.float32(3.4028235e38), 2.0**104), (np.float32(3.4028235e38), 2.0**102),
        ]
    )  # fmt: skip
    cases = cases[_ROW % len(cases)]
    with np.errstate(invalid="ignore"):
        total = cases.sum(axis=1)
    return _product(
        "D", "bf16", _bf16(_rows({0: cases[:, 1]})), _bf16(np.ones((16, 16))), _alike(total), before=_alike(cases[:, 0])
    )


def _all_codes(element: str) -> Probe:
    """Column j is 32 times the value of code j of B."""
    n = {"e2m1": 16, "e2m3": 64}.get(element, 256)
    b = np.repeat(np.arange(n, dtype=np.uint8)[:, None], 32, axis=1)
    values = layouts.decoded(b, element)[:, 0]
    expected = np.repeat((32 * values).astype(np.float32)[:, None], 128, axis=1)
    expected[expected == 0] = 0.0
    return _product(element, element, operands.ones(128, 32, element), b, expected)


def _nan_scales(form: Form) -> Probe:
    """Rows in which some blocks have a NaN scale factor; in odd rows all elements of A are zero."""
    sfa = operands.power(np.zeros((128, form.factors), int), form.scale)
    nan = 0x7F if form.scale == "ue4m3" else 0xFF
    sfa[_ROW % 4 > 1, form.factors - 1] = nan
    a = operands.codes_of(np.repeat((_ROW % 2 == 0)[:, None] * 1.0, form.k, axis=1), form.element)
    expected = np.where(_ROW % 4 > 1, np.nan, np.where(_ROW % 2 == 0, form.k, 0.0))
    return _scaled(
        f"{form.kind} {form.scale}",
        form,
        a,
        operands.ones(8, form.k, form.element),
        sfa,
        operands.power(np.zeros((8, form.factors), int), form.scale),
        _alike(expected, 8),
    )


def _extreme_scales() -> Probe:
    """Products of UE8M0 scale factors that FP32 cannot hold; in odd rows all elements of A are zero."""
    exponents = np.array([127, 100, 20, -3, -40, -60, -90, -127])[_ROW // 2 % 8]
    others = np.array([127, -127, 0, -89, 60, 27, -26, -60])
    a = operands.codes_of(np.repeat((_ROW % 2 == 0)[:, None] * 1.0, 32, axis=1), "e4m3")
    sums = exponents[None, :] + others[:, None]
    expected = np.where(_ROW % 2 == 0, np.ldexp(32.0, sums), 0.0)
    with np.errstate(over="ignore"):
        expected = expected.astype(np.float32)
    sfa, sfb = (operands.power(x[:, None], "ue8m0") for x in (exponents, others))
    return _scaled("UE8M0", MXF8, a, operands.ones(8, 32, "e4m3"), sfa, sfb, expected)


QUESTIONS = (
    Question(
        "How wide is the sum of an instruction?",
        "Exact: small terms survive the cancellation of larger ones, whatever lies between them.",
        "Reading alone: the ISA leaves width and order open. tests/emulator/kernels/products.py has what Hopper does.",
        "Nothing in the kernels; the error bounds of P V and Q K against the reference, and of tests that compare.",
        (
            _width_bf16((0, 1, 2)),
            _width_bf16((0, 8, 15)),
            _width_bf16((14, 15, 0)),
            _width_with_accumulators(),
            _width_e4m3(),
            _width_of_blocks(),
        ),
    ),
    Question(
        "How is D rounded?",
        "Products and old D are added exactly and rounded once, to nearest even; FP16 accumulators too.",
        "Reading alone: the ISA leaves it open.",
        "Nothing in the kernels; a truncating sum has a bias that the error bounds have to cover.",
        (_rounding(True), _rounding(False), _half_sum()),
    ),
    Question(
        "What happens to the low bits of TF32 operands?",
        "They are cut off.",
        "A TF32 example of NVIDIA agrees to 2e-6 with cut operands.",
        "Nothing: our kernels do not use TF32.",
        (_tf32(),),
    ),
    Question(
        "What do NaN, infinities, zeros and subnormal numbers give?",
        "What IEEE 754 says: subnormal operands, products and accumulators are kept, 0 times infinity is NaN, sums "
        "that cancel are +0, too large sums are infinite.",
        "Reading alone.",
        "Masked scores are finite in the kernels, so nothing; if subnormals were flushed, error bounds near zero.",
        (_special_bf16(), _zero_times_infinity(), _special_accumulators()),
    ),
    Question(
        "What are the values of all FP8 and FP4 codes?",
        "Those of ml_dtypes: E4M3 has NaN at 0x7F and 0xFF and no infinities, E5M2 is like IEEE 754.",
        "OCP formats, ISA 5.2.3.",
        "Nothing.",
        (_all_codes("e4m3"), _all_codes("e5m2"), _all_codes("e2m1")),
    ),
    Question(
        "What does a NaN scale factor do?",
        "The row is NaN, even where all elements of the block are zero.",
        "Reading alone.",
        "Padding: rows and keys past the end are zeros with zero scales, never NaN; blocks of NaN inputs.",
        (_nan_scales(NVF4), _nan_scales(operands.MXF4), _nan_scales(MXF8)),
    ),
    Question(
        "What if the product of two scale factors is beyond FP32?",
        "Elements and scale factors are multiplied exactly: results are infinite, subnormal or zero only as they are, "
        "and zero elements give zero.",
        "Reading alone.",
        "Nothing for NVFP4, whose scales are small; MXFP4 with inputs near the ends of bfloat16.",
        (_extreme_scales(),),
    ),
)
