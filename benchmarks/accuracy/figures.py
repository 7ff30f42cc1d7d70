"""`Figure`: one line of the results, and the requirement that it may have to meet."""

import dataclasses
from collections.abc import Callable

from benchmarks.accuracy.metrics import Accuracy

DECIMALS = 5


@dataclasses.dataclass(frozen=True)
class Within:
    """``|x - target| <= tolerance``."""

    target: float
    tolerance: float

    def holds(self, x: float) -> bool:
        return abs(x - self.target) <= self.tolerance

    def __str__(self) -> str:
        return f"{self.target:g} ± {self.tolerance:g}"


@dataclasses.dataclass(frozen=True)
class AtLeast:
    """``x >= bound``."""

    bound: float

    def holds(self, x: float) -> bool:
        return x >= self.bound

    def __str__(self) -> str:
        return f">= {self.bound:g}"


@dataclasses.dataclass(frozen=True)
class AtMost:
    """``x <= bound``."""

    bound: float

    def holds(self, x: float) -> bool:
        return x <= self.bound

    def __str__(self) -> str:
        return f"<= {self.bound:g}"


Requirement = Within | AtLeast | AtMost


@dataclasses.dataclass(frozen=True)
class Figure:
    """One measured number.

    Attributes:
      case: What was measured.
      quantity: Which number of it.
      ours: The measured value.
      published: The published value, or None.
      requirement: What the measured value has to meet, or None.
    """

    case: str
    quantity: str
    ours: float
    published: float | None = None
    requirement: Requirement | None = None

    @property
    def difference(self) -> float | None:
        """Ours less the published value."""
        return None if self.published is None else self.ours - self.published

    @property
    def passes(self) -> bool | None:
        """Whether the requirement is met; None without one."""
        return None if self.requirement is None else self.requirement.holds(self.ours)


def accuracy_figures(
    case: str,
    ours: Accuracy,
    published: Accuracy | None = None,
    required: tuple[Requirement | None, Requirement | None] = (None, None),
) -> list[Figure]:
    """The two figures of an accuracy.

    Args:
      case: What was measured.
      ours: The measured accuracy.
      published: The published one, or None.
      required: Requirements on cosine and relative L2 error.

    Returns:
      Two figures.
    """
    cosine, rel_l2 = (None, None) if published is None else (published.cosine, published.rel_l2)
    return [
        Figure(case, "cosine", ours.cosine, cosine, required[0]),
        Figure(case, "rel-L2", ours.rel_l2, rel_l2, required[1]),
    ]


@dataclasses.dataclass(frozen=True)
class Section:
    """A group of figures that is measured together.

    Attributes:
      name: For the command line.
      title: Heading.
      note: What was measured, against what, and why figures may differ from the published ones.
      measure: Measures; its argument tells whether to take small sizes, for a smoke test.
    """

    name: str
    title: str
    note: str
    measure: Callable[[bool], list[Figure]]
