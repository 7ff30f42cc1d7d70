"""Tensor copies (TMA) of FP4 elements."""

import numpy as np

from tests.emulator.blackwell import operands
from tests.emulator.blackwell.operands import NVF4, Tensor
from tests.emulator.blackwell.probe import (
    IMAGE,
    Probe,
    Question,
    commit,
    copy_shared,
    copy_tensor,
    fill_shared,
    fill_tensor,
    mma,
    one_thread,
    passed,
    program,
    wait,
)
from tests.emulator.device import TiledMap
from tests.emulator.tensor_core import layouts


def _load(name: str, at: tuple[int, int], address: int, nbytes: int, barrier: int = 0) -> str:
    """One tile to an address from %shared on; the barrier, which nobody else arrives at, waits for its bytes."""
    return f"""
mov.b64 %d4, {name};
cvta.param.u64 %d4, %d4;
mov.b32 %r20, {at[0]};
mov.b32 %r21, {at[1]};
add.u32 %r22, %shared, {address};
add.u32 %r23, %shared, {8 * barrier};
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r23], {nbytes};
cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r22], [%d4, {{%r20, %r21}}], [%r23];
"""


def _map(array: np.ndarray, box: tuple[int, int], swizzle: int, columns: int = 0, padded: bool = False) -> TiledMap:
    """Of (rows, bytes) of packed codes; `columns` elements unless all."""
    return TiledMap(
        array,
        "16u4_align16b" if padded else "16u4_align8b",
        (columns or 2 * array.shape[1], array.shape[0]),
        (array.shape[1],),
        box,
        swizzle,
    )


