"""Tensor copies: the raw shared image of loads, and global memory after stores and reductions."""

import itertools
import math
from collections.abc import Iterator

import ml_dtypes
import numpy as np

from tests.emulator.device import TiledMap
from tests.emulator.kernels.case import Case, copy_from_shared, copy_to_shared, entry, fill_shared, wait

_PATTERN = 0xA5A5A5A5
_SWIZZLE_BITS = {0: 0, 32: 1, 64: 2, 128: 3}
_DTYPES = {"bfloat16": ml_dtypes.bfloat16}


def element_bytes(map_: TiledMap) -> int:
    """Bytes of an element."""
    return np.dtype(_DTYPES.get(map_.data_type, map_.data_type)).itemsize


def swizzled(address: int, swizzle: int) -> int:
    """Place of a byte whose unswizzled shared offset is ``address``: 16-byte units permuted by the 128-byte row."""
    return address ^ (address >> 7 & (1 << _SWIZZLE_BITS[swizzle]) - 1) << 4


def elements(
    map_: TiledMap, coordinates: tuple[int, ...], whole_units: bool = False
) -> Iterator[tuple[int, int | None]]:
    """For each element of a box, in shared memory's order: its unswizzled byte offset, and its global one or None.

    Args:
      map_: Tensor map.
      coordinates: Of the box.
      whole_units: Whether rows end with a whole unit of 16 bytes, as they do for stores.
    """
    unit = 16 // element_bytes(map_) if whole_units else 1
    dims = (-(-map_.dims[0] // unit) * unit, *map_.dims[1:])
    steps = map_.element_strides or (1,) * len(map_.box)
    counts = [math.ceil(extent / step) for extent, step in zip(map_.box, steps, strict=True)]
    strides = (element_bytes(map_), *map_.strides)
    for n, index in enumerate(itertools.product(*map(range, reversed(counts)))):
        place = [c + i * s for c, i, s in zip(coordinates, reversed(index), steps, strict=True)]
        inside = all(0 <= x < extent for x, extent in zip(place, dims, strict=True))
        offset = sum(x * stride for x, stride in zip(place, strides, strict=True)) if inside else None
        yield n * element_bytes(map_), offset


def box_bytes(map_: TiledMap) -> int:
    """Bytes of a box in shared memory."""
    return sum(element_bytes(map_) for _ in elements(map_, (0,) * len(map_.box)))


def _loaded(
    array: np.ndarray, map_: TiledMap, coordinates: tuple[int, ...], start: int, image_bytes: int
) -> np.ndarray:
    source = array.reshape(-1).view(np.uint8)
    image = np.full(image_bytes, _PATTERN & 0xFF, np.uint8)
    for offset, place in elements(map_, coordinates):
        for byte in range(element_bytes(map_)):
            value = 0 if place is None else source[place + byte]
            image[swizzled(start + offset + byte, map_.swizzle)] = value
    return image


def _coordinate_registers(coordinates: tuple[int, ...]) -> tuple[str, str]:
    moves = "".join(f"mov.b32 %r{20 + i}, {c};\n" for i, c in enumerate(coordinates))
    return moves, ", ".join(f"%r{20 + i}" for i in range(len(coordinates)))


def load(
    name: str, array: np.ndarray, map_: TiledMap, coordinates: tuple[int, ...], start: int = 0, settled: bool = True
) -> Case:
    """Loads a box to a shared offset and stores the whole shared image.

    Args:
      name: Of the case.
      array: Source.
      map_: Of the array.
      coordinates: Of the box, innermost first.
      start: Shared offset, a multiple of 128.
      settled: Whether the documentation says what must be in memory; if not, there is room for rows of 128 bytes.
    """
    nbytes = box_bytes(map_)
    room = nbytes if settled else 128 * math.prod(map_.box[1:])
    image_bytes = (start + room + 1023) // 1024 * 1024
    moves, registers = _coordinate_registers(coordinates)
    instruction = f"cp.async.bulk.tensor.{len(coordinates)}d.shared::cluster.global.mbarrier::complete_tx::bytes"
    body = f"""
{fill_shared(0, image_bytes, _PATTERN)}
fence.proxy.async.shared::cta;
setp.ne.u32 %p0, %r0, 0;
@%p0 bra ISSUED;
mbarrier.init.shared::cta.b64 [%r1+{image_bytes}], 1;
fence.mbarrier_init.release.cluster;
ISSUED:
bar.sync 0;
@%p0 bra LOADED;
mbarrier.arrive.expect_tx.shared::cta.b64 %d1, [%r1+{image_bytes}], {nbytes};
mov.b64 %d2, map;
cvta.param.u64 %d2, %d2;
{moves}
add.u32 %r30, %r1, {start};
add.u32 %r31, %r1, {image_bytes};
{instruction} [%r30], [%d2, {{{registers}}}], [%r31];
LOADED:
bar.warp.sync 0xffffffff;
{wait(image_bytes, 0)}
bar.warp.sync 0xffffffff;
{copy_from_shared("out", 0, image_bytes)}
"""
    ptx = entry({"source": "pointer", "map": "map", "out": "pointer"}, body)
    expected = {1: _loaded(array, map_, coordinates, start, image_bytes)} if settled else {}
    arguments = (array, map_, np.zeros(image_bytes, np.uint8))
    return Case(name, ptx, arguments, expected, shared_bytes=image_bytes + 8)


def store(
    name: str,
    array: np.ndarray,
    map_: TiledMap,
    coordinates: tuple[int, ...],
    image: np.ndarray,
    reduction: str = "",
) -> Case:
    """Stores a box from shared memory, or combines it with what is there.

    Args:
      name: Of the case.
      array: Target.
      map_: Of the array.
      coordinates: Of the box, innermost first.
      image: Bytes of the shared image.
      reduction: "add" and so on, or empty.
    """
    moves, registers = _coordinate_registers(coordinates)
    rank = len(coordinates)
    instruction = (
        f"cp.reduce.async.bulk.tensor.{rank}d.global.shared::cta.{reduction}.tile.bulk_group"
        if reduction
        else f"cp.async.bulk.tensor.{rank}d.global.shared::cta.bulk_group"
    )
    body = f"""
{copy_to_shared("image", 0, image.size)}
fence.proxy.async.shared::cta;
bar.sync 0;
setp.ne.u32 %p0, %r0, 0;
@%p0 ret;
mov.b64 %d2, map;
cvta.param.u64 %d2, %d2;
{moves}
{instruction} [%d2, {{{registers}}}], [%r1];
cp.async.bulk.commit_group;
cp.async.bulk.wait_group 0;
"""
    ptx = entry({"target": "pointer", "map": "map", "image": "pointer"}, body)
    expected = {0: _stored(array, map_, coordinates, image, reduction)}
    return Case(name, ptx, (array, map_, image), expected, shared_bytes=image.size)


def _stored(
    array: np.ndarray, map_: TiledMap, coordinates: tuple[int, ...], image: np.ndarray, reduction: str
) -> np.ndarray:
    dtype = np.dtype(_DTYPES.get(map_.data_type, map_.data_type))
    target = array.copy().reshape(-1).view(np.uint8)
    for offset, place in elements(map_, coordinates, whole_units=True):
        if place is None:
            continue
        source = swizzled(offset, map_.swizzle)
        new = image[source : source + dtype.itemsize].view(dtype)[0]
        old = target[place : place + dtype.itemsize].view(dtype)[0]
        target[place : place + dtype.itemsize].view(dtype)[0] = combine(reduction, old, new)
    return target.view(array.dtype).reshape(array.shape)


def combine(reduction: str, old: np.generic, new: np.generic) -> object:
    """What a reduction makes of the value in memory and the one that comes."""
    if not reduction:
        return new
    if reduction in ("inc", "dec"):
        one = 0 if old >= new else int(old) + 1
        return one if reduction == "inc" else (new if old == 0 or old > new else int(old) - 1)
    operations = {
        "add": np.add,
        "min": np.minimum,
        "max": np.maximum,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
    }
    with np.errstate(over="ignore"):
        return operations[reduction](np.asarray(old), np.asarray(new))[()]


def _array(rng: np.random.Generator, shape: tuple[int, ...], dtype: str = "uint8") -> np.ndarray:
    data = rng.integers(0, 256, (*shape[:-1], shape[-1] * np.dtype(_DTYPES.get(dtype, dtype)).itemsize), np.uint8)
    return data.view({"bfloat16": np.uint16}.get(dtype, dtype))


def _map_of(array: np.ndarray, dims: tuple[int, ...], box: tuple[int, ...], dtype: str, **options: object) -> TiledMap:
    """A map whose first dimension may be shorter than the array's pitch."""
    strides = tuple(reversed(array.strides[:-1]))
    return TiledMap(array, dtype, dims, strides, box, **options)


# Dtype, array shape (pitch last), dims, box, swizzle, coordinates of boxes inside, across and beyond each edge. The
# first coordinate is a multiple of 16 bytes: the hardware takes no other.
_LOADS = {
    "1d": ("uint32", (128,), (97,), (64,), 0, ((0,), (-4,), (64,), (96,), (100,), (-64,), (-60,))),
    "1d_bytes": ("uint8", (256,), (243,), (32,), 0, ((0,), (-16,), (240,), (224,))),
    "2d": ("float32", (20, 40), (37, 20), (16, 8), 0, ((0, 0), (-4, -2), (28, 15), (36, 19), (4, -7), (-100, 5))),
    "2d_32": ("uint16", (20, 40), (33, 19), (16, 16), 32, ((0, 0), (-8, 7), (32, 12), (24, -9))),
    "2d_64": ("uint8", (20, 80), (77, 20), (64, 12), 64, ((0, 0), (-16, -3), (32, 11), (64, 2))),
    "2d_128": ("bfloat16", (24, 72), (65, 23), (64, 16), 128, ((0, 0), (-32, -1), (8, 13), (64, 22), (8, 200))),
    "2d_128_words": ("uint64", (12, 18), (17, 12), (16, 9), 128, ((0, 0), (-4, 5), (16, -8))),
    "3d": ("uint16", (4, 6, 24), (21, 6, 4), (16, 3, 2), 0, ((0, 0, 0), (-8, 4, -1), (16, -2, 3), (8, 2, 4))),
    "3d_128": ("uint8", (3, 7, 144), (130, 7, 3), (128, 4, 2), 128, ((0, 0, 0), (-16, -1, -1), (16, 5, 2))),
    "4d_64": ("float32", (2, 3, 4, 20), (18, 4, 3, 2), (16, 2, 2, 2), 64, ((0,) * 4, (-4, 3, -1, 1), (8, -1, 2, 0))),
    "5d": ("uint8", (2, 2, 3, 3, 32), (30, 3, 3, 2, 2), (16, 2, 2, 2, 2), 0, ((0,) * 5, (16, -1, 2, 1, -1))),
    "5d_32": ("bfloat16", (2, 2, 2, 3, 24), (20, 3, 2, 2, 2), (16, 2, 2, 1, 2), 32, ((0,) * 5, (8, 2, -1, 1, 1))),
}  # fmt: skip


def _loads() -> Iterator[Case]:
    rng = np.random.default_rng(1)
    for name, (dtype, shape, dims, box, swizzle, places) in _LOADS.items():
        array = _array(rng, shape, dtype)
        map_ = _map_of(array, dims, box, dtype, swizzle=swizzle)
        for i, place in enumerate(places):
            yield load(f"load_{name}_{i}", array, map_, place)


def _special_loads() -> Iterator[Case]:
    rng = np.random.default_rng(2)
    wide = _array(rng, (24, 64), "bfloat16")
    for swizzle, columns in ((32, 16), (64, 32), (128, 64)):
        for start in (128, 384, 896):
            map_ = _map_of(wide, (60, 24), (columns, 11), "bfloat16", swizzle=swizzle)
            yield load(f"load_unaligned_{swizzle}_{start}", wide, map_, (-8, 15), start)
    for steps in ((1, 2), (1, 3)):
        map_ = _map_of(wide, (64, 24), (64, 12), "bfloat16", swizzle=128, element_strides=steps)
        for place in ((0, 1), (8, -4), (-16, 17)):
            yield load(f"load_strided_{steps[1]}_{place[0]}", wide, map_, place)
    for swizzle, columns in ((64, 16), (128, 16), (128, 32)):
        map_ = _map_of(wide, (64, 24), (columns, 8), "bfloat16", swizzle=swizzle)
        yield load(f"load_narrow_{swizzle}_{columns}", wide, map_, (8, 2), settled=False)
    for dtype in ("bfloat16", "float16", "float32"):
        array = _array(rng, (8, 32), dtype)
        map_ = _map_of(array, (20, 8), (16, 4), dtype, nan_fill=True)
        yield load(f"load_nan_fill_{dtype}", array, map_, (8, 6), settled=False)


# The same for stores, whose boxes must not begin before the array.
_STORES = {
    "1d": ("uint32", (128,), (97,), (64,), 0, ((0,), (4,), (64,), (100,))),
    "2d": ("float32", (20, 40), (37, 20), (16, 8), 0, ((0, 0), (4, 18), (32, 15), (100, 5))),
    "2d_32": ("uint16", (20, 40), (33, 19), (16, 16), 32, ((8, 2), (32, 14))),
    "2d_64": ("uint8", (20, 80), (77, 20), (64, 12), 64, ((16, 5), (64, 11))),
    "2d_128": ("bfloat16", (24, 72), (65, 23), (64, 16), 128, ((0, 0), (32, 1), (64, 13))),
    "3d_128": ("uint8", (3, 7, 144), (130, 7, 3), (128, 4, 2), 128, ((0, 0, 0), (16, 1, 2), (128, 5, 2))),
    "4d_64": ("float32", (2, 3, 4, 20), (18, 4, 3, 2), (16, 2, 2, 2), 64, ((4, 3, 0, 1),)),
    "5d": ("uint8", (2, 2, 3, 3, 32), (30, 3, 3, 2, 2), (16, 2, 2, 2, 2), 0, ((16, 1, 2, 1, 0),)),
}

_REDUCTIONS = {
    "uint32": ("add", "min", "max", "inc", "dec", "and", "or", "xor"),
    "int32": ("add", "min", "max", "and", "or", "xor"),
    "uint64": ("add", "min", "max", "and", "or", "xor"),
    "float32": ("add",),
    "bfloat16": ("add", "min", "max"),
    "float16": ("add", "min", "max"),
}


def _stores() -> Iterator[Case]:
    rng = np.random.default_rng(3)
    for name, (dtype, shape, dims, box, swizzle, places) in _STORES.items():
        array = _array(rng, shape, dtype)
        map_ = _map_of(array, dims, box, dtype, swizzle=swizzle)
        for i, place in enumerate(places):
            image = rng.integers(0, 256, (box_bytes(map_) + 1023) // 1024 * 1024, np.uint8)
            yield store(f"store_{name}_{i}", array, map_, place, image)


def _numbers(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    if "float" in dtype:
        return rng.standard_normal(shape).astype(_DTYPES.get(dtype, dtype))
    return _array(rng, shape, dtype)


def _reductions() -> Iterator[Case]:
    rng = np.random.default_rng(4)
    for dtype, reductions in _REDUCTIONS.items():
        for reduction in reductions:
            array = _numbers(rng, (12, 24), dtype)
            columns = 64 // array.itemsize
            map_ = _map_of(array, (23, 12), (min(columns, 16), 8), dtype, swizzle=0)
            image = _numbers(rng, (box_bytes(map_) // array.itemsize,), dtype).view(np.uint8)
            yield store(f"reduce_{reduction}_{dtype}", array, map_, (8, 6), image, reduction)


def cases() -> list[Case]:
    """All cases."""
    return [*_loads(), *_special_loads(), *_stores(), *_reductions()]
