"""Copies and reductions of consecutive bytes."""

from collections.abc import Iterator

import ml_dtypes
import numpy as np

from tests.emulator.kernels.case import Case, copy_from_shared, copy_to_shared, entry, fill_shared, wait
from tests.emulator.kernels.tensor_copies import combine

_BYTES = 2048
_PATTERN = 0x5A5A5A5A

# PTX type, NumPy type, operation.
_REDUCTIONS = (
    *(("u32", np.uint32, op) for op in ("add", "min", "max", "inc", "dec")),
    *(("s32", np.int32, op) for op in ("add", "min", "max")),
    *(("b32", np.uint32, op) for op in ("and", "or", "xor")),
    *(("u64", np.uint64, op) for op in ("add", "min", "max")),
    *(("s64", np.int64, op) for op in ("min", "max")),
    *(("b64", np.uint64, op) for op in ("and", "or", "xor")),
    ("f32", np.float32, "add"),
    ("f64", np.float64, "add"),
    *(
        (kind, dtype, op)
        for kind, dtype in (("bf16", ml_dtypes.bfloat16), ("f16", np.float16))
        for op in ("min", "max")
    ),
    ("noftz.bf16", ml_dtypes.bfloat16, "add"),
    ("noftz.f16", np.float16, "add"),
)


def _load(source: np.ndarray, source_offset: int, shared_offset: int, nbytes: int) -> Case:
    body = f"""
{fill_shared(0, _BYTES, _PATTERN)}
fence.proxy.async.shared::cta;
setp.ne.u32 %p0, %r0, 0;
@%p0 bra ISSUED;
mbarrier.init.shared::cta.b64 [%r1+{_BYTES}], 1;
fence.mbarrier_init.release.cluster;
mbarrier.arrive.expect_tx.shared::cta.b64 %d1, [%r1+{_BYTES}], {nbytes};
add.u64 %d2, %source, {source_offset};
add.u32 %r10, %r1, {shared_offset};
add.u32 %r11, %r1, {_BYTES};
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r10], [%d2], {nbytes}, [%r11];
ISSUED:
bar.sync 0;
{wait(_BYTES, 0)}
bar.warp.sync 0xffffffff;
{copy_from_shared("out", 0, _BYTES)}
"""
    image = np.full(_BYTES, _PATTERN & 0xFF, np.uint8)
    image[shared_offset : shared_offset + nbytes] = source[source_offset : source_offset + nbytes]
    return Case(
        f"bulk_load_{nbytes}",
        entry({"source": "pointer", "out": "pointer"}, body),
        (source, np.zeros_like(image)),
        {1: image},
        shared_bytes=_BYTES + 8,
    )


def _to_global(name: str, instruction: str, image: np.ndarray, target: np.ndarray, expected: np.ndarray) -> Case:
    body = f"""
{copy_to_shared("image", 0, image.nbytes)}
fence.proxy.async.shared::cta;
bar.sync 0;
setp.ne.u32 %p0, %r0, 0;
@%p0 ret;
{instruction} [%target], [%r1], {image.nbytes};
cp.async.bulk.commit_group;
cp.async.bulk.wait_group 0;
"""
    ptx = entry({"target": "pointer", "image": "pointer"}, body)
    return Case(name, ptx, (target, image), {0: expected}, shared_bytes=image.nbytes)


def _reductions(rng: np.random.Generator) -> Iterator[Case]:
    for kind, dtype, operation in _REDUCTIONS:
        if np.dtype(dtype).kind in "ui":
            old, new = (rng.integers(0, 256, 256, np.uint8).view(dtype) for _ in range(2))
        else:
            old, new = (rng.standard_normal(256 // np.dtype(dtype).itemsize).astype(dtype) for _ in range(2))
        expected = np.array([combine(operation, *pair) for pair in zip(old, new, strict=True)], dtype)
        instruction = f"cp.reduce.async.bulk.global.shared::cta.bulk_group.{operation}.{kind}"
        bits = np.dtype(f"u{np.dtype(dtype).itemsize}")
        yield _to_global(f"bulk_{operation}_{kind}", instruction, new.view(bits), old.view(bits), expected.view(bits))


def cases() -> list[Case]:
    """All cases."""
    rng = np.random.default_rng(5)
    source = rng.integers(0, 256, _BYTES, np.uint8)
    loads = [_load(source, *sizes) for sizes in ((0, 0, 16), (16, 48, 1008), (0, 0, _BYTES))]
    stores = []
    for nbytes in (16, 272):
        target = rng.integers(0, 256, 512, np.uint8)
        expected = target.copy()
        expected[:nbytes] = source[:nbytes]
        instruction = "cp.async.bulk.global.shared::cta.bulk_group"
        stores.append(_to_global(f"bulk_store_{nbytes}", instruction, source[:nbytes].copy(), target, expected))
    return [*loads, *stores, *_reductions(rng)]
