"""Times of the kernels that a function runs on the GPU, from JAX's profiler."""

import collections
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.profiler


def kernel_times(function: Callable[[], Any], runs: int) -> Mapping[str, list[float]]:
    """Seconds of every kernel and copy, by name, in order.

    Args:
      function: Compiled before; its results are waited for.
      runs: How often to run it.

    Returns:
      A list for each name, with as many entries as executions were recorded.
    """
    jax.block_until_ready(function())
    times: dict[str, list[float]] = collections.defaultdict(list)
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory):
            for _ in range(runs):
                jax.block_until_ready(function())
        (path,) = Path(directory).glob("**/*.xplane.pb")
        profile = jax.profiler.ProfileData.from_file(str(path))
        for plane in profile.planes:
            if not plane.name.startswith("/device:GPU"):
                continue
            for line in plane.lines:
                if line.name.startswith("Stream"):
                    for event in line.events:
                        times[event.name].append(event.duration_ns * 1e-9)
    return times


def device_time(function: Callable[[], Any], runs: int) -> float:
    """Seconds of all kernels of a run, on average."""
    return sum(sum(times) for times in kernel_times(function, runs).values()) / runs
