"""Warpgroup MMAs on shared memory in the 128-byte swizzle, K contiguous."""

import cutlass
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm
from cutlass.experimental import primitives

Int32, Int64, Float32, Uint32 = cutlass.Int32, cutlass.Int64, cutlass.Float32, cutlass.Uint32

ROW_BYTES = 128
"""Bytes of a row in the swizzle, which is the K extent of a shared tile."""
_ROWS_A_PATTERN = 8
_SWIZZLE_128 = 1


def descriptor(tile: cutlass.Pointer) -> Int64:
    """Matrix descriptor of a tile of rows of 128 bytes.

    Args:
      tile: Its place in shared memory, a multiple of 1024.
    """
    address = Int64(tile.toint()) & 0x3FFFF
    constant = _SWIZZLE_128 << 62 | (_ROWS_A_PATTERN * ROW_BYTES >> 4) << 32 | 1 << 16
    return (address >> 4) | Int64(constant)


def multiply(
    sums: list[Float32], a: Int64 | list[Uint32], b: Int64, add: Int32, types: tuple[str, str], k: int
) -> list[Float32]:
    """Issues one instruction: ``a b^T``, plus the sums if ``add`` is not 0.

    Args:
      sums: Accumulators of a thread, n / 2 of them.
      a: Descriptor, or the four registers of a thread.
      b: Descriptor.
      add: Whether to add to the sums.
      types: PTX types of a and b.
      k: Extent of the instruction.

    Returns:
      The accumulators, which nothing may touch before a wait.
    """
    count = len(sums)
    from_registers = isinstance(a, list)
    inputs = [*(a if from_registers else [a]), b, add]
    results = ", ".join(f"${i}" for i in range(count))
    first = count
    places = [f"${first + i}" for i in range(len(inputs))]
    operand_a = f"{{{', '.join(places[:4])}}}" if from_registers else places[0]
    opcode = f"wgmma.mma_async.sync.aligned.m64n{2 * count}k{k}.f32.{types[0]}.{types[1]}"
    # 16-bit types say whether each operand in shared memory is transposed.
    transposed = "" if k == 32 else ", 0" if from_registers else ", 0, 0"
    code = (
        f"{{ .reg .pred p; setp.ne.b32 p, {places[-1]}, 0; "
        f"{opcode} {{{results}}}, {operand_a}, {places[-2]}, p, 1, 1{transposed}; }}"
    )
    kinds = ["r"] * 4 if from_registers else ["l"]
    constraints = ["=f"] * count + kinds + ["l", "r"] + [str(i) for i in range(count)]
    result = llvm.inline_asm(
        ir.Type.parse(f"!llvm.struct<({', '.join(['f32'] * count)})>"),
        [value.ir_value() for value in (*inputs, *sums)],
        code,
        ",".join(constraints),
        has_side_effects=True,
    )
    return [Float32(llvm.extractvalue(Float32.mlir_type, result, [i])) for i in range(count)]


def fence() -> None:
    """Orders register and shared accesses before the next instructions."""
    primitives.wgmma_fence_aligned()


def commit() -> None:
    """Ends a group of instructions."""
    primitives.wgmma_commit_group_sync_aligned()


def wait(sums: list[Float32], pending: int) -> list[Float32]:
    """Waits until at most ``pending`` groups are in flight; the sums pass through, so that no use moves before it."""
    count = len(sums)
    result = llvm.inline_asm(
        ir.Type.parse(f"!llvm.struct<({', '.join(['f32'] * count)})>"),
        [value.ir_value() for value in sums],
        f"wgmma.wait_group.sync.aligned {pending};",
        ",".join(["=f"] * count + [str(i) for i in range(count)]) + ",~{memory}",
        has_side_effects=True,
    )
    return [Float32(llvm.extractvalue(Float32.mlir_type, result, [i])) for i in range(count)]
