"""Products of the tensor core, issued by one thread of a warp: Q K with NVFP4 operands, P V with MXFP4 or E4M3 ones.

All operations of the tensor core are issued by the same thread, so that they take effect in the order of issue: scale
factors are there for the product behind them, and a product may write over what earlier ones read.
"""

import dataclasses

import cutlass
from cutlass.experimental import primitives
from kernels import tile
from kernels.blackwell.tensor_memory import KEY_SCALES, OUTPUTS, P_SCALES, QUERY_SCALES, SCORES, VALUE_SCALES, P

Int32, Pointer = cutlass.Int32, cutlass.Pointer

_UNIT = 16  # bytes, of a matrix descriptor
_STEP_BYTES = 32  # of a row, that one instruction contracts
_STEP_COLUMNS = 8  # the same of A in tensor memory
_PAGE_BYTES, _PAGE_COLUMNS = 512, 4
_SWIZZLES = {32: 6, 64: 4, 128: 2}
_VERSION = 1 << 14
_PAGE_STRIDE = 128 // _UNIT  # from 8 rows of scale factors to the next

# Of an instruction descriptor.
_E2M1 = 1 << 7 | 1 << 10
_E8M0_SCALES = 1 << 23
_FLOAT32 = 1 << 4
_ROWS = tile.ROWS >> 4 << 24


def _columns(count: int) -> int:
    return count >> 3 << 17


def _scale_ids(step: int) -> int:
    """The half word in which the two scale factors of a step are, for A and for B."""
    return (2 * step) << 29 | (2 * step) << 4


@dataclasses.dataclass
class _Code:
    """PTX of one elected thread; registers s0, s1, ... and operands are 32-bit."""

    lines: list[str] = dataclasses.field(default_factory=list)

    def matrix(self, name: str, address: str, offset: int, row_bytes: int) -> None:
        """A descriptor of swizzled rows, contiguous along the dimension that is contracted."""
        upper = _SWIZZLES[row_bytes] << 29 | _VERSION | 8 * row_bytes // _UNIT
        self._descriptor(name, address, offset, 1, upper)

    def _descriptor(self, name: str, address: str, offset: int, leading: int, upper: int) -> None:
        """From an address in shared memory, of 18 bits, and fields; rows of one swizzle or page have no leading one."""
        self.lines += [
            f"add.u32 s0, {address}, {offset};",
            "shr.u32 s0, s0, 4;",
            f"or.b32 s0, s0, {leading << 16:#x};",
            f"mov.b32 s1, {upper};",
            f"mov.b64 {name}, {{s0, s1}};",
        ]

    def copy_scales(self, column: str, offset: int, address: str, pages: int) -> None:
        """Copies pages of scale factors to tensor memory, to all lane quadrants."""
        for page in range(pages):
            self._descriptor("a", address, page * _PAGE_BYTES, _PAGE_STRIDE, _VERSION | _PAGE_STRIDE)
            self.lines += [
                f"add.u32 s2, {column}, {offset + page * _PAGE_COLUMNS};",
                "@p tcgen05.cp.cta_group::1.32x128b.warpx4 [s2], a;",
            ]

    def multiply(self, kind: str, operands: str, descriptor: int, scales: str, accumulate: str) -> None:
        """One instruction; ``accumulate`` is a predicate."""
        self.lines += [
            f"mov.b32 s5, {descriptor:#x};",
            f"@p tcgen05.mma.cta_group::1.kind::{kind} {operands}, s5, {scales}{accumulate};",
        ]

    def commit(self, barrier: str) -> None:
        """An arrival when all that the thread has issued is done."""
        self.lines.append(f"@p tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [{barrier}];")

    def issue(self, *operands: Int32) -> None:
        declarations = (
            "{ .reg .pred p, q; .reg .b32 s0, s1, s2, s3, s4, s5; .reg .b64 a, b; elect.sync s0|p, 0xffffffff;"
        )
        primitives.inline_ptx("\n".join([declarations, *self.lines, "}"]), read_only_args=list(operands))


