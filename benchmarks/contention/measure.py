"""Runs the programs through the CUDA driver, which compiles PTX itself."""

import ctypes
import dataclasses
import statistics

from benchmarks.contention.programs import (
    INSTRUCTIONS,
    MMA_THREADS,
    OUTLASTING,
    PRODUCTS,
    STREAM,
    TENSOR_CORES,
    Instruction,
    program,
)

ITERATIONS = 400
_BYTES = 4096
_MULTIPROCESSOR_COUNT = 16  # CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT


@dataclasses.dataclass(frozen=True)
class Measurement:
    """What one program took.

    Attributes:
      instruction: That was repeated.
      tensor_cores: One of :data:`~benchmarks.contention.programs.TENSOR_CORES`.
      clocks: Of a scheduler for one instruction of a warp, of each run.
      product_clocks: Of the tensor cores for one product of 64 x 128 accumulators, median; None if they were idle.
    """

    instruction: Instruction
    tensor_cores: str
    clocks: tuple[float, ...]
    product_clocks: float | None

    @property
    def median(self) -> float:
        """Of the clocks."""
        return statistics.median(self.clocks)


class Driver:
    """The CUDA driver, with the first device's primary context current."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self._call("cuInit", 0)
        device, context, self._memory = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
        self._call("cuDeviceGet", ctypes.byref(device), 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxSetCurrent", context)
        self._call("cuMemAlloc_v2", ctypes.byref(self._memory), _BYTES)
        count = ctypes.c_int()
        self._call("cuDeviceGetAttribute", ctypes.byref(count), _MULTIPROCESSOR_COUNT, device)
        self._blocks = count.value

    def _call(self, name: str, *arguments: object) -> None:
        error = getattr(self._library, name)(*arguments)
        if error:
            raise RuntimeError(f"{name} failed with CUDA error {error}")

    def clocks(self, text: str, threads: int, runs: int) -> list[list[int]]:
        """Loads a program, warms up, and runs it.

        Args:
          text: PTX with the entry of :func:`~benchmarks.contention.programs.program`.
          threads: Of a block; there is one on each multiprocessor.
          runs: How often to run it.

        Returns:
          For each run the clocks of each warpgroup.
        """
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuModuleLoadData", ctypes.byref(module), text.encode())
        self._call("cuModuleGetFunction", ctypes.byref(function), module, b"measure")
        values = ctypes.c_uint64(self._memory.value), ctypes.c_uint32(ITERATIONS)
        addresses = (ctypes.c_void_p * 2)(*(ctypes.cast(ctypes.byref(v), ctypes.c_void_p) for v in values))
        found = []
        for _ in range(runs + 1):
            self._call("cuMemsetD8_v2", self._memory, 0, _BYTES)
            self._call("cuLaunchKernel", function, self._blocks, 1, 1, threads, 1, 1, 0, None, addresses, None)
            self._call("cuCtxSynchronize")
            times = (ctypes.c_uint32 * (threads // 128))()
            self._call("cuMemcpyDtoH_v2", times, self._memory, ctypes.sizeof(times))
            found.append(list(times))
        self._call("cuModuleUnload", module)
        return found[1:]


def measure(runs: int) -> list[Measurement]:
    """All instructions, one warp a scheduler, beside each work of the tensor cores.

    Args:
      runs: Of each program.

    Raises:
      RuntimeError: If a call of the driver fails, or if the products end before the instructions.
    """
    driver, measurements = Driver(), []
    for instruction in STREAM:
        for tensor_cores in TENSOR_CORES:
            found = driver.clocks(program(tensor_cores, instruction), MMA_THREADS + 128, runs)
            clocks = tuple(times[-1] / (ITERATIONS * INSTRUCTIONS) for times in found)
            is_idle = TENSOR_CORES[tensor_cores] is None
            if not is_idle and any(min(times[:-1]) < times[-1] for times in found):
                raise RuntimeError(f"the products ended before {instruction.name}")
            # Two warpgroups share the tensor cores.
            products = 2 * ITERATIONS * OUTLASTING * PRODUCTS
            product = statistics.median(times[0] for times in found) / products
            measurements.append(Measurement(instruction, tensor_cores, clocks, None if is_idle else product))
    return measurements
