"""Compiles NVIDIA's kernels for one target and records a launch for each case.

usage: python -m tests.emulator.nvidia.record sm_100a OUT.pickle
"""

import argparse
import pathlib
import pickle
import tempfile
from collections.abc import Callable
from typing import Any

from cuda.emulator.recording import RecordedLaunch, cute_dsl
from tests.emulator.nvidia.cases import Case, Kernel, cases_of, key
from tests.emulator.nvidia.implementations import implementation

# Elements whose multiples the contiguous dimensions of all arrays are.
_DIVISOR = 16
_SCALED_DIVISOR = 32


def record_cases(target: str) -> dict[str, RecordedLaunch]:
    """The launch of every case of a target, by its key. Arrays: A, B, the scales of A and B if any, C."""
    with tempfile.TemporaryDirectory() as folder:
        cute_dsl.prepare(target, pathlib.Path(folder))
        compiled: dict[Kernel, Callable[[Case], RecordedLaunch]] = {}
        launches = {}
        for case in cases_of(target):
            if case.kernel not in compiled:
                compiled[case.kernel] = _scaled(case.kernel) if case.kernel.scale else _dense(case.kernel)
            launches[key(case)] = compiled[case.kernel](case)
        return launches


def _type(name: str) -> Any:
    import cutlass

    names = {
        "float4_e2m1fn": "Float4E2M1FN",
        "float8_e4m3fn": "Float8E4M3FN",
        "float8_e5m2": "Float8E5M2",
        "float8_e8m0fnu": "Float8E8M0FNU",
        "float16": "Float16",
        "bfloat16": "BFloat16",
        "float32": "Float32",
    }
    return getattr(cutlass, names[name])


def _scaled(kernel: Kernel) -> Callable[[Case], RecordedLaunch]:
    import cuda.bindings.driver as driver
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.nvgpu import OperandMajorMode
    from cutlass.cute.runtime import make_fake_stream

    module = implementation("sm100_dense_blockscaled_static_persistent_impl")
    gemm = module.PersistentDenseBlockScaledGemmKernel(kernel.block, kernel.tile, kernel.cluster)
    modes = [OperandMajorMode.K if major == "k" else OperandMajorMode.MN for major in kernel.majors[:2]]
    layouts = cutlass.tensor_utils.LayoutEnum
    output = layouts.ROW_MAJOR if kernel.majors[2] == "n" else layouts.COL_MAJOR
    types = (kernel.a, kernel.b, kernel.scale, kernel.scale, kernel.c)
    pointers = [cute_dsl.pointer(_type(type_), i, _SCALED_DIVISOR) for i, type_ in enumerate(types)]
    sizes = tuple(cutlass.Int32(0) for _ in range(4))
    options = (kernel.clusters, make_fake_stream(), lambda x: x)
    compiled = cute.compile(gemm, *pointers, (*modes, output), sizes, *options)

    def record(case: Case) -> RecordedLaunch:
        (launch,) = cute_dsl.record(compiled, *pointers, (case.m, case.n, case.k, case.l), driver.CUstream(0))
        return launch

    return record


def _dense(kernel: Kernel) -> Callable[[Case], RecordedLaunch]:
    import cuda.bindings.driver as driver
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_stream

    gemm = _hopper_gemm(kernel) if kernel.target == "sm_90a" else _blackwell_gemm(kernel)

    @cute.jit
    def launch_gemm(
        a: cute.Pointer,
        b: cute.Pointer,
        c: cute.Pointer,
        m: cutlass.Int32,
        n: cutlass.Int32,
        k: cutlass.Int32,
        l: cutlass.Int32,  # noqa: E741
        stream: driver.CUstream,
    ) -> None:
        m, n, k = (cute.assume(size, _DIVISOR) for size in (m, n, k))
        gemm(
            _batched(a, (l, m, k), kernel.majors[0] == "k"),
            _batched(b, (l, k, n), kernel.majors[1] == "n"),
            _batched(c, (l, m, n), kernel.majors[2] == "n"),
            stream,
        )

    pointers = [cute_dsl.pointer(_type(type_), i) for i, type_ in enumerate((kernel.a, kernel.b, kernel.c))]
    compiled = cute.compile(launch_gemm, *pointers, *[cutlass.Int32(1)] * 4, make_fake_stream())

    def record(case: Case) -> RecordedLaunch:
        (launch,) = cute_dsl.record(compiled, *pointers, case.m, case.n, case.k, case.l, driver.CUstream(0))
        return launch

    return record


def _batched(pointer: Any, shape: tuple[Any, Any, Any], last_is_contiguous: bool) -> Any:
    import cutlass.cute as cute

    order = (2, 1, 0) if last_is_contiguous else (2, 0, 1)
    return cute.make_tensor(pointer, cute.make_ordered_layout(shape, order=order))


def _hopper_gemm(kernel: Kernel) -> Callable[..., None]:
    import cutlass

    module = implementation("sm90_static_persistent_impl")
    gemm = module.Sm90StaticPersistentGemmKernel(cutlass.Float32, kernel.tile, kernel.cluster)
    return lambda a, b, c, stream: gemm(a, b, c, kernel.clusters, stream)


def _blackwell_gemm(kernel: Kernel) -> Callable[..., None]:
    import cutlass

    schedulers = implementation("operator_helpers").PersistentTileSchedulerType
    gemm = implementation("sm100_persistent_impl").PersistentDenseGemmKernel(
        cutlass.Float32,
        kernel.pairs,
        kernel.tile,
        kernel.cluster,
        kernel.stores_by_tma,
        schedulers.STATIC_PERSISTENT if kernel.clusters else schedulers.CLC,
        lambda x: x,
    )
    return lambda a, b, c, stream: gemm(a, b, c, stream, kernel.clusters or None)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target")
    parser.add_argument("out", type=pathlib.Path)
    arguments = parser.parse_args()
    arguments.out.write_bytes(pickle.dumps(record_cases(arguments.target)))
