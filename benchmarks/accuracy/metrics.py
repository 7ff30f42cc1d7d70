"""Cosine and relative L2 error over all elements, accumulated in float64."""

import dataclasses

import numpy as np
from numpy.typing import ArrayLike


@dataclasses.dataclass(frozen=True)
class Accuracy:
    """Agreement of two arrays taken as vectors.

    Attributes:
      cosine: Cosine of the angle between them.
      rel_l2: ``|actual - expected| / |expected|``.
    """

    cosine: float
    rel_l2: float


class Comparison:
    """Accumulates the accuracy of arrays that come in pieces."""

    def __init__(self) -> None:
        self._dot = self._actual = self._expected = self._error = 0.0

    def add(self, actual: ArrayLike, expected: ArrayLike) -> None:
        """Adds a piece."""
        a, e = (np.asarray(x).astype(np.float64).ravel() for x in (actual, expected))
        self._dot += float(a @ e)
        self._actual += float(a @ a)
        self._expected += float(e @ e)
        self._error += float((a - e) @ (a - e))

    def accuracy(self) -> Accuracy:
        """Accuracy of what was added; a zero ``actual`` has cosine 0."""
        # Roots first: the product of two small squares may underflow.
        norms = self._actual**0.5 * self._expected**0.5
        return Accuracy(
            cosine=self._dot / norms if norms else 0.0,
            rel_l2=(self._error / self._expected) ** 0.5 if self._expected else float("nan"),
        )


def compare(actual: ArrayLike, expected: ArrayLike) -> Accuracy:
    """Accuracy of one pair of arrays."""
    comparison = Comparison()
    comparison.add(actual, expected)
    return comparison.accuracy()


def mean(accuracies: list[Accuracy]) -> Accuracy:
    """Mean of both figures, as the published tables average over shapes."""
    return Accuracy(
        cosine=float(np.mean([a.cosine for a in accuracies])),
        rel_l2=float(np.mean([a.rel_l2 for a in accuracies])),
    )
