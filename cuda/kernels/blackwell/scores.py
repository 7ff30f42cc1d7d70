"""The scores of a row and tile, and their maxima where a load has found them."""

import dataclasses

from kernels import tile
from kernels.blackwell import packed
from kernels.words import Float32

BLOCK = 32
"""Keys that one load of tensor memory brings, and that share a scale factor of MXFP4."""
BLOCKS = tile.ROWS // BLOCK


@dataclasses.dataclass(frozen=True)
class Scores:
    """What a thread has of a tile.

    Attributes:
      values: Raw scores.
      maxima: Of each block, NaN where one of its scores is; empty where they are yet to be computed.
    """

    values: list[Float32]
    maxima: list[Float32]

    def block(self, index: int) -> list[Float32]:
        """The scores of a block."""
        return self.values[index * BLOCK : (index + 1) * BLOCK]

    def highest(self, first: int = 0, count: int = BLOCKS) -> Float32:
        """The maximum over consecutive blocks, NaN if one of their scores is."""
        if self.maxima:
            found = self.maxima[first : first + count]
            return packed.highest(found) if count > 1 else found[0]
        return packed.highest(self.values[first * BLOCK : (first + count) * BLOCK])

    def replaced(self, values: list[Float32]) -> "Scores":
        """Other scores, with their maxima where these have them."""
        other = Scores(values, [])
        return Scores(values, [other.highest(i, 1) for i in range(BLOCKS)]) if self.maxima else other
