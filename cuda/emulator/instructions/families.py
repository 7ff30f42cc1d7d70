"""Imports every family of instructions, which registers their handlers."""

from . import (  # noqa: F401
    addresses,
    asynchronous_stores,
    atomics,
    bulk,
    bulk_tensor,
    cp_async,
    loads_stores,
    matrix_fragments,
    mbarriers,
    miscellaneous,
    tcgen05_allocation,
    tcgen05_data,
    tcgen05_mma,
    tcgen05_sync,
    thread_barriers,
    warp_wide,
    wgmma,
)
