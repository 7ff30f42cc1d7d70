"""tcgen05.ld and tcgen05.st: which register of which thread is which cell."""

import math

import numpy as np

from tests.emulator.blackwell.probe import Probe, Question, copy_tensor, everyone, fill_tensor, program

# From thread and bit of its registers to the bit of a box, by column and lane: CUTLASS's layouts of the copies
# SM100_TMEM_LOAD_*, as (shape, stride) of threads and of bits; a lane of a box has `_BITS` bits.
_THREADS = {
    "32x32b": ((32,), (32,)),
    "16x64b": ((2, 2, 8), (512, 32, 64)),
    "16x128b": ((4, 8), (32, 128)),
    "16x256b": ((4, 8), (64, 256)),
    "16x32bx2": ((16, 2), (64, 32)),
}
_VALUES = {
    "32x32b": ((32,), (1,)),
    "16x64b": ((32,), (1,)),
    "16x128b": ((32, 2), (1, 1024)),
    "16x256b": ((64, 2), (1, 2048)),
    "16x32bx2": ((32,), (1,)),
}
_BITS = {"32x32b": 32, "16x64b": 64, "16x128b": 128, "16x256b": 256, "16x32bx2": 64}
_SPLIT = 5  # columns from the first to the second half of 16x32bx2


def _offset(number: int, layout: tuple[tuple[int, ...], tuple[int, ...]]) -> int:
    total = 0
    for extent, stride in zip(*layout, strict=True):
        number, part = divmod(number, extent)
        total += part * stride
    return total


def _places(shape: str, repeats: int) -> tuple[np.ndarray, np.ndarray]:
    """Column and lane, in the box of a warp, of each register of each thread: two (registers, 32) arrays."""
    registers = math.prod(_VALUES[shape][0]) // 32
    columns, lanes = np.zeros((2, registers * repeats, 32), int)
    for repeat in range(repeats):
        for register in range(registers):
            for thread in range(32):
                bit = _offset(thread, _THREADS[shape]) + _offset(32 * register, _VALUES[shape])
                lane, inside = divmod(bit, _BITS[shape])
                column = inside // 32
                row = registers * repeat + register
                if shape == "16x32bx2":
                    # Repeats of each half follow each other.
                    columns[row, thread] = column * _SPLIT + repeat
                else:
                    columns[row, thread] = column + repeat * _BITS[shape] // 32
                lanes[row, thread] = lane
    return columns, lanes


def store_registers(registers: list[str]) -> str:
    """Register i of thread t of the CTA to word (i, t) of the array `out`."""
    lines = ["mul.wide.u32 %d0, %thread, 4;", "add.u64 %d0, %out, %d0;"]
    for i, register in enumerate(registers):
        lines.append(f"st.global.b32 [%d0+{512 * i}], {register};")
    return "\n".join(lines) + "\n"


def _load_registers(registers: list[str]) -> str:
    lines = ["mul.wide.u32 %d0, %thread, 4;", "add.u64 %d0, %out, %d0;"]
    for i, register in enumerate(registers):
        lines.append(f"ld.global.b32 {register}, [%d0+{512 * i}];")
    return "\n".join(lines) + "\n"


