"""Scale factors in tensor memory: which bytes an MMA reads for which row, and what they mean."""

import numpy as np

from cuda.emulator.errors import MemoryFaultError
from tests.emulator.blackwell import operands
from tests.emulator.blackwell.operands import MXF4, MXF8, NVF4, NVF4_BLOCK32, NVF4_UE8M0, Form, Image, Tensor
from tests.emulator.blackwell.probe import (
    IMAGE,
    Probe,
    Question,
    commit,
    copy_tensor,
    everyone,
    fill_shared,
    fill_tensor,
    mma,
    one_thread,
    program,
    wait,
)

_ROWS = 128
# Columns: D from 0 on; then what the probe puts there.
_BASE, _A, _SFA, _SFB, _COLUMNS = 256, 256, 272, 280, 40


def _probe(
    name: str,
    form: Form,
    image: Image,
    tensor: Tensor,
    issue: str,
    expected: np.ndarray,
    *,
    before: str = "",
    fault: type | None = None,
    findings: frozenset[str] = frozenset(),
    arrays: tuple[np.ndarray, ...] = (),
) -> Probe:
    """D, (N, 128), after `issue`; `before` runs when shared and tensor memory are filled."""
    body = (
        fill_shared("image", image.size)
        + fill_tensor("words", _BASE, _COLUMNS)
        + before
        + one_thread(issue + commit())
        + wait()
        + copy_tensor("d", 0, len(expected))
    )
    parameters = {"image": "pointer", "words": "pointer", "d": "pointer"} | {
        f"x{i}": "pointer" for i in range(len(arrays))
    }
    return Probe(
        name,
        program(parameters, body),
        (image.data, tensor.words[_BASE : _BASE + _COLUMNS].copy(), np.zeros_like(expected), *arrays),
        {2: expected},
        shared_bytes=IMAGE + image.size,
        fault=fault,
        findings=findings,
    )


def _ones(form: Form, n: int) -> tuple[Image, int, int]:
    """A and B full of ones, and their descriptors."""
    image = Image()
    a = image.k_major(operands.ones(_ROWS, form.k, form.element), form.element, "32B", IMAGE, dense=form.dense)
    b = image.k_major(operands.ones(n, form.k, form.element), form.element, "32B", IMAGE + 8192, dense=form.dense)
    return image, a, b


def _all_ones(form: Form, n: int, tensor: Tensor, expected: np.ndarray, name: str, **options) -> Probe:
    image, a, b = _ones(form, n)
    issue = mma(form.kind, form.descriptor(_ROWS, n), a, b, scales=(_SFA, _SFB), vector=form.vector)
    return _probe(name, form, image, tensor, issue, expected, **options)


def _poison(form: Form) -> int:
    """A word of NaN scale factors."""
    return 0x7F7F7F7F if form.scale == "ue4m3" else 0xFFFFFFFF


def _rows(n: int, values: np.ndarray) -> np.ndarray:
    """D whose rows are constant."""
    return operands.words_of(np.repeat(values[:, None], n, axis=1))


# ---- which copy of A's scale factors ----

# What the emulator reports where copies differ.
_ASSUMED = frozenset({"assumption"})


def _distinct_copies(form: Form) -> Probe:
    """Every column and lane quadrant has a value of its own."""
    column, quadrant = np.divmod(np.arange(16), 4)
    exponent = quadrant + 4 * (column % 2) - 3
    codes = operands.power(exponent, form.scale) + np.where(column < 2, 0, 4 if form.scale == "ue4m3" else 8)
    tensor = Tensor(512)
    tensor.scales(operands.power(np.zeros((8, form.factors), int), form.scale), _SFB)
    copies = codes.reshape(4, 4).astype(np.uint32) * np.uint32(0x01010101)
    tensor.words[_SFA : _SFA + 4] = np.repeat(copies, 32, axis=1)
    own = operands.scale_values(np.diagonal(codes.reshape(4, 4)).astype(np.uint8), form.scale)
    expected = form.k * np.repeat(own, 32)
    name = f"{form.kind} {form.vector} {form.scale}: distinct copies"
    return _all_ones(form, 8, tensor, _rows(8, expected), name, findings=_ASSUMED)


