"""y = factor x for bfloat16 tiles of 64 by 64, read by TMA: a kernel of CuTe DSL, and its recorded launch.

usage: python -m tests.emulator.recording.scale_kernel OUT.pickle
"""

import argparse
import pathlib
import pickle
import tempfile

from cuda.emulator.recording import RecordedLaunch, cute_dsl

TILE, THREADS, SHARED_BYTES, CLUSTER = 64, 128, 16384, (2, 1, 1)
ROWS, COLUMNS, FACTOR = 64, 256, 0.75


def record_launch() -> RecordedLaunch:
    """The launch on arrays 3 (x) and 1 (y) of ROWS by COLUMNS."""
    with tempfile.TemporaryDirectory() as folder:
        cute_dsl.prepare("sm_90a", pathlib.Path(folder))
        return _record()


def _record() -> RecordedLaunch:
    import cuda.bindings.driver as driver
    import cutlass
    import cutlass.cute as cute
    import cutlass.experimental.cuda as tensor_maps
    from cutlass.cute.runtime import make_fake_stream
    from cutlass.experimental import primitives

    type_ = cutlass.BFloat16

    @cute.kernel
    def scale(
        x: cutlass.GridConstant[tensor_maps.TensorMap],
        y: cutlass.Pointer,
        columns: cutlass.Int32,
        factor: cutlass.Float32,
    ) -> None:
        tile = cutlass.Array(type_, TILE * TILE, space=cutlass.AddressSpace.smem, alignment=128)
        barrier = cutlass.Array(cutlass.Int64, 1, space=cutlass.AddressSpace.smem, alignment=8)
        thread, _, _ = cute.arch.thread_idx()
        column, row, _ = cute.arch.block_idx()
        if thread == 0:
            primitives.mbarrier_init(barrier, 1)
        primitives.fence_mbarrier_init()
        primitives.barrier_cta_sync(0)
        if thread == 0:
            primitives.mbarrier_arrive_expect_tx(barrier, x.global_tx_bytes())
            at = (column * TILE, row * TILE)
            primitives.cp_async_bulk_tensor_shared_cta_global(tile, x.get_ptr(), at, barrier)
        while not primitives.mbarrier_try_wait_parity(barrier, 0):
            pass
        half = TILE // 2
        values = (tile.data_ptr() + thread * half).load(count=half, alignment=16)
        at = (row * TILE + thread // 2) * columns + column * TILE + thread % 2 * half
        (y + at).store((values.to(cutlass.Float32) * factor).to(type_), alignment=16)

    @cute.jit
    def launch(
        x: cute.Pointer,
        y: cute.Pointer,
        rows: cutlass.Int32,
        columns: cutlass.Int32,
        factor: cutlass.Float32,
        stream: driver.CUstream,
    ) -> None:
        map_ = tensor_maps.create_tensor_map_tiled(
            global_address=x.toint(),
            dtype=type_,
            global_dims=[columns, rows],
            global_strides=[columns * 2 // 16],
            box_dims=[TILE, TILE],
            swizzle=tensor_maps.TensorMapSwizzle.none,
        )
        scale(map_, y.raw_ptr(), columns, factor).launch(
            grid=(columns // TILE, rows // TILE, 1),
            block=(THREADS, 1, 1),
            cluster=CLUSTER,
            smem=SHARED_BYTES,
            stream=stream,
        )

    pointers = cute_dsl.pointer(type_, 3), cute_dsl.pointer(type_, 1)
    sizes = cutlass.Int32(1), cutlass.Int32(1), cutlass.Float32(1)
    compiled = cute.compile(launch, *pointers, *sizes, make_fake_stream())
    (recorded,) = cute_dsl.record(compiled, *pointers, ROWS, COLUMNS, FACTOR, driver.CUstream(0))
    return recorded


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=pathlib.Path)
    parser.parse_args().out.write_bytes(pickle.dumps(record_launch()))
