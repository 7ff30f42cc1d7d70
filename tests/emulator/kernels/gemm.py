"""A persistent, warp-specialised matrix product, D = A B^T, from TMA loads to TMA stores.

Warpgroup 0 loads (one of its warps), warpgroups 1 and 2 multiply 64 rows of a tile each. A stage of the ring holds 128
bytes of K for all rows of a tile; it is full when its bytes have come and empty when every consumer warp has said so.
"""

import dataclasses

import cutlass
import cutlass.cute as cute
import cutlass.experimental.cuda as cuda
from cutlass.cute.arch import block_idx, grid_dim, thread_idx
from cutlass.experimental import primitives

from tests.emulator.kernels import wgmma

Int32, Int64, Uint8, Uint32, Float32 = cutlass.Int32, cutlass.Int64, cutlass.Uint8, cutlass.Uint32, cutlass.Float32
Constexpr, GridConstant = cutlass.Constexpr, cutlass.GridConstant

STAGES = 3
ROWS = 128
WARPGROUP = 128
THREADS = 3 * WARPGROUP
_CONSUMERS = 2
CONSUMER_ROWS = ROWS // _CONSUMERS
_ROW_BYTES = wgmma.ROW_BYTES
_A_BYTES = ROWS * _ROW_BYTES
_PRODUCER_REGISTERS, _CONSUMER_REGISTERS = 40, 232
_SWIZZLE_UNITS = 8