def _fragment(shape: str, repeats: int, *, packed: bool = False, half: int = 0, store: bool = False) -> Probe:
    """One load or store of every warp, of the lower or upper 16 lanes of its own."""
    columns, lanes = _places(shape, repeats)
    count = len(columns)
    registers = [f"%r{32 + i}" for i in range(count)]
    split = f", {_SPLIT * (2 if packed else 1)}" if shape == "16x32bx2" else ""
    listed = "{" + ", ".join(registers) + "}"
    own = lanes[:, None, :] + 32 * np.arange(4)[:, None] + 16 * half
    column = np.broadcast_to(columns[:, None, :], own.shape)
    rng = np.random.default_rng(repeats)
    width = int(columns.max() + 1) * (2 if packed else 1)
    words = rng.integers(0, 1 << 32, (width, 128), np.uint32)
    address = f"add.u32 %r31, %own, {half << 20};\n"
    name = f"{shape}.x{repeats}{' packed' if packed else ''}{', upper half' if half else ''}"
    if store:
        values = rng.integers(0, 1 << 32, (count, 128), np.uint32)
        expected = words.copy()
        each = values.reshape(count, 4, 32)
        if packed:
            expected[2 * column, own], expected[2 * column + 1, own] = each & 0xFFFF, each >> 16
        else:
            expected[column, own] = each
        unpack = ".unpack::16b" if packed else ""
        body = (
            fill_tensor("words", 0, width)
            + _load_registers(registers)
            + address
            + f"tcgen05.st.sync.aligned.{shape}.x{repeats}{unpack}.b32 [%r31]{split}, {listed};\n"
            + "tcgen05.wait::st.sync.aligned;\n"
            + everyone()
            + copy_tensor("d", 0, width)
        )
        arrays, names, result = (words, values, np.zeros_like(expected)), ("words", "out", "d"), {2: expected}
        return Probe(f"st.{name}", program(dict.fromkeys(names, "pointer"), body), arrays, result)
    if packed:
        expected = words[2 * column, own] & 0xFFFF | words[2 * column + 1, own] << 16
    else:
        expected = words[column, own]
    expected = expected.reshape(count, 128)
    pack = ".pack::16b" if packed else ""
    body = (
        fill_tensor("words", 0, width)
        + address
        + f"tcgen05.ld.sync.aligned.{shape}.x{repeats}{pack}.b32 {listed}, [%r31]{split};\n"
        + "tcgen05.wait::ld.sync.aligned;\n"
        + store_registers(registers)
    )
    return Probe(
        f"ld.{name}",
        program(dict.fromkeys(("words", "out"), "pointer"), body),
        (words, np.zeros_like(expected)),
        {1: expected},
    )


def _lane_zero(store: bool) -> Probe:
    """Every warp gives the address of lane 0."""
    words = np.arange(128, dtype=np.uint32)[None] + 1000
    if store:
        body = (
            "add.u32 %r31, %thread, 1000;\n"
            "tcgen05.st.sync.aligned.32x32b.x1.b32 [%tensor], {%r31};\ntcgen05.wait::st.sync.aligned;\n"
            + everyone()
            + copy_tensor("d", 0, 1)
        )
        text = program({"d": "pointer"}, body, columns=32)
        return Probe("st", text, (np.zeros_like(words),), {0: words}, findings=frozenset({"issue"}))
    body = fill_tensor("words", 0, 1) + (
        "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r31}, [%tensor];\ntcgen05.wait::ld.sync.aligned;\n"
        + store_registers(["%r31"])
    )
    text = program(dict.fromkeys(("words", "out"), "pointer"), body, columns=32)
    return Probe("ld", text, (words, np.zeros_like(words)), {1: words}, findings=frozenset({"issue"}))


def _reduced(shape: str, operation: str, kind: str) -> Probe:
    """tcgen05.ld.red of eight columns, with zeros of both signs and NaN."""
    rng = np.random.default_rng(8)
    if kind == "f32":
        words = rng.normal(size=(16, 128)).astype(np.float32)
        words[rng.random(words.shape) < 0.2] = 0.0
        words[rng.random(words.shape) < 0.2] = -0.0
        words[rng.random(words.shape) < 0.1] = np.nan
        words[:, :4] = np.nan
    else:
        words = rng.integers(0, 1 << 32, (16, 128), np.uint32).view(np.int32 if kind == "s32" else np.uint32)
    # Only threads whose lanes the shape reaches: with 16x32bx2, threads 16.. take the second half.
    columns, lanes = _places(shape, 8)
    own = lanes[:, None, :] + 32 * np.arange(4)[:, None]
    values = words[np.broadcast_to(columns[:, None, :], own.shape), own].reshape(8, 128)
    absolute, propagate = ".abs" in operation, ".NaN" in operation
    reduced = _reduce(np.abs(values) if absolute else values, operation, propagate)
    registers = [f"%r{32 + i}" for i in range(8)]
    listed = "{" + ", ".join(registers) + "}"
    split = f", {_SPLIT}" if shape == "16x32bx2" else ""
    body = (
        fill_tensor("words", 0, 16)
        + f"tcgen05.ld.red.sync.aligned.{shape}.x8.{operation}.{kind} {listed}, %r31, [%own]{split};\n"
        + "tcgen05.wait::ld.sync.aligned;\n"
        + store_registers([*registers, "%r31"])
    )
    expected = np.concatenate([values, reduced[None]])
    return Probe(
        f"{shape} {operation}.{kind}",
        program(dict.fromkeys(("words", "out"), "pointer"), body, target="sm_103a"),
        (words.view(np.uint32), np.zeros_like(expected)),
        {1: expected},
        target="sm_103a",
    )


