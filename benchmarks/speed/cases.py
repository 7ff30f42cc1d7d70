"""What is measured: shapes, masks and passes, and the operations that they need."""

import dataclasses

MASKS = ("full", "causal")
PASSES = ("forward", "forward+backward")

BACKWARD = 2.5
"""Operations of a backward, in forwards: five products against two."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """Lengths and heads of a call; queries and keys are equally many.

    Attributes:
      batch: B.
      length: S.
      heads: Of the query.
      kv_heads: Of key and value.
      head_size: D.
    """

    batch: int
    length: int
    heads: int
    kv_heads: int
    head_size: int

    def __str__(self) -> str:
        heads = f"{self.heads}" if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads}"
        return f"B{self.batch} S{self.length} H{heads} D{self.head_size}"


@dataclasses.dataclass(frozen=True)
class Case:
    """What every contender computes.

    Attributes:
      shape: Lengths and heads.
      mask: One of :data:`MASKS`.
      passes: One of :data:`PASSES`.
    """

    shape: Shape
    mask: str
    passes: str

    @property
    def is_causal(self) -> bool:
        """Whether query i sees keys j <= i only."""
        return self.mask == "causal"

    @property
    def has_gradients(self) -> bool:
        """Whether the backward belongs to it."""
        return self.passes == "forward+backward"

    @property
    def flops(self) -> float:
        """Operations of the matrix products: 4 B H S S D forward, half of it if causal, 3.5 times with the backward."""
        shape = self.shape
        forward = 4.0 * shape.batch * shape.heads * shape.length**2 * shape.head_size
        return forward * (0.5 if self.is_causal else 1.0) * (1 + BACKWARD if self.has_gradients else 1.0)

    def __str__(self) -> str:
        return f"{self.passes}, {self.mask}, {self.shape}"


GRID = (
    Shape(4, 4096, 32, 32, 128),
    Shape(1, 32768, 24, 24, 128),
    Shape(4, 4096, 32, 8, 128),
    Shape(1, 1024, 24, 24, 128),
    Shape(1, 4096, 24, 24, 128),
    Shape(1, 4096, 64, 64, 128),
    Shape(1, 8192, 24, 24, 128),
    Shape(1, 16384, 24, 24, 128),
    Shape(1, 8192, 64, 64, 128),
    Shape(1, 2048, 32, 32, 64),
    Shape(1, 4096, 24, 24, 64),
    Shape(1, 32768, 24, 24, 64),
)
"""The published shapes, and a training batch with and without grouped queries. The telling ones come first."""

QUICK = 3
"""How many shapes of the grid a quick run takes."""
