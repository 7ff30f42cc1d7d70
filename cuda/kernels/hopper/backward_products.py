"""Products of the backward, asynchronous; accumulators lie as :mod:`kernels.hopper.warpgroup` says.

Operands in shared memory are contiguous along the dimension that is contracted, in rows of 64 or 128 bytes one after
another; a longer dimension has several parts of such rows. The 16-byte chunks of a row are permuted as the copy engine
does it for rows of that length.
"""

import dataclasses

import cutlass
from cutlass._mlir.dialects import llvm
from kernels.words import Float32, Uint32

Int32, Pointer = cutlass.Int32, cutlass.Pointer

_UNIT = 16  # bytes, of addresses in a descriptor
_STEP = 32  # bytes that an instruction contracts
_MODES = {128: 1, 64: 2}  # of permutation, in a descriptor


@dataclasses.dataclass(frozen=True)
class Operand:
    """Rows in shared memory.

    Attributes:
      descriptor: The lower half of the first row's; the upper one does not depend on the address.
      row_bytes: 64 or 128.
      part_rows: Rows from one part to the next.
      kind: "f16", "e4m3" or "e5m2".
    """

    descriptor: Int32
    row_bytes: cutlass.Constexpr[int]
    part_rows: cutlass.Constexpr[int]
    kind: cutlass.Constexpr[str]

    def moved(self, count: Int32, size: int) -> "Operand":
        """The operand ``count`` times ``size`` bytes further on."""
        return dataclasses.replace(self, descriptor=self.descriptor + count * (size // _UNIT))

    def at(self, step: int, name: str, argument: int) -> list[str]:
        """PTX that puts the descriptor for a step of the contracted dimension into a register.

        Args:
          step: Of 32 bytes.
          name: Of the register.
          argument: Number of the lower half among the operands of the PTX.
        """
        part, within = step * _STEP // self.row_bytes, step * _STEP % self.row_bytes
        units = (part * self.part_rows * self.row_bytes + within) // _UNIT
        upper = 8 * self.row_bytes // _UNIT | _MODES[self.row_bytes] << 30
        return [f"add.s32 u, ${argument}, {units};", f"mov.b32 h, {upper:#x};", f"mov.b64 {name}, {{u, h}};"]


def operand(memory: Pointer, row_bytes: int, kind: str, part_rows: int = 0) -> Operand:
    """An operand of rows that start at a multiple of 8.

    Args:
      memory: Their bytes; a multiple of 8 rows from an address that is a multiple of 1024.
      row_bytes: 64 or 128.
      kind: "f16", "e4m3" or "e5m2".
      part_rows: Rows from one part to the next, if there are several.
    """
    return Operand(_kept((memory.toint(Int32) & 0x3FFFF) >> 4 | 1 << 16), row_bytes, part_rows, kind)


def _kept(value: Int32) -> Int32:
    """The same value, which the compiler cannot compute again: it would, in every step of a loop."""
    result = llvm.inline_asm(
        Int32.mlir_type,
        [value.ir_value()],
        "mov.b32 $0, $1;",
        "=r,r",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
    return Int32(result)


def of_shared(a: Operand, b: Operand, columns: int, depth_bytes: int) -> list[Float32]:
    """Starts A times the transpose of B.

    Args:
      a: 64 rows.
      b: ``columns`` rows.
      columns: Of the result.
      depth_bytes: Contracted of both.

    Returns:
      Accumulators, not to be used before :func:`kernels.hopper.warpgroup.wait`.
    """
    count = columns // 2
    lines = []
    for step in range(depth_bytes // _STEP):
        lines += [*a.at(step, "a", count), *b.at(step, "b", count + 1)]
        lines.append(_multiply(columns, a.kind, b.kind, "a", step))
    return _issue(lines, count, [a.descriptor, b.descriptor])


def of_registers(words: list[Uint32], b: Operand, columns: int) -> list[Float32]:
    """Starts A times the transpose of B with A in registers.

    Args:
      words: A in E4M3, four words for each 32 of the contracted dimension.
      b: ``columns`` rows.
      columns: Of the result.

    Returns:
      Accumulators, not to be used before :func:`kernels.hopper.warpgroup.wait`.
    """
    count = columns // 2
    lines = []
    for step in range(len(words) // 4):
        a = "{" + ", ".join(f"${count + 4 * step + i}" for i in range(4)) + "}"
        lines += [*b.at(step, "b", count + len(words)), _multiply(columns, "e4m3", b.kind, a, step)]
    return _issue(lines, count, [*words, b.descriptor])


def sums(old: list[Float32], product: list[Float32]) -> list[Float32]:
    """Adds a product that is complete."""
    return [before + added for before, added in zip(old, product, strict=True)]


def _multiply(columns: int, a_kind: str, b_kind: str, a: str, step: int) -> str:
    results = "{" + ", ".join(f"${i}" for i in range(columns // 2)) + "}"
    depth, more = (16, "1, 1, 0, 0") if a_kind == "f16" else (32, "1, 1")
    shape = f"m64n{columns}k{depth}.f32.{a_kind}.{b_kind}"
    return f"setp.ne.b32 p, {int(step > 0)}, 0; wgmma.mma_async.sync.aligned.{shape} {results}, {a}, b, p, {more};"


def _issue(lines: list[str], count: int, operands: list[Int32 | Uint32]) -> list[Float32]:
    start = "{ .reg .b64 a, b; .reg .b32 u, h; .reg .pred p; wgmma.fence.sync.aligned;"
    inputs = [value.ir_value() for value in operands]
    results = llvm.inline_asm(
        llvm.StructType.get_literal([Float32.mlir_type] * count),
        inputs,
        "\n".join([start, *lines, "wgmma.commit_group.sync.aligned; }"]),
        ",".join(["=f"] * count + ["r"] * len(inputs)),
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
    return [Float32(llvm.extractvalue(Float32.mlir_type, results, [i])) for i in range(count)]
