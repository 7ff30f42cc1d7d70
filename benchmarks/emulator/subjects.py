"""Kernels as they are measured: the recorded launch, its arrays, and how to judge what it gives."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.emulator.errors import Errors
from cuda.emulator import Output
from cuda.emulator.recording import RecordedLaunch


@dataclasses.dataclass(frozen=True, eq=False)
class Subject:
    """A kernel and a launch of it.

    Attributes:
      kernel: For tables.
      shape: For tables.
      launch: As recorded.
      arrays: By their numbers in the recording, those that are written last.
      outputs: How many are written.
      errors: Of the arrays that were written, in order.
      many_seeds: Whether it is run under all seeds; the others under some.
      hangs: Whether the kernel is known to hang.
    """

    kernel: str
    shape: str
    launch: RecordedLaunch
    arrays: Sequence[np.ndarray]
    outputs: int
    errors: Callable[[Sequence[np.ndarray]], Errors]
    many_seeds: bool = False
    hangs: bool = False

    @property
    def label(self) -> str:
        """Kernel and shape."""
        return f"{self.kernel}, {self.shape}"

    def arguments(self) -> list[Any]:
        """Of `emulate`."""
        first = len(self.arrays) - self.outputs
        return self.launch.arguments([*self.arrays[:first], *map(Output, self.arrays[first:])])

    def written(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The arrays that were written, given those of a result."""
        by_number = dict(zip(self.launch.array_numbers, arrays, strict=True))
        return [by_number[number] for number in range(len(self.arrays) - self.outputs, len(self.arrays))]
