"""Values of NVFP4 blocks as float16, which holds them exactly: six significant bits between 2**-10 and 2688."""

from cutlass.experimental import primitives
from kernels.instructions import halves_of_e4m3, product_of_halves
from kernels.words import Uint32, multiply_add

# The high bytes of the float16 of the eight magnitudes of E2M1, codes 0 to 3 and 4 to 7; their low bytes are zero.
LOW_MAGNITUDES, HIGH_MAGNITUDES = 0x3E3C3800, 0x46444240


def _high_bytes(codes: Uint32) -> Uint32:
    """High bytes of the magnitudes of the four codes in the low half."""
    tables = f"mov.b32 l, {LOW_MAGNITUDES:#x}; mov.b32 h, {HIGH_MAGNITUDES:#x};"
    code = f"{{ .reg .b32 l, h; {tables} prmt.b32 {{$w0}}, l, h, {{$r0}}; }}"
    return primitives.inline_ptx(code, write_only_types=[Uint32], read_only_args=[codes & 0x7777])


def _pair(high_bytes: Uint32, codes: Uint32, selector: int) -> Uint32:
    """Two signed values; the codes are the low two nibbles."""
    spread = f"prmt.b32 {{$w0}}, {{$r0}}, 0, {selector:#x};"
    magnitudes = primitives.inline_ptx(spread, write_only_types=[Uint32], read_only_args=[high_bytes])
    return magnitudes | (codes << 12 & 0x8000) | (codes << 24 & Uint32(0x80000000))


def factor_of(scale: Uint32) -> Uint32:
    """The value of a block's E4M3 byte, twice."""
    return halves_of_e4m3(multiply_add(scale, Uint32(0x101), Uint32(0)))


def values_of_word(word: Uint32, factor: Uint32) -> list[Uint32]:
    """Values of eight channels.

    Args:
      word: Their codes.
      factor: Of their block, from :func:`factor_of`.

    Returns:
      Four pairs of float16.
    """
    values = []
    for half in (0, 16):
        codes = word >> half
        high_bytes = _high_bytes(codes)
        values.append(product_of_halves(_pair(high_bytes, codes, 0x1404), factor))
        values.append(product_of_halves(_pair(high_bytes, codes >> 8, 0x3424), factor))
    return values
