"""The 128-byte tensor map as CuTe DSL's host code writes it, read back into the arguments of its encoding.

The layout is not documented; it was determined from maps of known shapes, strides, boxes and types, and the names of
the types are those of CuTe DSL's TmaDataFormat. Anything not seen so is refused.

| bytes | content |
|---|---|
| 0..7 | address |
| 8..11 | bits 0..3: 2 (tiled); 4..6: rank - 1; 7..10: type; 11..12: interleave; 13..14: swizzle; 18: set; |
|       | 19: atoms of 32 bytes; 21: 128 KiB or more |
| 12..27 | strides of dimensions 1 to 4 in units of 16 bytes, low 32 bits |
| 28..31 | their high bits, 4 each |
| 32..51 | sizes - 1 |
| 52..54 | element strides - 1, 3 bits each |
| 55..59 | box sizes - 1 |
"""

from __future__ import annotations

import struct

from ..errors import DescriptorFaultError
from .launch import Encoding, place_of

DESCRIPTOR_BYTES = 128
_TILED = 2
_MEANINGFUL_BYTES = 64
# From TmaDataFormat to CUtensorMapDataType: u8, u16, u32, s32, u64, s64, f16, f32, f32_ftz, f64, bf16, fp4_align8,
# fp4_align16, fp6_align16, tf32, tf32_ftz.
_DATA_TYPES = (0, 1, 2, 3, 4, 5, 6, 7, 10, 8, 9, 13, 14, 15, 11, 12)
_L2_PROMOTION_128B = 2
_PROMOTION_BIT, _ATOM_BIT, _LARGE_BIT = 1 << 18, 1 << 19, 1 << 21
_UNKNOWN_BITS = ~(0x7FFF | _PROMOTION_BIT | _ATOM_BIT | _LARGE_BIT) & 0xFFFFFFFF
_SWIZZLE_128B, _SWIZZLE_128B_ATOM_32B = 3, 4


def decode(raw: bytes) -> Encoding | None:
    """How a tensor map was encoded, or None when the bytes do not begin with the address of a recorded array.

    Raises:
      DescriptorFaultError: the bytes begin with such an address, but are not a tensor map of a known form.
    """
    address, flags = struct.unpack_from("<QI", raw)
    place = place_of(address)
    if place is None:
        return None
    if flags & 15 != _TILED or flags & _UNKNOWN_BITS or not flags & _PROMOTION_BIT or any(raw[60:_MEANINGFUL_BYTES]):
        raise DescriptorFaultError(f"a tensor map of an unknown form: {raw[:_MEANINGFUL_BYTES].hex()}")
    rank = (flags >> 4 & 7) + 1
    low, high = struct.unpack_from("<4I", raw, 12), struct.unpack_from("<I", raw, 28)[0]
    steps = int.from_bytes(raw[52:55], "little")
    return Encoding(
        place=place,
        data_type=_DATA_TYPES[flags >> 7 & 15],
        dims=tuple(size + 1 for size in struct.unpack_from("<5I", raw, 32)[:rank]),
        strides=tuple((low[i] | (high >> 4 * i & 15) << 32) * 16 for i in range(rank - 1)),
        box=tuple(size + 1 for size in raw[55 : 55 + rank]),
        element_strides=tuple((steps >> 3 * i & 7) + 1 for i in range(rank)),
        interleave=flags >> 11 & 3,
        swizzle=_swizzle(flags),
        l2_promotion=_L2_PROMOTION_128B,
    )


def _swizzle(flags: int) -> int:
    span = flags >> 13 & 3
    if not flags & _ATOM_BIT:
        return span
    if span != _SWIZZLE_128B:
        raise DescriptorFaultError("atoms of 32 bytes without the swizzle of 128 bytes")
    return _SWIZZLE_128B_ATOM_32B
