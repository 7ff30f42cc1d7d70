"""ldmatrix and stmatrix: registers and images of 8x8 matrices of 16-bit elements."""

from collections.abc import Iterator

import numpy as np

from tests.emulator.kernels.case import Case, copy_from_shared, copy_to_shared, entry

_IMAGE_BYTES = 1024
_LANES = np.arange(32)


def _fragments(count: int, transposed: bool) -> tuple[np.ndarray, np.ndarray]:
    """Matrix row (over all matrices) and column of each element of a fragment, [count, 32 lanes, 2]."""
    matrix = np.arange(count)[:, None, None]
    outer = np.broadcast_to((_LANES // 4)[None, :, None], (count, 32, 2))
    inner = np.broadcast_to((2 * (_LANES % 4))[None, :, None] + np.arange(2), (count, 32, 2))
    row, column = (inner, outer) if transposed else (outer, inner)
    return matrix * 8 + row, column


def _opcode(name: str, count: int, transposed: bool) -> str:
    return f"{name}.sync.aligned.m8n8.x{count}{'.trans' * transposed}.shared::cta.b16"


def _registers(count: int) -> str:
    return "{" + ", ".join(f"%r{20 + i}" for i in range(count)) + "}"


_ADDRESSES = """
mul.wide.u32 %d1, %r0, 4;
add.u64 %d2, %rows, %d1;
ld.global.u32 %r10, [%d2];
add.u32 %r10, %r1, %r10;
"""


def _load(rng: np.random.Generator, count: int, transposed: bool) -> Case:
    image = rng.integers(0, 256, _IMAGE_BYTES, np.uint8)
    rows = (rng.permutation(_IMAGE_BYTES // 16)[:32] * 16).astype(np.uint32)
    stores = "".join(f"st.global.u32 [%d1+{128 * i}], %r{20 + i};\n" for i in range(count))
    body = f"""
{copy_to_shared("image", 0, _IMAGE_BYTES)}
{_ADDRESSES}
{_opcode("ldmatrix", count, transposed)} {_registers(count)}, [%r10];
add.u64 %d1, %out, %d1;
{stores}
"""
    row, column = _fragments(count, transposed)
    expected = image.view(np.uint16)[rows[row] // 2 + column].view(np.uint32)[..., 0]
    ptx = entry({"image": "pointer", "rows": "pointer", "out": "pointer"}, body)
    name = f"ldmatrix_x{count}{'_trans' * transposed}"
    return Case(name, ptx, (image, rows, np.zeros((count, 32), np.uint32)), {2: expected}, shared_bytes=_IMAGE_BYTES)


def _store(rng: np.random.Generator, count: int, transposed: bool) -> Case:
    image = rng.integers(0, 256, _IMAGE_BYTES, np.uint8)
    rows = (rng.permutation(_IMAGE_BYTES // 16)[:32] * 16).astype(np.uint32)
    values = rng.integers(0, 2**16, (count, 32, 2), np.uint16)
    loads = "".join(f"ld.global.u32 %r{20 + i}, [%d2+{128 * i}];\n" for i in range(count))
    body = f"""
{copy_to_shared("image", 0, _IMAGE_BYTES)}
{_ADDRESSES}
add.u64 %d2, %values, %d1;
{loads}
{_opcode("stmatrix", count, transposed)} [%r10], {_registers(count)};
bar.warp.sync 0xffffffff;
{copy_from_shared("image", 0, _IMAGE_BYTES)}
"""
    row, column = _fragments(count, transposed)
    expected = image.copy()
    expected.view(np.uint16)[rows[row] // 2 + column] = values
    ptx = entry({"image": "pointer", "rows": "pointer", "values": "pointer"}, body)
    name = f"stmatrix_x{count}{'_trans' * transposed}"
    return Case(name, ptx, (image, rows, values), {0: expected}, shared_bytes=_IMAGE_BYTES)


def _all(rng: np.random.Generator) -> Iterator[Case]:
    for make in (_load, _store):
        for count in (1, 2, 4):
            for transposed in (False, True):
                yield make(rng, count, transposed)


def cases() -> list[Case]:
    """All cases."""
    return list(_all(np.random.default_rng(7)))
