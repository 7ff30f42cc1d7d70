"""Shapes of calls, and the steps of the thread block that has the most of them."""

import dataclasses
import math

from benchmarks.model.warps import TILE

ITEM = 2 * TILE
"""Query rows of an item of work."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """Shape of a call, head size 128.

    Attributes:
      batch: Sequences.
      length: Of each.
      heads: Of the query.
      causal: Whether keys after a query are masked.
    """

    batch: int
    length: int
    heads: int
    causal: bool = False

    def __str__(self) -> str:
        return f"{self.batch} x {self.length} x {self.heads}" + (", causal" if self.causal else "")

    @property
    def flop(self) -> float:
        """Operations of both products, half of them if causal."""
        return 4 * self.batch * self.heads * self.length**2 * TILE / (2 if self.causal else 1)

    def most_loaded(self, multiprocessors: int) -> tuple[float, float]:
        """Steps and items of the multiprocessor that finishes last.

        Causal items come longest first, so that all finish within the shortest of them.

        Args:
          multiprocessors: That share the items.

        Returns:
          Steps and items.
        """
        blocks = math.ceil(self.length / ITEM)
        items = self.batch * self.heads * blocks
        keys = math.ceil(self.length / TILE)
        if not self.causal:
            each = math.ceil(items / multiprocessors)
            return each * keys, each
        steps = self.batch * self.heads * sum(min(keys, ITEM // TILE * (i + 1)) for i in range(blocks))
        return max(steps / multiprocessors, keys), max(items / multiprocessors, 1)