def multiply_query_and_key(
    tensor: Int32, stage: int, query: Int32, query_pages: Int32, key: Int32, key_pages: Int32, head_size: int
) -> None:
    """Issues the scores of a stage; their scale factors go to columns of the other stage's scores.

    Args:
      tensor: Address of tensor memory.
      stage: Of the query tile.
      query: Address of its rows in shared memory.
      query_pages: Of its scale factors.
      key: Of the key tile's rows.
      key_pages: Of its scale factors.
      head_size: 64 or 128.
    """
    code = _Code()
    steps, row_bytes = head_size // 64, head_size // 2
    other = SCORES[1 - stage].first
    code.copy_scales("{$r0}", other + QUERY_SCALES.first, "{$r2}", steps)
    code.copy_scales("{$r0}", other + KEY_SCALES.first, "{$r4}", steps)
    code.lines.append(f"add.u32 s2, {{$r0}}, {SCORES[stage].first};")
    for step in range(steps):
        code.matrix("a", "{$r1}", step * _STEP_BYTES, row_bytes)
        code.matrix("b", "{$r3}", step * _STEP_BYTES, row_bytes)
        code.lines += [
            f"add.u32 s3, {{$r0}}, {other + QUERY_SCALES.first + step * _PAGE_COLUMNS};",
            f"add.u32 s4, {{$r0}}, {other + KEY_SCALES.first + step * _PAGE_COLUMNS};",
            f"setp.ne.b32 q, {step}, 0;",
        ]
        descriptor = _E2M1 | _columns(tile.ROWS) | _ROWS
        code.multiply("mxf4nvf4.block_scale.block16", "[s2], a, b", descriptor, "[s3], [s4], ", "q")
    code.issue(tensor, query, query_pages, key, key_pages)


def multiply_mxfp4_p_and_value(
    tensor: Int32, stage: int, value: Int32, value_pages: Int32, accumulate: Int32, head_size: int
) -> None:
    """Issues a tile's part of the output of a stage, whose P is in tensor memory.

    Args:
      tensor: Address of tensor memory.
      stage: Of the query tile.
      value: Address of the value tile's channels in shared memory.
      value_pages: Of its scale factors.
      accumulate: 0 for an item's first tile, else 1.
      head_size: 64 or 128.
    """
    code = _Code()
    scores = SCORES[stage].first
    code.copy_scales("{$r0}", scores + VALUE_SCALES.first, "{$r2}", 1)
    code.lines += [
        f"add.u32 s3, {{$r0}}, {scores + P_SCALES.first};",
        f"add.u32 s4, {{$r0}}, {scores + VALUE_SCALES.first};",
    ]
    for step in range(tile.ROWS // 64):
        descriptor = _E2M1 | _E8M0_SCALES | _columns(head_size) | _ROWS | _scale_ids(step)
        operands = _output_operands(code, stage, step, tile.ROWS // 2)
        code.multiply("mxf4.block_scale.block32", operands, descriptor, "[s3], [s4], ", "q")
    code.issue(tensor, value, value_pages, accumulate)


def multiply_e4m3_p_and_value(tensor: Int32, stage: int, value: Int32, accumulate: Int32, head_size: int) -> None:
    """The same with E4M3 P and values, which have no scale factors."""
    code = _Code()
    for step in range(tile.ROWS // 32):
        operands = _output_operands(code, stage, step, tile.ROWS, accumulate="{$r2}")
        code.multiply("f8f6f4", operands, _FLOAT32 | _columns(head_size) | _ROWS, "", "q")
    code.issue(tensor, value, accumulate)


def _output_operands(code: _Code, stage: int, step: int, row_bytes: int, accumulate: str = "{$r3}") -> str:
    """Output, P and value of a step; q says whether it adds to the output."""
    code.matrix("b", "{$r1}", step * _STEP_BYTES, row_bytes)
    code.lines += [
        f"add.u32 s2, {{$r0}}, {OUTPUTS[stage].first};",
        f"add.u32 s0, {{$r0}}, {SCORES[stage].first + P.first + step * _STEP_COLUMNS};",
        f"setp.ne.b32 q, {1 if step else accumulate}, 0;",
    ]
    return "[s2], [s0], b"


def commit(barrier: Pointer) -> None:
    """Lets a barrier know when everything that has been issued is done."""
    code = _Code()
    code.commit("{$r0}")
    code.issue(barrier.toint(Int32))
