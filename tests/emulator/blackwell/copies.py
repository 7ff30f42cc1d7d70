"""tcgen05.cp: which bytes of shared memory come to which cells of tensor memory."""

import numpy as np

from tests.emulator.blackwell.operands import Image
from tests.emulator.blackwell.probe import (
    IMAGE,
    Probe,
    Question,
    commit,
    copy,
    copy_tensor,
    fill_shared,
    fill_tensor,
    one_thread,
    program,
    wait,
)
from tests.emulator.tensor_core import layouts

_UNTOUCHED = 0x12345678
# Rows, bytes of a row, and the first lane of each group of 32 rows (CUTLASS `Copy_Traits<SM100_UTCCP_*>`).
_SHAPES = {
    "128x256b": (128, 32, ((0,), (32,), (64,), (96,))),
    "128x128b": (128, 16, ((0,), (32,), (64,), (96,))),
    "64x128b.warpx2::02_13": (64, 16, ((0, 64), (32, 96))),
    "64x128b.warpx2::01_23": (64, 16, ((0, 32), (64, 96))),
    "32x128b.warpx4": (32, 16, ((0, 32, 64, 96),)),
}


def _image(shape: str, mode: str = "none", leading: int = 0, stride: int = 0, lane: int = 0) -> Probe:
    """What one copy to column 3 leaves in 16 columns."""
    rng = np.random.default_rng(1)
    four = shape == "4x256b"
    rows, nbytes, groups = (4, 32, ()) if four else _SHAPES[shape]
    values = rng.integers(0, 256, (rows, nbytes), np.uint8)
    image = Image()
    span = {"none": 16, "32B": 32, "64B": 64, "128B": 128}[mode]
    stride = stride or 8 * span
    leading = leading or (stride * -(-rows // 8) if mode == "none" else 0)
    image.put(layouts.k_major(rows, nbytes, mode, IMAGE, leading, stride), values)
    words = np.full((16, 128), _UNTOUCHED, np.uint32)
    expected = words.copy()
    copied = values.view(np.uint32).T
    columns = slice(3, 3 + nbytes // 4)
    if four:
        expected[columns, lane + 32 * np.arange(4)] = copied
    for group, firsts in enumerate(groups):
        for first in firsts:
            expected[columns, first : first + 32] = copied[:, 32 * group : 32 * group + 32]
    descriptor = layouts.matrix_descriptor(mode, IMAGE, leading, stride)
    body = (
        fill_shared("image", image.size)
        + fill_tensor("words", 0, len(words))
        + one_thread(copy(shape, lane << 16 | 3, descriptor) + commit())
        + wait()
        + copy_tensor("d", 0, len(words))
    )
    name = f"{shape}, {mode}" + (f", strides {leading} and {stride}" if stride != 8 * span else "")
    return Probe(
        name + (f", lane {lane}" if lane else ""),
        program(dict.fromkeys(("image", "words", "d"), "pointer"), body, columns=32),
        (image.data, words, np.zeros_like(expected)),
        {2: expected},
        shared_bytes=IMAGE + image.size,
    )


def _scale_page() -> Probe:
    """A page of 128 rows by 4 scale factors, as the quantisers write it."""
    rng = np.random.default_rng(2)
    codes = rng.integers(0, 127, (128, 4), np.uint8)
    page = np.zeros(512, np.uint8)
    for row in range(128):
        page[row % 32 * 16 + row // 32 * 4 : row % 32 * 16 + row // 32 * 4 + 4] = codes[row]
    words = np.zeros((512, 128), np.uint32)
    layouts.place_scales(words, 0, codes, 0)
    # Core matrices of 8 rows of 16 bytes follow each other, so that the page is 512 bytes in a row.
    descriptor = layouts.matrix_descriptor("none", IMAGE, 128, 128)
    body = (
        fill_shared("image", 512)
        + one_thread(copy("32x128b.warpx4", 0, descriptor) + commit())
        + wait()
        + copy_tensor("d", 0, 4)
    )
    return Probe(
        "scale page",
        program(dict.fromkeys(("image", "d"), "pointer"), body, columns=32),
        (page, np.zeros((4, 128), np.uint32)),
        {1: words[:4].copy()},
        shared_bytes=IMAGE + 512,
    )


QUESTIONS = (
    Question(
        "What does tcgen05.cp 32x128b.warpx4 write?",
        "Row r of 16 bytes to lane r of 4 columns, in all four lane quadrants. A page of 512 bytes of scale factors "
        "needs a stride of 128 bytes between its groups of 8 rows and no swizzling; the next page is 512 bytes on.",
        "CUTLASS `SM100_UTCCP_4x32dp128bit`; NVIDIA's NVFP4 GEMM gives right results only this way.",
        "The pages that the quantisers write, and the copies of Q, K and V scale factors.",
        (_scale_page(), _image("32x128b.warpx4"), _image("32x128b.warpx4", stride=384, leading=16)),
    ),
    Question(
        "What do the copies 64x128b.warpx2 write?",
        "::02_13: rows 0..31 to quadrants 0 and 2, rows 32..63 to 1 and 3. ::01_23: to 0 and 1, and to 2 and 3.",
        "CUTLASS `SM100_UTCCP_2x64dp128bitlw0213` and `lw0123`; the latter also by a two-CTA example of NVIDIA.",
        "Nothing: only pairs of CTAs with M = 128 need them, which our kernels do not use.",
        (_image("64x128b.warpx2::02_13"), _image("64x128b.warpx2::01_23")),
    ),
    Question(
        "What do the copies 128x128b, 128x256b and 4x256b write?",
        "Row r to lane r of 4 or 8 columns; 4x256b: row i to lane 32 i plus the lane of the address. With 32 bytes a "
        "row, the second 16 are a leading offset away (without swizzling).",
        "CUTLASS `SM100_UTCCP_128dp*` and `SM100_UTCCP_4dp256bit`; the lane of 4x256b's address is reading alone.",
        "Nothing: our kernels do not use them.",
        (
            _image("128x128b"),
            _image("128x256b"),
            _image("128x256b", stride=256, leading=4352),
            _image("4x256b"),
            _image("4x256b", lane=28),
        ),
    ),
    Question(
        "May the source of tcgen05.cp be swizzled?",
        "Yes, with the layouts of a K-major operand.",
        "ISA 9.7.16.9.2 (a matrix descriptor) for the descriptor; the layouts are reading alone.",
        "Nothing: scale pages are not swizzled.",
        (_image("128x256b", "32B"), _image("32x128b.warpx4", "128B")),
    ),
)
