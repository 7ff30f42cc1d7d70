"""Matrix products of a warpgroup: operands in shared memory or registers, accumulators in registers, asynchronous.

A product has 64 rows. Thread ``4 g + t`` of warp ``w`` holds rows ``16 w + g`` and ``16 w + g + 8``, and of each eight
columns those at ``2 t`` and ``2 t + 1``: accumulator ``4 i + 2 r + e`` is row ``r``, column ``8 i + 2 t + e``.
"""

import cutlass
from cutlass._mlir.dialects import llvm

Float32, Int32, Uint32 = cutlass.Float32, cutlass.Int32, cutlass.Uint32

ROWS = 64
THREADS = 128
SWIZZLE_BYTES = 128
"""A row of an operand in shared memory; its 16-byte chunks are permuted by the row modulo 8."""
_UNIT = 16  # of a descriptor
_UPPER_HALF = 1 << 30 | 8 * SWIZZLE_BYTES // _UNIT  # of a descriptor: 128-byte swizzle, distance of eight rows


def thread_anew() -> Int32:
    """Index of the thread in the block, read again: unlike one that is kept it takes no register in between."""
    (thread,) = _asm("mov.u32 $0, %tid.x;", [Int32], [], [])
    return thread


def rows_of_thread(first_row: Int32, thread: Int32) -> list[Int32]:
    """The rows of a thread's accumulators, where those of the warpgroup begin with ``first_row``."""
    row = first_row + (thread % THREADS // 32 * 16 + thread % 32 // 4)
    return [row, row + 8]


def descriptor(address: Int32) -> Int32:
    """The part of a matrix descriptor that depends on the address: of rows of 128 bytes, contiguous along the dimension
    that is contracted.

    Args:
      address: In shared memory, a multiple of 1024.
    """
    return (address & 0x3FFFF) >> 4 | 1 << 16


def product_of_shared(a: Int32, b: Int32, columns: int, depth: int, a_rows: int, b_rows: int) -> list[Float32]:
    """Starts A times the transpose of B, both float16 in shared memory.

    Args:
      a: Descriptor of 64 rows, 64 channels each; the next 64 channels are ``a_rows`` rows further on.
      b: The same of ``columns`` rows.
      columns: Of the result.
      depth: Channels.
      a_rows: Rows between parts of 64 channels of A.
      b_rows: The same for B.

    Returns:
      Accumulators, not to be used before :func:`wait`.
    """
    step, steps_a_row = 16, SWIZZLE_BYTES // 32
    count = columns // 2
    body = []
    for k in range(depth // step):
        within, part = k % steps_a_row * 32 // _UNIT, k // steps_a_row * SWIZZLE_BYTES // _UNIT
        body += _moved("a", count, within + part * a_rows) + _moved("b", count + 1, within + part * b_rows)
        body.append(_mma(f"m64n{columns}k{step}.f32.f16.f16", count, "a", "b", k > 0, "1, 1, 0, 0"))
    return _issue(body, count, [a, b])


def product_of_registers(a: list[Uint32], b: Int32, columns: int, a_kind: str, b_kind: str) -> list[Float32]:
    """Starts A times the transpose of B, 8-bit floats, A in registers.

    Args:
      a: Four words for each 32 of the contracted dimension.
      b: Descriptor of ``columns`` rows of 128 bytes.
      columns: Of the result.
      a_kind: "e4m3" or "e5m2".
      b_kind: Likewise.

    Returns:
      Accumulators, not to be used before :func:`wait`.
    """
    count = columns // 2
    body = []
    for k in range(len(a) // 4):
        words = "{" + ", ".join(f"${count + 4 * k + i}" for i in range(4)) + "}"
        body += _moved("b", count + len(a), k * 32 // _UNIT)
        body.append(_mma(f"m64n{columns}k32.f32.{a_kind}.{b_kind}", count, words, "b", k > 0, "1, 1"))
    return _issue(body, count, [*a, b])


def wait(pending: int, accumulators: list[Float32]) -> list[Float32]:
    """Waits until at most ``pending`` products are under way, and returns the accumulators of a complete one."""
    return _asm(f"wgmma.wait_group.sync.aligned {pending};", [], accumulators, [])


def _mma(shape: str, count: int, a: str, b: str, accumulate: bool, more: str) -> str:
    results = "{" + ", ".join(f"${i}" for i in range(count)) + "}"
    return f"setp.ne.b32 p, {int(accumulate)}, 0; wgmma.mma_async.sync.aligned.{shape} {results}, {a}, {b}, p, {more};"


def _moved(name: str, operand: int, units: int) -> list[str]:
    """The descriptor of an operand, further on by 16-byte units, which never carry into the next field."""
    return [f"add.s32 u, ${operand}, {units};", f"mov.b64 {name}, {{u, h}};"]


def _issue(body: list[str], count: int, operands: list[Int32 | Uint32]) -> list[Float32]:
    declarations = f"{{ .reg .b64 a, b; .reg .b32 u, h; .reg .pred p; mov.b32 h, {_UPPER_HALF:#x};"
    lines = [declarations, "wgmma.fence.sync.aligned;", *body, "wgmma.commit_group.sync.aligned; }"]
    return _asm("\n".join(lines), [Float32] * count, [], operands)


def _asm(code: str, results: list[type], updated: list[Float32], operands: list[Int32 | Uint32]) -> list[Float32]:
    """PTX whose operands are, in this order, results, values that it updates, and values that it reads.

    That accumulators pass through the wait as updated values is what keeps their uses behind it.
    """
    old, inputs = [value.ir_value() for value in updated], [value.ir_value() for value in operands]
    types = [kind.mlir_type for kind in results] + [value.type for value in old]
    letters = {"f32": "f", "i32": "r"}
    constraints = [f"={letters[str(kind)]}" for kind in types]
    constraints += [str(len(results) + i) for i in range(len(old))]
    constraints += [letters[str(value.type)] for value in inputs]
    packed = llvm.inline_asm(
        llvm.StructType.get_literal(types),
        old + inputs,
        code,
        ",".join(constraints),
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
    kinds = results + [type(value) for value in updated]
    pairs = zip(kinds, types, strict=True)
    return [kind(llvm.extractvalue(value, packed, [i])) for i, (kind, value) in enumerate(pairs)]