def _own_quadrant_only(form: Form, tensor_memory_a: bool) -> Probe:
    """Warp w stores the scale factors of its own rows to column w with tcgen05.st; the rest are NaN."""
    rng = np.random.default_rng(1)
    n = 16
    a, b = (operands.random_codes(rng, (rows, form.k), form.element) for rows in (_ROWS, n))
    sfa = operands.power(rng.integers(-3, 4, (_ROWS, form.factors)), form.scale)
    sfb = operands.power(rng.integers(-1, 2, (n, form.factors)), form.scale)
    tensor, image = Tensor(512, _poison(form)), Image()
    tensor.scales(sfb, _SFB)
    tensor.operand(a, form.element, _A, dense=form.dense)
    a_place = image.k_major(a, form.element, "32B", IMAGE, dense=form.dense)
    b_place = image.k_major(b, form.element, "32B", IMAGE + 8192, dense=form.dense)
    words = np.zeros((_ROWS, 4), np.uint8)
    words[:, : form.factors] = sfa
    store = f"""
mul.wide.u32 %d0, %thread, 4;
add.u64 %d0, %x0, %d0;
ld.global.b32 %r2, [%d0];
add.u32 %r3, %own, %warp;
tcgen05.st.sync.aligned.32x32b.x1.b32 [%r3+{_SFA}], {{%r2}};
tcgen05.wait::st.sync.aligned;
{everyone()}"""
    issue = mma(
        form.kind,
        form.descriptor(_ROWS, n),
        _A if tensor_memory_a else a_place,
        b_place,
        scales=(_SFA, _SFB),
        vector=form.vector,
        tensor_memory_a=tensor_memory_a,
    )
    values = [operands.scale_values(x, form.scale) for x in (sfa, sfb)]
    decoded = [_decoded(x, form) for x in (a, b)]
    where = "tensor" if tensor_memory_a else "shared"
    return _probe(
        f"{form.kind} {form.vector}: stored by each warp, A in {where} memory",
        form,
        image,
        tensor,
        issue,
        operands.words_of(operands.product(*decoded, *values)),
        before=store,
        arrays=(words.view(np.uint32).reshape(-1),),
        findings=_ASSUMED,
    )


def _decoded(codes: np.ndarray, form: Form) -> np.ndarray:
    return operands.layouts.decoded(codes, form.element)


# ---- which copy of B's scale factors ----


