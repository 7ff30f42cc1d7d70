"""Published times of forward attention on Blackwell, head size 128, and the instruction counts of Direct-P's design."""

import dataclasses
from collections.abc import Iterator, Mapping

from benchmarks.model.machine import B200, B300, GB200, GB300, Machine
from benchmarks.model.shapes import Shape

DIRECT_P = "Direct-P, R. Hu, 2026"
HAO = "hao-ai-lab/flash-attention-fp4"

FLASH_ATTENTION_4 = "FlashAttention-4 bf16"


@dataclasses.dataclass(frozen=True)
class Row:
    """A published time.

    Attributes:
      kernel: What ran: a recipe of ours, or FlashAttention-4.
      machine: On which GPU.
      shape: Of the call.
      seconds: Of the forward.
      source: Where it is published.
    """

    kernel: str
    machine: Machine
    shape: Shape
    seconds: float
    source: str


_GRID = (
    Shape(1, 4096, 12),
    Shape(1, 4096, 24),
    Shape(4, 4096, 16),
    Shape(4, 4096, 32),
    Shape(1, 32768, 12),
    Shape(1, 32768, 16),
    Shape(1, 32768, 24),
)

# Milliseconds on the shapes of the grid, GB200.
_GB200: Mapping[str, tuple[float, ...]] = {
    "fast": (0.064480, 0.092160, 0.200992, 0.391168, 2.279968, 2.964512, 4.400448),
    "accurate": (0.077888, 0.110528, 0.248384, 0.489280, 2.867520, 3.726912, 5.461024),
    "nvfp4_pv": (0.131424, 0.190944, 0.438208, 0.864256, 5.100992, 6.518240, 9.732832),
    FLASH_ATTENTION_4: (0.108800, 0.168960, 0.399488, 0.844832, 4.891200, 6.378496, 9.705376),
}
_GB200_MORE = (
    ("fast", Shape(1, 4096, 64), 0.202752),
    ("fast", Shape(1, 8192, 64), 0.758336),
    (FLASH_ATTENTION_4, Shape(1, 4096, 64), 0.370688),
    (FLASH_ATTENTION_4, Shape(1, 8192, 64), 1.611488),
    ("fp8_pv", Shape(1, 4096, 24), 0.158112),
    ("train", Shape(2, 4096, 32, causal=True), 0.295008),
    ("causal_mxfp4", Shape(2, 4096, 32, causal=True), 0.259072),
)
_B300 = (
    (Shape(1, 4096, 24), 0.087008),
    (Shape(1, 4096, 64), 0.189536),
    (Shape(1, 6144, 64), 0.418107),
    (Shape(1, 8192, 64), 0.705684),
    (Shape(1, 9472, 64), 0.930724),
    (Shape(1, 32768, 24), 4.480736),
)
# TFLOP/s.
_HAO = (
    (B200, Shape(1, 32768, 24), {"fp8_pv": 2018, FLASH_ATTENTION_4: 1545}),
    (B200, Shape(4, 4096, 16), {"fp8_pv": 1875, FLASH_ATTENTION_4: 1479}),
    (B200, Shape(1, 8192, 32), {"fp8_pv": 1957, FLASH_ATTENTION_4: 1520}),
    (B200, Shape(1, 4096, 32), {"fp8_pv": 1578, FLASH_ATTENTION_4: 1290}),
    (GB300, Shape(1, 32768, 24), {"fp8_pv": 2677, "nvfp4_pv": 1725, FLASH_ATTENTION_4: 1533}),
    (GB300, Shape(4, 4096, 16), {"fp8_pv": 2502, "nvfp4_pv": 1524, FLASH_ATTENTION_4: 1508}),
    (GB300, Shape(1, 4096, 24), {"fp8_pv": 2046, "nvfp4_pv": 1291, FLASH_ATTENTION_4: 1322}),
)


def rows() -> Iterator[Row]:
    """All published rows with 32 key tiles or more; in shorter ones the launch takes most of the time."""
    for kernel, times in _GB200.items():
        source = HAO if kernel == "nvfp4_pv" else DIRECT_P
        yield from (Row(kernel, GB200, shape, ms * 1e-3, source) for shape, ms in zip(_GRID, times, strict=True))
    yield from (Row(kernel, GB200, shape, ms * 1e-3, DIRECT_P) for kernel, shape, ms in _GB200_MORE)
    yield from (Row("fast", B300, shape, ms * 1e-3, DIRECT_P) for shape, ms in _B300)
    for machine, shape, rates in _HAO:
        yield from (Row(kernel, machine, shape, shape.flop / tera / 1e12, HAO) for kernel, tera in rates.items())


DESIGN_FRAGMENT: Mapping[str, Mapping[str, int]] = {
    "fast": {"fma": 32, "alu": 34, "conversion": 16, "mufu": 0},
    "square": {"fma": 49, "alu": 34, "conversion": 16, "mufu": 0},
}
"""Instructions of a fragment in Direct-P's design, as modelled: its parts written out and assembled for sm_100a alone.

Maximum of 32 scores, block scale, map, codes, and represented denominator; 82 with the affine map, 99 with the signed
square. Loads, stores, barriers and moves are not among them.
"""
