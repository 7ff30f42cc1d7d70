"""Atomic operations on global and shared memory: old values, and what is left."""

from collections.abc import Iterator

import ml_dtypes
import numpy as np

from tests.emulator.kernels.case import Case, copy_from_shared, copy_to_shared, entry
from tests.emulator.kernels.tensor_copies import combine

_LANES = 32

_WORDS, _INTEGERS = (("b32", "u4"), ("b64", "u8")), (("u32", "u4"), ("s32", "i4"), ("u64", "u8"))

# PTX operation and type, NumPy type of an element.
_OPERATIONS = (
    *((f"{op}.{kind}", dtype) for kind, dtype in _INTEGERS for op in ("add", "min", "max")),
    *((f"{op}.s64", "i8") for op in ("min", "max")),
    *((f"{op}.{kind}", dtype) for kind, dtype in _WORDS for op in ("and", "or", "xor", "exch", "cas")),
    *((f"{op}.u32", "u4") for op in ("inc", "dec")),
    ("add.f32", "f4"),
    ("add.f64", "f8"),
    ("add.noftz.f16x2", "f2"),
    ("add.noftz.bf16x2", "bf16"),
)


def _value(operation: str, old: np.generic, new: np.generic) -> object:
    if operation == "exch":
        return new
    # The comparand is the new value with its lowest bit cleared.
    if operation == "cas":
        return new if old == new & ~type(new)(1) else old
    return combine(operation, old, new)


def _numbers(rng: np.random.Generator, dtype: np.dtype, count: int) -> np.ndarray:
    if dtype.kind in "ui":
        return rng.integers(0, 256, count * dtype.itemsize, np.uint8).view(dtype)
    return rng.standard_normal(count).astype(dtype)


def _distinct(rng: np.random.Generator, text: str, dtype_name: str, space: str) -> Case:
    """Every lane at an address of its own."""
    dtype = np.dtype(ml_dtypes.bfloat16 if dtype_name == "bf16" else dtype_name)
    operation = text.split(".")[0]
    nbytes = max(4, dtype.itemsize)
    old, new = (_numbers(rng, dtype, _LANES * nbytes // dtype.itemsize) for _ in range(2))
    if operation == "cas":
        old[::2] = new[::2] & ~dtype.type(1)
    if operation in ("inc", "dec"):
        old[::2] = new[::2] % 1000
    expected = np.array([_value(operation, a, b) for a, b in zip(old, new, strict=True)], dtype)
    register = "%d" if nbytes == 8 else "%r"
    comparand = f"and.b{8 * nbytes} {register}12, {register}10, -2;\n" if operation == "cas" else ""
    operands = f"{register}12, {register}10" if comparand else f"{register}10"
    if dtype.kind == "f" and dtype.itemsize >= 4:
        operands, moves = "%f10", "mov.b32 %f10, %r10;\n"
        result, after = "%f11", "mov.b32 %r11, %f11;\n"
        if nbytes == 8:
            moves, after = "mov.b64 %e10, %d10;\n", "mov.b64 %d11, %e11;\n"
            operands, result = "%e10", "%e11"
    else:
        moves, after, result = comparand, "", f"{register}11"
    address = "%r13" if space == "shared" else "%d3"
    body = f"""
.reg .f64 %e<12>;
{copy_to_shared("memory", 0, _LANES * nbytes) if space == "shared" else ""}
mul.wide.u32 %d1, %r0, {nbytes};
add.u64 %d2, %new, %d1;
ld.global.b{8 * nbytes} {register}10, [%d2];
add.u64 %d3, %memory, %d1;
mad.lo.u32 %r13, %r0, {nbytes}, %r1;
{moves}
atom.{space}.{text} {result}, [{address}], {operands};
{after}
add.u64 %d4, %out, %d1;
st.global.b{8 * nbytes} [%d4], {register}11;
bar.warp.sync 0xffffffff;
{copy_from_shared("memory", 0, _LANES * nbytes) if space == "shared" else ""}
"""
    bits = np.dtype(f"u{dtype.itemsize}")
    ptx = entry({"memory": "pointer", "new": "pointer", "out": "pointer"}, body, version="8.1")
    arguments = (old.view(bits), new.view(bits), np.zeros_like(old.view(bits)))
    name = f"atom_{space}_{text.replace('.', '_')}"
    return Case(name, ptx, arguments, {0: expected.view(bits), 2: old.view(bits)}, shared_bytes=_LANES * nbytes)


def _colliding(rng: np.random.Generator, text: str, dtype: str) -> Case:
    """All threads of several CTAs at one address; what each saw depends on their order."""
    threads = 4 * 64
    values = rng.integers(0, 2**32, threads, np.uint32).view(dtype)
    operation = text.split(".")[0]
    final = values[:1].copy() * 0
    for value in values:
        final[0] = combine(operation, final[0], value)
    body = f"""
mov.u32 %r2, %ctaid.x;
mad.lo.u32 %r2, %r2, 64, %r0;
mul.wide.u32 %d1, %r2, 4;
add.u64 %d1, %values, %d1;
ld.global.b32 %r10, [%d1];
red.global.{text} [%memory], %r10;
"""
    ptx = entry({"memory": "pointer", "values": "pointer"}, body)
    arguments = (np.zeros(1, dtype), values)
    return Case(f"red_{text.replace('.', '_')}", ptx, arguments, {0: final}, grid=(4, 1, 1), block=(64, 1, 1))


def _tickets() -> Case:
    """Every thread draws a number; all are different."""
    body = """
mov.u32 %r2, %ctaid.x;
mad.lo.u32 %r2, %r2, 64, %r0;
mul.wide.u32 %d1, %r2, 4;
add.u64 %d1, %out, %d1;
atom.global.add.u32 %r10, [%counter], 1;
st.global.u32 [%d1], %r10;
"""
    ptx = entry({"counter": "pointer", "out": "pointer"}, body)
    count = 4 * 64
    expected = {0: np.full(1, count, np.uint32), 1: np.arange(count, dtype=np.uint32)}
    arguments = (np.zeros(1, np.uint32), np.zeros(count, np.uint32))
    return Case("tickets", ptx, arguments, expected, grid=(4, 1, 1), block=(64, 1, 1), unordered=frozenset({1}))


def _all(rng: np.random.Generator) -> Iterator[Case]:
    for space in ("global", "shared"):
        for text, dtype in _OPERATIONS:
            yield _distinct(rng, text, dtype, space)
    for text, dtype in (("add.u32", "u4"), ("max.s32", "i4"), ("min.u32", "u4"), ("xor.b32", "u4"), ("or.b32", "u4")):
        yield _colliding(rng, text, dtype)
    yield _tickets()


def cases() -> list[Case]:
    """All cases."""
    return list(_all(np.random.default_rng(8)))