def _tile(swizzle: int, at: tuple[int, int], columns: int = 0) -> Probe:
    """The image of a tile of 16 rows as wide as the swizzling pattern."""
    rng = np.random.default_rng(swizzle)
    codes = rng.integers(0, 256, (24, 2 * swizzle), np.uint8)
    nbytes = 16 * swizzle
    inside = np.zeros((64, 4 * swizzle), np.uint8)
    inside[:24, : 2 * swizzle] = codes
    if columns:
        inside[:, columns // 2 :] = 0
    rows = inside[at[1] : at[1] + 16, at[0] // 2 : at[0] // 2 + swizzle]
    image = np.zeros(nbytes, np.uint8)
    image[layouts.k_major(16, swizzle, f"{swizzle}B", 0, 0, 8 * swizzle)] = rows
    body = (
        fill_shared("before", nbytes)
        + one_thread(_load("tile", at, IMAGE, nbytes))
        + wait()
        + copy_shared("image", nbytes)
    )
    text = program({"tile": "map", "before": "pointer", "image": "pointer"}, body, columns=32)
    return Probe(
        f"{swizzle}B swizzle, at {at}" + (f", {columns} elements" if columns else ""),
        text,
        (_map(codes, (2 * swizzle, 16), swizzle, columns), np.full(nbytes, 0xA5, np.uint8), np.zeros(nbytes, np.uint8)),
        {2: image},
        shared_bytes=IMAGE + nbytes,
    )


def _loaded_operands() -> Probe:
    """A and B of one head of 128 elements, loaded and multiplied in two steps of K64."""
    rng = np.random.default_rng(1)
    n = 32
    a, b = operands.random_codes(rng, (128, 128), "e2m1"), operands.random_codes(rng, (n, 128), "e2m1")
    tensor = Tensor(8)
    tensor.scales(operands.power(np.zeros((128, 4), int), "ue4m3"), 0)
    tensor.scales(operands.power(np.zeros((n, 4), int), "ue4m3"), 4)
    starts = (IMAGE, IMAGE + 8192)
    places = [layouts.matrix_descriptor("64B", start, 0, 512) for start in starts]
    load = _load("a", (0, 0), starts[0], 8192, 0) + _load("b", (0, 0), starts[1], 64 * n, 1)
    issue = "".join(
        mma(
            NVF4.kind,
            NVF4.descriptor(128, n),
            places[0] + 2 * step,
            places[1] + 2 * step,
            accumulate=step > 0,
            scales=(256, 260),
            vector=NVF4.vector,
        )
        for step in range(2)
    )
    body = (
        fill_tensor("words", 256, 8)
        + one_thread(load)
        + wait(0)
        + wait(1)
        + one_thread(issue + commit(2))
        + wait(2)
        + copy_tensor("d", 0, n)
    )
    expected = operands.words_of(operands.product(*(layouts.decoded(x, "e2m1") for x in (a, b))))
    packed = [np.ascontiguousarray(layouts.packed(x, "e2m1", dense=True)) for x in (a, b)]
    return Probe(
        "A and B",
        program({"a": "map", "b": "map", "words": "pointer", "d": "pointer"}, body, barriers=3),
        (
            _map(packed[0], (128, 128), 64),
            _map(packed[1], (128, n), 64),
            tensor.words,
            np.zeros_like(expected),
        ),
        {3: expected},
        shared_bytes=IMAGE + 8192 + 64 * n,
    )


def _padded_operands() -> Probe:
    """The padded type: 16 elements fill 16 bytes of shared memory, of which 8 are counted, for kind::f8f6f4."""
    rng = np.random.default_rng(2)
    n = 16
    a, b = operands.random_codes(rng, (128, 128), "e2m1"), operands.random_codes(rng, (n, 128), "e2m1")
    starts = (IMAGE, IMAGE + 16384)
    places = [layouts.matrix_descriptor("128B", start, 0, 1024) for start in starts]
    load = _load("a", (0, 0), starts[0], 8192, 0) + _load("b", (0, 0), starts[1], 64 * n, 1)
    descriptor = layouts.instruction_descriptor(128, n, 5, 5)
    issue = "".join(
        mma("f8f6f4", descriptor, places[0] + 2 * step, places[1] + 2 * step, accumulate=step > 0) for step in range(4)
    )
    body = one_thread(load) + wait(0) + passed(0, "loaded") + wait(1)
    body += one_thread(issue + commit(2)) + wait(2) + copy_tensor("d", 0, n)
    expected = operands.words_of(operands.product(*(layouts.decoded(x, "e2m1") for x in (a, b))))
    packed = [np.ascontiguousarray(layouts.packed(x, "e2m1", dense=True)) for x in (a, b)]
    return Probe(
        "padded A and B",
        program({"a": "map", "b": "map", "d": "pointer", "loaded": "pointer"}, body, barriers=3),
        (
            _map(packed[0], (128, 128), 128, padded=True),
            _map(packed[1], (128, n), 128, padded=True),
            np.zeros_like(expected),
            np.zeros(128, np.uint32),
        ),
        {2: expected, 3: np.ones(128, np.uint32)},
        shared_bytes=IMAGE + 16384 + 128 * n,
    )


QUESTIONS = (
    Question(
        "What does a tensor copy of packed FP4 (16U4_ALIGN8B) leave in shared memory?",
        "The packed bytes of each row, with the swizzling of any other type on the absolute address; elements out of "
        "bounds are zeros and count as bytes. This is the layout that kind::mxf4nvf4 reads.",
        "CUDA driver API (data types); NVIDIA's NVFP4 GEMM gives right results only with this swizzling.",
        "The tensor maps of Q, K and V, and the bytes announced at their barriers.",
        (
            _tile(128, (0, 0)),
            _tile(128, (256, 16)),
            _tile(64, (0, 3)),
            _tile(64, (128, 8)),
            _tile(128, (0, 4), columns=224),
            _loaded_operands(),
        ),
    ),
    Question(
        "How many bytes does a copy of padded FP4 (16U4_ALIGN16B) count at its barrier?",
        "Those of global memory, half of what it fills; kind::f8f6f4 reads what it leaves.",
        "CUTLASS counts so; the rest is reading alone.",
        "Nothing: our kernels do not use the padded type.",
        (_padded_operands(),),
    ),
)
