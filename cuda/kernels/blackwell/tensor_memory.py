"""Columns of tensor memory: which are whose, and how threads load and store them.

A column has 128 lanes of 32 bits. Row r of a tile of queries is lane r; warp w of a warpgroup reaches lanes
32 w .. 32 w + 31, so that a thread has a row for itself.

Scores, accumulators and nothing else take all 512 columns. What the products need besides lies in columns of scores
that are no longer needed:

| columns of S | hold, from | until |
|---|---|---|
| all | scores of the stage, Q K of a tile | they are loaded |
| QUERY_SCALES, KEY_SCALES | scale factors of the other stage's Q K, once these scores are loaded | that Q K is done |
| P_SCALES, P | scale factors and codes of the stage's P, once its scores are loaded | P V is done |
| VALUE_SCALES | scale factors of V, once P is there | P V is done |
"""

import dataclasses

import cutlass
from cutlass.experimental import primitives
from kernels import tile
from kernels.words import Float32, Uint32

Int32 = cutlass.Int32

COLUMNS = 512
STAGES = 2
"""Tiles of 128 query rows that a thread block works on at a time."""
_PAGE = 4  # columns of the scale factors of 128 rows, four of each
_CHUNK = 32  # columns of one load or store


@dataclasses.dataclass(frozen=True)
class Span:
    """Neighbouring columns.

    Attributes:
      first: The first one.
      count: Their number.
    """

    first: int
    count: int

    @property
    def end(self) -> int:
        """The column after the last one."""
        return self.first + self.count

    def overlaps(self, other: "Span") -> bool:
        """Whether a column is in both."""
        return self.first < other.end and other.first < self.end


STAGE_COLUMNS = 128
"""From a stage's columns to those of the next one."""
SCORES = tuple(Span(STAGE_COLUMNS * stage, tile.ROWS) for stage in range(STAGES))
OUTPUTS = tuple(Span(SCORES[-1].end + STAGE_COLUMNS * stage, 128) for stage in range(STAGES))

# In the columns of a stage's scores; P is as wide as E4M3 makes it.
QUERY_SCALES = Span(0, 2 * _PAGE)
KEY_SCALES = Span(8, 2 * _PAGE)
P_SCALES = Span(32, _PAGE)
VALUE_SCALES = Span(36, _PAGE)
P = Span(64, tile.ROWS // 4)


def _assert_disjoint(spans: tuple[Span, ...], columns: int) -> None:
    for i, span in enumerate(spans):
        assert span.end <= columns, span
        assert not any(span.overlaps(other) for other in spans[:i]), span


_assert_disjoint((*SCORES, *OUTPUTS), COLUMNS)
_assert_disjoint((QUERY_SCALES, KEY_SCALES, P_SCALES, VALUE_SCALES, P), SCORES[0].count)


def load(address: Int32, columns: int) -> list[Float32]:
    """Loads columns of the warp's lanes, and waits for them.

    Args:
      address: Lane and first column.
      columns: A multiple of 32.
    """
    lines = []
    for first in range(0, columns, _CHUNK):
        registers = ", ".join(f"{{$w{first + i}}}" for i in range(_CHUNK))
        lines.append(f"tcgen05.ld.sync.aligned.32x32b.x{_CHUNK}.b32 {{{registers}}}, [{{$r0}} + {first}];")
    lines.append("tcgen05.wait::ld.sync.aligned;")
    return list(primitives.inline_ptx("\n".join(lines), write_only_types=[Float32] * columns, read_only_args=[address]))


def load_with_maxima(address: Int32, columns: int) -> tuple[list[Float32], list[Float32]]:
    """Loads columns of the warp's lanes with the maximum of each 32, NaN if one is NaN, and waits for them.

    Compute capability 10.0 has no such loads.

    Args:
      address: Lane and first column.
      columns: A multiple of 32.
    """
    lines, chunks = [], range(0, columns, _CHUNK)
    for chunk, first in enumerate(chunks):
        registers = ", ".join(f"{{$w{first + i}}}" for i in range(_CHUNK))
        load = f"tcgen05.ld.red.sync.aligned.32x32b.x{_CHUNK}.max.NaN.f32"
        lines.append(f"{load} {{{registers}}}, {{$w{columns + chunk}}}, [{{$r0}} + {first}];")
    lines.append("tcgen05.wait::ld.sync.aligned;")
    results = [Float32] * (columns + len(chunks))
    loaded = list(primitives.inline_ptx("\n".join(lines), write_only_types=results, read_only_args=[address]))
    return loaded[:columns], loaded[columns:]


def store(address: Int32, words: list[Uint32] | list[Float32]) -> None:
    """Starts to store a power of two of columns of the warp's lanes, which :func:`wait_for_stores` completes."""
    registers = ", ".join(f"{{$r{i + 1}}}" for i in range(len(words)))
    code = f"tcgen05.st.sync.aligned.32x32b.x{len(words)}.b32 [{{$r0}}], {{{registers}}};"
    primitives.inline_ptx(code, read_only_args=[address, *words])


def wait_for_stores() -> None:
    """Waits until the warp's stores have been done."""
    primitives.tcgen05_wait("store")


def lanes_of_warp(warp: Int32) -> Int32:
    """The part of an address that selects the lanes of a warp."""
    return warp % 4 << 21