def _reduce(values: np.ndarray, operation: str, propagate: bool) -> np.ndarray:
    largest = operation.startswith("max")
    if values.dtype.kind != "f":
        return values.max(axis=0) if largest else values.min(axis=0)
    # -0 is less than +0.
    order = np.copysign(np.abs(values) + np.float32(2.0**-120), values).astype(np.float64)
    order = np.where(np.isnan(values), -np.inf if largest else np.inf, order)
    index = order.argmax(axis=0) if largest else order.argmin(axis=0)
    best = np.take_along_axis(values, index[None], axis=0)[0]
    nan = np.isnan(values)
    return np.where(nan.any(axis=0) if propagate else nan.all(axis=0), np.float32(np.nan), best)


_SHAPES = ("16x64b", "16x128b", "16x256b", "16x32bx2")

QUESTIONS = (
    Question(
        "Which register of which thread is which cell, in tcgen05.ld?",
        "As in CUTLASS's layouts: 32x32b has a lane a thread; 16x64b, 16x128b and 16x256b spread the columns over the "
        "threads of a quad; with 16x32bx2 threads 16..31 have the second half.",
        "CUTLASS `Copy_Traits<SM100_TMEM_LOAD_*>` (the ISA has figures). NVIDIA's kernels here use 32x32b alone.",
        "Nothing for 32x32b, which all softmax and epilogue code uses; a transposing epilogue would use 16x256b.",
        (
            _fragment("32x32b", 8),
            *(_fragment(shape, repeats) for shape in _SHAPES for repeats in (1, 4)),
            *(_fragment(shape, 2, half=1) for shape in _SHAPES),
        ),
    ),
    Question(
        "And in tcgen05.st?",
        "The same as in tcgen05.ld; no other cell is written.",
        "CUTLASS `Copy_Traits<SM100_TMEM_STORE_*>`.",
        "Nothing for 32x32b, which stores P and its scale factors.",
        (
            _fragment("32x32b", 8, store=True),
            *(_fragment(shape, 2, store=True) for shape in _SHAPES),
            _fragment("16x256b", 1, half=1, store=True),
        ),
    ),
    Question(
        "What do pack::16b and unpack::16b do?",
        "A register has the low halves of two neighbouring columns, the lower column in its low half. Unpacking writes "
        "zeros to the upper halves.",
        "ISA 9.7.16.8.2 (figure) and CUTLASS's `_16b` layouts; that the upper halves become zero is reading alone.",
        "Nothing: our kernels do not use them.",
        (
            _fragment("32x32b", 4, packed=True),
            *(_fragment(shape, 2, packed=True) for shape in _SHAPES),
            _fragment("32x32b", 4, packed=True, store=True),
            *(_fragment(shape, 1, packed=True, store=True) for shape in _SHAPES),
        ),
    ),
    Question(
        "What if a warp gives the address of lane 0 for lanes of its own?",
        "It reaches its own lanes; the emulator reports it, and refuses any other lane that is not the warp's.",
        "An example of NVIDIA (a_from_tmem) stores so from all four warps. The ISA asks for the warp's own lanes.",
        "Nothing: our kernels add the warp's lanes to the address.",
        (_lane_zero(True), _lane_zero(False)),
    ),
    Question(
        "What does tcgen05.ld.red return?",
        "The values and, for each thread, their least or greatest: -0 is less than +0; NaN is returned if all are NaN, "
        "with .NaN if any is; .abs takes magnitudes for the comparison and the result.",
        "ISA 9.7.16.8.3 for the operation; the order of zeros and NaN is reading alone, from min and max.",
        "The maxima of scores on compute capability 10.3: without .NaN a row of Direct-P that sees a NaN would not be "
        "NaN. The sign of a zero does not matter.",
        (
            _reduced("32x32b", "max", "f32"),
            _reduced("32x32b", "min", "f32"),
            _reduced("32x32b", "max.abs", "f32"),
            _reduced("32x32b", "max.NaN", "f32"),
            _reduced("32x32b", "min.abs.NaN", "f32"),
            _reduced("32x32b", "max", "u32"),
            _reduced("32x32b", "min", "s32"),
            _reduced("16x32bx2", "max", "f32"),
        ),
    ),
)
