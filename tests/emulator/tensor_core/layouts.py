"""Where the PTX ISA puts the bytes of operands and scale factors, byte by byte, and the words that say so."""

import ml_dtypes
import numpy as np

# The fields of swizzling modes in matrix descriptors: of tcgen05, of wgmma.
TCGEN05_MODES = {"none": 0, "128B/32B": 1, "128B": 2, "64B": 4, "32B": 6}
WGMMA_MODES = {"none": 0, "128B": 1, "64B": 2, "32B": 3}
_SPANS = {"none": 16, "128B/32B": 128, "128B": 128, "64B": 64, "32B": 32}

TYPES = {
    "bf16": ml_dtypes.bfloat16,
    "f16": np.float16,
    "tf32": np.float32,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
    "s8": np.int8,
    "u8": np.uint8,
}
SCALES = {"ue4m3": ml_dtypes.float8_e4m3fn, "ue8m0": ml_dtypes.float8_e8m0fnu}
FORMAT_FIELDS = {
    "f16": 0, "bf16": 1, "tf32": 2, "e4m3": 0, "e5m2": 1, "e2m3": 3, "e3m2": 4, "e2m1": 5, "u8": 0, "s8": 1,
}  # fmt: skip


def swizzled(address: np.ndarray, mode: str) -> np.ndarray:
    """Bits 4 and up of an address are exchanged with bits 7 and up, by exclusive or."""
    if mode == "128B":
        return address ^ (address >> 3 & 0x70)
    if mode == "64B":
        return address ^ (address >> 3 & 0x30)
    if mode == "32B":
        return address ^ (address >> 3 & 0x10)
    if mode == "128B/32B":
        return address ^ (address >> 2 & 0x60)
    return address


def k_major(rows: int, nbytes: int, mode: str, start: int, leading: int, stride: int) -> np.ndarray:
    """(rows, nbytes) shared addresses of an operand whose rows are contiguous along K."""
    address = np.empty((rows, nbytes), np.int64)
    for r in range(rows):
        for b in range(nbytes):
            group, row = divmod(r, 8)
            if mode == "none":
                core, byte = divmod(b, 16)
                address[r, b] = start + group * stride + core * leading + row * 16 + byte
            else:
                address[r, b] = start + group * stride + row * _SPANS[mode] + b
    return swizzled(address, mode)


def mn_major(rows: int, k: int, size: int, mode: str, start: int, leading: int, stride: int) -> np.ndarray:
    """(k, rows * size) shared addresses of an operand that is contiguous along M or N, elements of `size` bytes."""
    address = np.empty((k, rows * size), np.int64)
    period = 4 if mode == "128B/32B" else 8
    for i in range(k):
        for b in range(rows * size):
            block, byte = divmod(b, _SPANS[mode])
            group, row = divmod(i, period)
            if mode == "none":
                address[i, b] = start + block * stride + group * leading + row * 16 + byte
            else:
                address[i, b] = start + block * leading + group * stride + row * _SPANS[mode] + byte
    return swizzled(address, mode)


def packed(codes: np.ndarray, element: str, dense: bool = False) -> np.ndarray:
    """(rows, K) codes to (rows, bytes): 4 and 6 bits in chunks of sixteen with padding, or 4 bits densely."""
    size = {"tf32": 4, "f16": 2, "bf16": 2}.get(element, 1)
    if size > 1:
        return np.ascontiguousarray(codes).astype(f"u{size}").view(np.uint8)
    width = {"e2m1": 4, "e2m3": 6, "e3m2": 6}.get(element, 8)
    if width == 8:
        return codes.astype(np.uint8)
    bits = (codes[..., None].astype(np.int64) >> np.arange(width) & 1).astype(np.uint8)
    per_chunk = codes.shape[-1] if dense else 16
    bits = bits.reshape(*codes.shape[:-1], codes.shape[-1] // per_chunk, per_chunk * width)
    data = np.packbits(bits, axis=-1, bitorder="little")
    if not dense:
        padding = np.full((*data.shape[:-1], 16 - data.shape[-1]), 0xAA, np.uint8)
        data = np.concatenate([data, padding], axis=-1)
    return data.reshape(*codes.shape[:-1], -1)


def decoded(codes: np.ndarray, element: str) -> np.ndarray:
    """float64 values of codes."""
    kind = np.dtype(TYPES[element])
    if element == "tf32":
        codes = codes.astype(np.uint32) & np.uint32(0xFFFFE000)
    return codes.astype(f"u{kind.itemsize}").view(kind).astype(np.float64)


def random_codes(rng: np.random.Generator, shape: tuple[int, ...], element: str) -> np.ndarray:
    """Codes of moderate finite values, so that sums of products are exact in float64."""
    if element in ("bf16", "f16", "tf32"):
        values = rng.integers(-255, 256, shape) / 16
        kind = np.dtype(TYPES[element])
        return values.astype(kind).view(f"u{kind.itemsize}")
    codes = rng.integers(0, 1 << {"e2m1": 4, "e2m3": 6, "e3m2": 6}.get(element, 8), shape)
    bad = ~np.isfinite(decoded(codes, element))
    return np.where(bad, 0x31, codes)


def matrix_descriptor(mode: str, start: int, leading: int, stride: int, absolute: bool = False) -> int:
    """Of tcgen05; byte offsets."""
    bits = start >> 4 | (leading >> 4) << 16 | (stride >> 4) << 32 | 1 << 46 | TCGEN05_MODES[mode] << 61
    return bits | absolute << 52


def wgmma_descriptor(mode: str, start: int, leading: int, stride: int) -> int:
    return start >> 4 | (leading >> 4) << 16 | (stride >> 4) << 32 | WGMMA_MODES[mode] << 62


def instruction_descriptor(
    m: int, n: int, a: int, b: int, *, d: int = 1, transpose: tuple = (0, 0), negate: tuple = (0, 0)
):
    """Of the kinds without scale factors; format fields."""
    bits = d << 4 | a << 7 | b << 10 | negate[0] << 13 | negate[1] << 14
    return bits | transpose[0] << 15 | transpose[1] << 16 | (n >> 3) << 17 | (m >> 4) << 24


def scaled_descriptor(
    m: int, n: int, a: int, b: int, *, scale: str, ids: tuple = (0, 0), transpose: tuple = (0, 0), k96: int = 0
):
    """Of the block-scaled kinds."""
    bits = ids[1] << 4 | a << 7 | b << 10 | transpose[0] << 15 | transpose[1] << 16 | (n >> 3) << 17
    return bits | (scale == "ue8m0") << 23 | (m >> 4) << 24 | ids[0] << 29 | k96 << 31


def place_scales(words: np.ndarray, column: int, codes: np.ndarray, first: int, quadrants=(0, 1, 2, 3)) -> None:
    """Put (rows, factors) scale factor bytes into (512, 128) words of tensor memory."""
    group_columns = 4 * -(-len(codes) // 128)
    for row, factors in enumerate(codes.tolist()):
        for k, code in enumerate(factors, first):
            at = column + k // 4 * group_columns + row // 32
            for quadrant in quadrants:
                cell = words[at, 32 * quadrant + row % 32 : 32 * quadrant + row % 32 + 1].view(np.uint8)
                cell[k % 4] = code
