"""All hand-written kernels."""

from tests.emulator.kernels import (
    atomics,
    bulk_copies,
    clusters,
    matrices,
    mbarriers,
    products,
    tensor_copies,
    warps,
)
from tests.emulator.kernels.case import Case

_MODULES = (mbarriers, tensor_copies, bulk_copies, clusters, warps, matrices, atomics, products)


def cases() -> list[Case]:
    """All cases, with names of their own."""
    found = [case for module in _MODULES for case in module.cases()]
    assert len({case.name for case in found}) == len(found)
    return found
