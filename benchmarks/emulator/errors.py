"""How far results are from those in float64."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Errors:
    """Errors of a kernel's outputs.

    Attributes:
      relative_l2: Of the main output.
      lse: Largest absolute error of the log-sum-exp, in nats; None where there is none.
    """

    relative_l2: float
    lse: float | None = None


def relative_l2(actual: np.ndarray, expected: np.ndarray) -> float:
    """Norm of the difference over the norm of what is expected."""
    difference = actual.astype(np.float64) - expected
    return float(np.linalg.norm(difference) / np.linalg.norm(expected))