@dataclasses.dataclass(frozen=True)
class Form:
    """Compile-time choices.

    Attributes:
      types: PTX types of A and B.
      element_bytes: Of A and B.
      columns: Of a tile, a multiple of a column chunk of D.
      output: "f32", or "bf16" by stmatrix.
      a_from_registers: Whether consumers load A to registers.
    """

    types: tuple[str, str]
    element_bytes: int
    columns: int
    output: str = "f32"
    a_from_registers: bool = False

    @property
    def instruction_k(self) -> int:
        return 32 // self.element_bytes

    @property
    def stage_k(self) -> int:
        """Elements of K in a stage."""
        return _ROW_BYTES // self.element_bytes

    @property
    def b_bytes(self) -> int:
        """Bytes of B in a stage."""
        return self.columns * _ROW_BYTES

    @property
    def chunk_columns(self) -> int:
        """Columns of D that one TMA store writes: 128 bytes."""
        return _ROW_BYTES // (4 if self.output == "f32" else 2)

    @property
    def chunks(self) -> int:
        """Column chunks of a tile."""
        return self.columns // self.chunk_columns

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory of a CTA."""
        output = _CONSUMERS * self.chunks * CONSUMER_ROWS * _ROW_BYTES
        return STAGES * (_A_BYTES + self.b_bytes) + output + 2 * STAGES * 8


def _shared(count: int, dtype: type, alignment: int) -> cutlass.Array:
    return cutlass.Array(dtype, count, space=cutlass.AddressSpace.smem, alignment=alignment)


@cute.jit
def _wait(barrier: cutlass.Pointer, parity: Int32) -> None:
    done = primitives.mbarrier_try_wait_parity(barrier, parity)
    while not done:
        done = primitives.mbarrier_try_wait_parity(barrier, parity)


@cute.jit
def _next(stage: Int32, parity: Int32) -> tuple[Int32, Int32]:
    stage += 1
    if stage == STAGES:
        stage = Int32(0)
        parity ^= 1
    return stage, parity


@cute.kernel
def gemm(
    map_a: GridConstant[cuda.TensorMap],
    map_b: GridConstant[cuda.TensorMap],
    map_d: GridConstant[cuda.TensorMap],
    m: Int32,
    n: Int32,
    k: Int32,
    form: Constexpr,
) -> None:
    """Multiplies.

    Args:
      map_a: [m, k], boxes of 128 rows by 128 bytes, 128-byte swizzle.
      map_b: [n, k], boxes of ``form.columns`` rows by 128 bytes, 128-byte swizzle.
      map_d: [m, n], boxes of 64 rows by 128 bytes, 128-byte swizzle.
      m: Rows of A.
      n: Rows of B.
      k: Columns of A and B.
      form: A :class:`Form`.
    """
    ring_a = _shared(STAGES * _A_BYTES, Uint8, 1024)
    ring_b = _shared(STAGES * form.b_bytes, Uint8, 1024)
    output = _shared(_CONSUMERS * form.chunks * CONSUMER_ROWS * _ROW_BYTES, Uint8, 1024)
    full, empty = _shared(STAGES, Int64, 8), _shared(STAGES, Int64, 8)
    thread, _, _ = thread_idx()
    warp = cute.arch.make_warp_uniform(thread // 32)
    if thread == 0:
        for stage in cutlass.range_constexpr(STAGES):
            primitives.mbarrier_init(full.data_ptr(stage), 1)
            primitives.mbarrier_init(empty.data_ptr(stage), _CONSUMERS * WARPGROUP // 32)
        primitives.fence_mbarrier_init()
    primitives.barrier_cta_sync_aligned(0)

    tiles_n = (n + form.columns - 1) // form.columns
    tiles = (m + ROWS - 1) // ROWS * tiles_n
    steps = (k + form.stage_k - 1) // form.stage_k
    if warp < 4:
        primitives.setmaxregister(_PRODUCER_REGISTERS, "decrease")
        if warp == 0:
            _load(map_a, map_b, ring_a, ring_b, full, empty, tiles, tiles_n, steps, form)
    else:
        primitives.setmaxregister(_CONSUMER_REGISTERS, "increase")
        _consume(map_d, ring_a, ring_b, output, full, empty, tiles, tiles_n, steps, form)


@cute.jit
def _load(
    map_a: cuda.TensorMap,
    map_b: cuda.TensorMap,
    ring_a: cutlass.Array,
    ring_b: cutlass.Array,
    full: cutlass.Array,
    empty: cutlass.Array,
    tiles: Int32,
    tiles_n: Int32,
    steps: Int32,
    form: Constexpr,
) -> None:
    stage, parity = Int32(0), Int32(1)  # The wait for the phase before the first one succeeds.
    tile = block_idx()[0]
    while tile < tiles:
        row, column = tile // tiles_n * ROWS, tile % tiles_n * form.columns
        step = Int32(0)
        while step < steps:
            barrier = full.data_ptr(stage)
            _wait(empty.data_ptr(stage), parity)
            if primitives.elect_sync():
                primitives.mbarrier_arrive_expect_tx(barrier, _A_BYTES + form.b_bytes)
                primitives.cp_async_bulk_tensor_shared_cta_global(
                    ring_a.data_ptr(stage * _A_BYTES), map_a.get_ptr(), (step * form.stage_k, row), barrier
                )
                primitives.cp_async_bulk_tensor_shared_cta_global(
                    ring_b.data_ptr(stage * form.b_bytes), map_b.get_ptr(), (step * form.stage_k, column), barrier
                )
            stage, parity = _next(stage, parity)
            step += 1
        tile += grid_dim()[0]


@cute.jit
def _consume(
    map_d: cuda.TensorMap,
    ring_a: cutlass.Array,
    ring_b: cutlass.Array,
    output: cutlass.Array,
    full: cutlass.Array,
    empty: cutlass.Array,
    tiles: Int32,
    tiles_n: Int32,
    steps: Int32,
    form: Constexpr,
) -> None:
    thread = thread_idx()[0] % WARPGROUP
    consumer = cute.arch.make_warp_uniform(thread_idx()[0] // WARPGROUP - 1)
    staged = output.data_ptr(consumer * (form.chunks * CONSUMER_ROWS * _ROW_BYTES))
    stage, parity = Int32(0), Int32(0)
    tile = block_idx()[0]
    while tile < tiles:
        sums = [Float32(0.0) for _ in range(form.columns // 2)]
        last = stage
        step = Int32(0)
        while step < steps:
            _wait(full.data_ptr(stage), parity)
            a = ring_a.data_ptr(stage * _A_BYTES + consumer * (CONSUMER_ROWS * _ROW_BYTES))
            sums = _multiply_stage(sums, a, ring_b.data_ptr(stage * form.b_bytes), thread, step, form)
            if cutlass.const_expr(form.a_from_registers):
                # The next loads overwrite the registers.
                sums = wgmma.wait(sums, 0)
                if thread % 32 == 0:
                    primitives.mbarrier_arrive(empty.data_ptr(stage))
            else:
                # The stage before this one has been read when no group but the newest is in flight.
                sums = wgmma.wait(sums, 1)
                if (step > 0) & (thread % 32 == 0):
                    primitives.mbarrier_arrive(empty.data_ptr(last))
            last = stage
            stage, parity = _next(stage, parity)
            step += 1
        sums = wgmma.wait(sums, 0)
        if cutlass.const_expr(not form.a_from_registers):  # noqa: SIM102
            if thread % 32 == 0:
                primitives.mbarrier_arrive(empty.data_ptr(last))
        if thread == 0:
            primitives.cp_async_bulk_wait_group(0, read=True)
        primitives.barrier_cta_sync(1 + consumer, thread_count=WARPGROUP)
        _stage_output(staged, sums, thread, form)
        primitives.fence_proxy("async_shared", space=primitives.SharedSpace.shared_cta)
        primitives.barrier_cta_sync(1 + consumer, thread_count=WARPGROUP)
        if thread == 0:
            row = tile // tiles_n * ROWS + consumer * CONSUMER_ROWS
            for chunk in cutlass.range_constexpr(form.chunks):
                primitives.cp_async_bulk_tensor_global_shared_cta(
                    map_d.get_ptr(),
                    staged + chunk * CONSUMER_ROWS * _ROW_BYTES,
                    (tile % tiles_n * form.columns + chunk * form.chunk_columns, row),
                )
            primitives.cp_async_bulk_commit_group()
        tile += grid_dim()[0]
    if thread == 0:
        primitives.cp_async_bulk_wait_group(0)


def _multiply_stage(
    sums: list[Float32], a: cutlass.Pointer, b: cutlass.Pointer, thread: Int32, step: Int32, form: Form
) -> list[Float32]:
    """Issues the instructions of a stage as one group; those of the first step do not add to the sums."""
    b_descriptor = wgmma.descriptor(b)
    if form.a_from_registers:
        fragments = [_fragment(a, thread, i) for i in range(_ROW_BYTES // 32)]
    else:
        a_descriptor = wgmma.descriptor(a)
        fragments = [a_descriptor + 2 * i for i in range(_ROW_BYTES // 32)]
    wgmma.fence()
    for i, fragment in enumerate(fragments):
        add = Int32(1) if i else Int32(step > 0)
        sums = wgmma.multiply(sums, fragment, b_descriptor + 2 * i, add, form.types, form.instruction_k)
    wgmma.commit()
    return sums


def _fragment(a: cutlass.Pointer, thread: Int32, i: int) -> list[Uint32]:
    """32 bytes of K of 64 rows of A, as an instruction takes them from registers."""
    lane = thread % 32
    row = thread // 32 * 16 + lane % 16
    unit = (2 * i + lane // 16) ^ (row % _SWIZZLE_UNITS)
    words = primitives.ldmatrix(a + (row * _ROW_BYTES + unit * 16), 4, primitives.MMALayout.ROW)
    return [Uint32(words[j]) for j in range(4)]


def _stage_output(staged: cutlass.Pointer, sums: list[Float32], thread: Int32, form: Form) -> None:
    """Writes the accumulators to shared memory in the swizzle of the TMA store."""
    lane = thread % 32
    first_row = thread // 32 * 16
    chunk_bytes = CONSUMER_ROWS * _ROW_BYTES
    if form.output == "bf16":
        row = first_row + lane % 16
        for j in range(0, form.columns // 8, 2):
            chunk, unit = j // _SWIZZLE_UNITS, j % _SWIZZLE_UNITS + lane // 16
            place = row * _ROW_BYTES + (unit ^ (row % _SWIZZLE_UNITS)) * 16
            words = [_pair(sums[4 * j + 2 * i], sums[4 * j + 2 * i + 1]) for i in range(4)]
            primitives.stmatrix(staged + (place + chunk * chunk_bytes), words, primitives.MMALayout.ROW)
        return
    words = cutlass.Pointer(staged, dtype=Float32)
    for j in range(form.columns // 8):
        for half in range(2):
            row = first_row + lane // 4 + 8 * half
            unit = 2 * (j % 4) + lane % 4 // 2
            place = row * _ROW_BYTES + (unit ^ (row % _SWIZZLE_UNITS)) * 16 + lane % 2 * 8
            pair = cutlass.Vector.from_elements(sums[4 * j + 2 * half : 4 * j + 2 * half + 2], Float32)
            (words + (place + j // 4 * chunk_bytes) // 4).store(pair, alignment=8)


def _pair(low: Float32, high: Float32) -> Uint32:
    return primitives.inline_ptx(
        "cvt.rn.bf16x2.f32 {$w0}, {$r1}, {$r0};", write_only_types=[Uint32], read_only_args=[low, high]
    )
