"""Runs the PTX of kernels for Hopper and Blackwell on a CPU, and finds what is wrong with them.

    result = emulate(ptx, [x, Output(y), 5], grid=(2, 1, 1), shared_bytes=1024, seeds=range(5))
    assert not result.findings

See docs/emulator.md.
"""

from .errors import (
    BarrierFaultError,
    DeadlockError,
    DescriptorFaultError,
    EmulationError,
    Finding,
    MemoryFaultError,
    PtxSyntaxError,
    UnsupportedInstructionError,
)
from .front import Output, Result, Struct, emulate
from .instructions.tcgen05_mma import Product
from .program.program import Program
from .ptx.parser import parse
from .tensor_map import TensorMap
from .timeline import Timeline

__all__ = [
    "BarrierFaultError",
    "DeadlockError",
    "DescriptorFaultError",
    "EmulationError",
    "Finding",
    "MemoryFaultError",
    "Output",
    "Product",
    "Program",
    "PtxSyntaxError",
    "Result",
    "Struct",
    "TensorMap",
    "Timeline",
    "UnsupportedInstructionError",
    "emulate",
    "parse",
]