def _differing_b_copies(form: Form) -> Probe:
    """The copy in lane quadrant q scales by 2**q, if the rows of a quadrant read their own copy."""
    tensor = Tensor(512)
    tensor.scales(operands.power(np.zeros((_ROWS, form.factors), int), form.scale), _SFA)
    for quadrant in range(4):
        codes = operands.power(np.full((8, form.factors), quadrant), form.scale)
        tensor.scales(codes, _SFB, quadrants=(quadrant,))
    expected = form.k * 2.0 ** (np.arange(_ROWS) // 32)
    return _all_ones(
        form, 8, tensor, _rows(8, expected), f"{form.kind} {form.vector}: copies differ", fault=MemoryFaultError
    )


def _b_in_one_quadrant(quadrant: int) -> Probe:
    """NaN in one lane quadrant reaches its rows, if these read their own copy."""
    tensor = Tensor(512)
    tensor.scales(operands.power(np.zeros((_ROWS, 4), int), "ue4m3"), _SFA)
    tensor.scales(operands.power(np.zeros((8, 4), int), "ue4m3"), _SFB)
    tensor.words[_SFB, 32 * quadrant : 32 * quadrant + 32] = _poison(NVF4)
    row = np.arange(_ROWS)
    expected = np.where(row // 32 == quadrant, np.nan, 64.0)
    return _all_ones(NVF4, 8, tensor, _rows(8, expected), f"NaN in quadrant {quadrant}", fault=MemoryFaultError)


# ---- columns and bytes ----


def _addressing(form: Form, n: int, ids: tuple[int, int]) -> Probe:
    """Random operands; all bytes of the scale columns that should not be read scale by other powers of two."""
    rng = np.random.default_rng(n + 10 * ids[0] + ids[1])
    a, b = (operands.random_codes(rng, (rows, form.k), form.element) for rows in (_ROWS, n))
    tensor, image = Tensor(512), Image()
    bytes_of = [
        operands.power(rng.integers(-width, width + 1, (rows, 4)), form.scale)
        for rows, width in ((_ROWS, 2), (32 * -(-n // 32), 1))
    ]
    tensor.scales(bytes_of[0], _SFA)
    tensor.scales(bytes_of[1], _SFB)
    sfa, sfb = (
        operands.scale_values(codes[:rows, first : first + form.factors].copy(), form.scale)
        for codes, rows, first in zip(bytes_of, (_ROWS, n), ids, strict=True)
    )
    issue = mma(
        form.kind,
        form.descriptor(_ROWS, n, ids),
        image.k_major(a, form.element, "32B", IMAGE, dense=form.dense),
        image.k_major(b, form.element, "32B", IMAGE + 8192, dense=form.dense),
        scales=(_SFA, _SFB),
        vector=form.vector,
    )
    expected = operands.words_of(operands.product(_decoded(a, form), _decoded(b, form), sfa, sfb))
    return _probe(f"{form.kind} {form.vector}: N={n}, ids {ids}", form, image, tensor, issue, expected)


def _address_bits(bits: int) -> Probe:
    """The byte that a compiler keeps in bits 30 and 31 of the address is not what counts."""
    tensor = Tensor(512)
    codes = operands.power(np.tile([0, 1, 2, 3], (_ROWS, 1)), "ue8m0")
    tensor.scales(codes, _SFA)
    tensor.scales(codes[:8], _SFB)
    image, a, b = _ones(MXF8, 8)
    scales = (_SFA | bits << 30, _SFB | bits << 30)
    issue = mma(MXF8.kind, MXF8.descriptor(_ROWS, 8, (1, 2)), a, b, scales=scales, vector=MXF8.vector)
    return _probe(f"bits {bits}", MXF8, image, tensor, issue, _rows(8, np.full(_ROWS, 32.0 * 2 * 4)))


def _second_step(form: Form, n: int) -> Probe:
    """Two steps of K; the second finds its scale factors a group of columns later."""
    rng = np.random.default_rng(7)
    k = 2 * form.k
    a, b = (operands.random_codes(rng, (rows, k), form.element) for rows in (_ROWS, n))
    sfa, sfb = (operands.power(rng.integers(-2, 3, (rows, 8)), form.scale) for rows in (_ROWS, n))
    tensor, image = Tensor(512), Image()
    group = 4 * -(-n // 128)
    for step in range(2):
        tensor.scales(sfa[:, 4 * step : 4 * step + 4], _SFA + 4 * step)
        tensor.scales(sfb[:, 4 * step : 4 * step + 4], _SFB + group * step)
    places = [
        image.k_major(codes, form.element, "64B", start, dense=form.dense)
        for codes, start in ((a, IMAGE), (b, IMAGE + 16384))
    ]
    issue = "".join(
        mma(
            form.kind,
            form.descriptor(_ROWS, n),
            places[0] + 2 * step,
            places[1] + 2 * step,
            accumulate=step > 0,
            scales=(_SFA + 4 * step, _SFB + group * step),
            vector=form.vector,
        )
        for step in range(2)
    )
    values = [operands.scale_values(x, form.scale) for x in (sfa, sfb)]
    expected = operands.product(_decoded(a, form), _decoded(b, form), *values)
    return _probe(f"{form.kind} {form.vector}: N={n}", form, image, tensor, issue, operands.words_of(expected))


# ---- codes ----


def _codes_of_a(name: str, form: Form, codes: np.ndarray, b_code: int, n: int = 8) -> Probe:
    """Row r is scaled by code r."""
    tensor = Tensor(512)
    tensor.scales(np.repeat(codes[:, None], form.factors, axis=1), _SFA)
    b_codes = np.full((n, form.factors), b_code, np.uint8)
    tensor.scales(b_codes, _SFB)
    b_value = operands.scale_values(b_codes, form.scale)[0, 0]
    value = operands.scale_values(codes & 0x7F if form.scale == "ue4m3" else codes, form.scale)
    return _all_ones(form, n, tensor, _rows(n, form.k * value * b_value), f"{form.kind} {form.scale}: {name}")


_CODES = np.arange(128, dtype=np.uint8)

QUESTIONS = (
    Question(
        "Which copy of A's scale factors does an MMA read?",
        "The rows of lane quadrant q (32q..32q+31) take theirs from column q of the copy in lanes 32q..32q+31. What is "
        "in the other three quadrants of that column is not read, so each warp can store the scale factors of its own "
        "rows with one tcgen05.st 32x32b.x1, whether A is in shared or in tensor memory.",
        "Reading alone, and a published GB200 kernel (MrHuff/fp4-fa4, direct P) that stores so. Against it: ISA "
        "9.7.16.10.7 says that the scale factors of A and B need to be duplicated to all 32-lane partitions, and "
        "CUTLASS always does so.",
        "P's scale factors would go to shared memory, and from there by tcgen05.cp 32x128b.warpx4: a round trip and a "
        "proxy fence more for each block; or each warp would store all 128 words, which it gets through shared memory.",
        (
            *(_distinct_copies(form) for form in (NVF4, MXF4, MXF8)),
            *(_own_quadrant_only(form, a) for form in (NVF4, NVF4_BLOCK32, MXF4) for a in (True, False)),
            _own_quadrant_only(MXF8, True),
        ),
    ),
    Question(
        "Which copy of B's scale factors does an MMA read?",
        "All four, which have to be equal: the emulator refuses copies that differ. The hardware is asked whether the "
        "rows of a lane quadrant are scaled by the copy in that quadrant.",
        "ISA 9.7.16.10.7 (duplicated to all partitions); that each quadrant reads its own copy is reading alone.",
        "Nothing: tcgen05.cp 32x128b.warpx4 makes all four. If fewer were read, the check could be relaxed.",
        (
            *(_differing_b_copies(form) for form in (NVF4, MXF4, MXF8)),
            *(_b_in_one_quadrant(quadrant) for quadrant in range(4)),
        ),
    ),
    Question(
        "Which columns and bytes are the scale factors of a row?",
        "Row r: column r // 32, lane r % 32 (B with N > 128: columns 4 to 7). Factor k of the instruction is byte "
        "id + k: id 0..3 with one factor (1X), 0 or 2 with two (2X), 0 with four (4X); A and B have ids of their own.",
        "ISA 9.7.16.10.7.2 and .3 for the bytes; CUTLASS `tmem_sf_frg` for the columns.",
        "The columns of all scale pages, and the ids in the instruction descriptors.",
        (
            *(_addressing(MXF8, 40, ids) for ids in ((0, 0), (1, 0), (2, 3), (3, 1))),
            *(_addressing(form, 40, ids) for form in (MXF4, NVF4_BLOCK32) for ids in ((0, 0), (2, 0), (0, 2))),
            _addressing(NVF4, 40, (0, 0)),
            _addressing(NVF4_UE8M0, 8, (0, 0)),
            _addressing(NVF4, 136, (0, 0)),
            _addressing(NVF4, 256, (0, 0)),
        ),
    ),
    Question(
        "Do bits 30 and 31 of the address of scale factors count?",
        "No: the byte is selected by the instruction descriptor alone.",
        "CUTLASS keeps the byte there and copies it into the descriptor; that the hardware ignores it is reading "
        "alone.",
        "The addresses of scale factors would have to be kept clean.",
        tuple(_address_bits(bits) for bits in range(4)),
    ),
    Question(
        "Where are the scale factors of the next step of K?",
        "Four columns later (N > 128: eight for B), while the operands advance by 32 bytes.",
        "CUTLASS `tmem_sf_frg`; the address is an operand, so only the first column of each step is in question.",
        "The column step of Q K and P V in the kernels.",
        (_second_step(NVF4, 16), _second_step(NVF4, 136)),
    ),
    Question(
        "What do the codes of UE4M3 scale factors mean?",
        "E4M3 without its sign: the top bit is ignored, 0x7F and 0xFF are NaN, codes below 8 are subnormal.",
        "ISA 5.2.3 (ue4m3 has seven bits); that the top bit is ignored is reading alone.",
        "Nothing: the quantisers write no set top bit and no NaN. Subnormal scales are written, so they matter.",
        (
            _codes_of_a("all", NVF4, _CODES, 0x38),
            _codes_of_a("top bit set", NVF4, _CODES | 0x80, 0x38),
            _codes_of_a("subnormal on both sides", NVF4, _CODES % 16, 0x03),
        ),
    ),
    Question(
        "What do the codes of UE8M0 scale factors mean?",
        "2**(code - 127) with no zero: code 0 is 2**-127; 0xFF is NaN.",
        "OCP MX specification; ISA 5.2.3.",
        "Padding of MXFP4 scale factors, where 0 stands for 2**-127.",
        (
            _codes_of_a("0..127", MXF8, _CODES, 187),
            _codes_of_a("128..255", MXF8, _CODES | 0x80, 67),
            _codes_of_a("0..127", MXF4, _CODES, 187),
            _codes_of_a("128..255", NVF4_UE8M0, _CODES | 0x80, 67),
        ),
    ),
)
