"""The measurements: copies, kernels, steps."""

import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.quantizers.cases import ELEMENTS, HEAD_SIZE, KERNELS, STEPS, Kernel, arguments
from benchmarks.quantizers.device_time import device_time, kernel_times


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Executions of a kernel.

    Attributes:
      kernel: The kernel.
      times: Seconds of each execution.
    """

    kernel: Kernel
    times: list[float]

    @property
    def bytes_moved(self) -> float:
        """Bytes that it has to move."""
        return self.kernel.bytes_an_element * ELEMENTS

    @property
    def median(self) -> float:
        """Median of the times."""
        return float(np.median(self.times))

    @property
    def bandwidth(self) -> float:
        """Bytes a second."""
        return self.bytes_moved / self.median


def measure_copies(runs: int) -> dict[str, float]:
    """Bandwidth of copies, bytes read and written: by a kernel and by the driver, of a tensor and of a large array."""
    functions: dict[str, Callable[[jax.Array], jax.Array]] = {
        "kernel": jax.jit(lambda x: x + jnp.bfloat16(1)),
        "driver": jax.jit(jnp.copy),
    }
    found = {}
    for name, size in (("one tensor", ELEMENTS), ("1 GiB", 1 << 29)):
        x = jnp.ones(size, jnp.bfloat16)
        for kind, function in functions.items():
            times = kernel_times(functools.partial(function, x), runs)
            found[f"{kind}, {name}"] = 4 * size / float(np.median([t for of_one in times.values() for t in of_one]))
    return found


def measure_kernels(runs: int) -> list[Measurement]:
    """Every kernel, in the step that runs it."""
    found = []
    for step in STEPS.values():
        times = kernel_times(functools.partial(step.native, *arguments(step)), runs)
        for kernel in KERNELS:
            if kernel.step == step.name:
                found.append(Measurement(kernel, _times_of(kernel, times)))
                print(f"  {kernel.name}: {found[-1].bandwidth / 1e12:.2f} TB/s", file=sys.stderr)
    return found


def _times_of(kernel: Kernel, times: Any) -> list[float]:
    """Times of the entry ``<name>_h128<choices>_<number>``."""
    name = f"{kernel.name}_h{HEAD_SIZE}{kernel.choices}"
    return [t for entry, of_entry in times.items() if entry.rpartition("_")[0] == name for t in of_entry]


def measure_steps(runs: int) -> dict[str, tuple[float, float]]:
    """Seconds on the GPU of each step, by kernels and by the jitted reference."""

    def seconds(function: Callable[..., Any], given: tuple[Any, ...]) -> float:
        return device_time(functools.partial(function, *given), runs)

    return {
        name: (seconds(step.native, arguments(step)), seconds(step.oracle, arguments(step)))
        for name, step in STEPS.items()
    }
