"""Whether the hardware would take a launch: its shapes, its shared memory, and what the kernel declares of them."""

from __future__ import annotations

import math
import operator
from typing import Any

import numpy as np

from .ptx.syntax import Kernel

Shape = tuple[int, int, int]

_MAX_THREADS = 1024
_MAX_CLUSTER = 16
_MAX_SHARED_BYTES = 227 << 10


def shapes(kernel: Kernel, grid: Any, block: Any, cluster: Any) -> tuple[Shape, Shape, Shape]:
    """The grid, the block and the cluster of a launch, each an int or up to three; the last two may be None.

    Raises:
      ValueError: the hardware does not know such shapes, or the kernel declares others.
    """
    grid, block, cluster = _shape(grid, "grid"), _block(kernel, block), _cluster(kernel, cluster)
    if any(g % c for g, c in zip(grid, cluster, strict=True)):
        raise ValueError(f"the grid {grid} is no multiple of the cluster {cluster}")
    return grid, block, cluster


def check_shared_bytes(kernel: Kernel, dynamic: int) -> None:
    """Refuse more dynamic shared memory than there is beside the static one."""
    static = max((offset + size for offset, size in kernel.shared_variables.values()), default=0)
    limit = _MAX_SHARED_BYTES - static
    if not 0 <= dynamic <= limit:
        raise ValueError(f"shared_bytes must be 0 to {limit} beside {static} static bytes, not {dynamic}")


def _shape(value: Any, what: str) -> Shape:
    try:
        extents = (value,) if isinstance(value, (int, np.integer)) else tuple(value)
        x, y, z = (operator.index(extent) for extent in (*extents, 1, 1, 1)[: max(3, len(extents))])
    except (TypeError, ValueError):
        raise ValueError(f"the {what} must be an int or one to three of them, not {value!r}") from None
    if not extents or min(x, y, z) < 1:
        raise ValueError(f"the {what} must have at least 1 along each dimension, not {value!r}")
    return x, y, z


def _block(kernel: Kernel, block: Any) -> Shape:
    if block is None and kernel.threads is None:
        raise ValueError(f"{kernel.name} does not declare its threads: pass block")
    shape = _shape(kernel.threads if block is None else block, "block")
    if kernel.threads not in (None, shape):
        raise ValueError(f"{kernel.name} is for blocks of {kernel.threads}, not {shape}")
    limit = min(_MAX_THREADS, kernel.max_threads or _MAX_THREADS)
    if math.prod(shape) > limit:
        raise ValueError(f"the block {shape} has {math.prod(shape)} threads; {kernel.name} takes at most {limit}")
    return shape


def _cluster(kernel: Kernel, cluster: Any) -> Shape:
    if cluster is None and kernel.cluster is None and kernel.explicit_cluster:
        raise ValueError(f"{kernel.name} declares .explicitcluster: pass cluster")
    shape = _shape((kernel.cluster or 1) if cluster is None else cluster, "cluster")
    if kernel.cluster not in (None, shape):
        raise ValueError(f"{kernel.name} is for clusters of {kernel.cluster}, not {shape}")
    limit = min(_MAX_CLUSTER, kernel.max_cluster or _MAX_CLUSTER)
    if math.prod(shape) > limit:
        raise ValueError(f"the cluster {shape} has {math.prod(shape)} CTAs; {kernel.name} takes at most {limit}")
    return shape
