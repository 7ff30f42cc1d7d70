"""Shared memory of a kernel, counted while the kernel is traced, since a launch must say how much it is."""

import contextlib
from collections.abc import Iterator

import cutlass
from kernels.words import Uint32

_counts: list[int] = []


def words(count: int, alignment: int = 16) -> cutlass.Array:
    """Words of shared memory.

    Args:
      count: Their number, which fills whole units of the alignment.
      alignment: Bytes; what is aligned more comes first.
    """
    assert 4 * count % alignment == 0 and _counts[-1] % alignment == 0
    _counts[-1] += 4 * count
    return cutlass.Array(Uint32, count, space=cutlass.AddressSpace.smem, alignment=alignment)


@contextlib.contextmanager
def counting() -> Iterator[list[int]]:
    """Collects the bytes that a kernel traced inside the block allocates, as a list of one number."""
    count = [0]
    _counts.append(0)
    try:
        yield count
    finally:
        count[0] = _counts.pop()
