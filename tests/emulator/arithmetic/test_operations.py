"""What `find` promises of every operation."""

import numpy as np
import pytest

from cuda.emulator.arithmetic.operations import find
from cuda.emulator.errors import UnsupportedInstructionError
from tests.emulator import sweeps


def random_operand(rng: np.random.Generator, code: str, shape: tuple[int, ...]) -> np.ndarray:
    if code == "b1":
        return rng.integers(0, 2, shape).astype(bool)
    size = int(code[1])
    return rng.integers(0, 256, (*shape, size), dtype="u1").view(f"u{size}")[..., 0].view(code)


@pytest.mark.parametrize("sweep", sweeps.SWEEPS, ids=lambda sweep: f"{sweep.name}-{sweep.target}")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_functions_are_elementwise(sweep):
    operation = sweep.operation
    rng = np.random.default_rng(0)
    operands = [random_operand(rng, code, (3, 32)) for code in operation.inputs]
    copies = [operand.copy() for operand in operands]
    for function in filter(None, (operation.function, operation.second)):
        result = function(*operands)
        assert result.shape == (3, 32) and result.dtype == np.dtype(operation.output)
        assert all(a.tobytes() == b.tobytes() for a, b in zip(operands, copies, strict=True))
        row = function(*[operand[1] for operand in operands])
        assert row.tobytes() == result[1].tobytes()
        scalars = [operand[1, 2] for operand in operands]
        scalar = np.asarray(function(*scalars))
        assert scalar.dtype == result.dtype and scalar.tobytes() == result[1, 2].tobytes()
        if len(operands) > 1:
            broadcast = function(*operands[:-1], operands[-1][2, 5])
            assert broadcast.shape == (3, 32) and broadcast[2, 5].tobytes() == result[2, 5].tobytes()
            broadcast = function(operands[0][:1], *operands[1:])
            assert broadcast.shape == (3, 32) and broadcast[0].tobytes() == result[0].tobytes()


@pytest.mark.parametrize(
    "opcode", ["mov.b32", "bra", "ld.global.b32", "tcgen05.alloc", "selp.f32", "shfl.sync.idx.b32"]
)
def test_other_instructions_are_not_found(opcode):
    assert find(tuple(opcode.split("."))) is None


@pytest.mark.parametrize(
    "opcode",
    [
        "add", "add.cc.u32", "add.rn.s32", "add.f8", "mul.s32", "mul.wide.u64", "fma.f32", "fma.rn.s32",
        "fma.rn.oob.f16", "div.f32", "rcp.f32", "sqrt.approx.f64", "ex2.f32", "ex2.approx.bf16",
        "tanh.approx.ftz.f32", "min.relu.u32", "max.xorsign.f32", "shf.l.b32", "shl.s32", "prmt.b64", "bfe.b32",
        "setp.f32", "setp.lt.and.or.f32", "set.lt.f64.f32", "cvt.rn.e4m3x2.f32", "cvt.rp.bf16x2.f32",
        "cvt.rn.f32.f32", "cvt.pack.u16.s32", "neg.u32", "fma.rz.f64", "lop3.or.b32",
    ],
)  # fmt: skip
def test_unknown_forms_are_refused(opcode):
    with pytest.raises(UnsupportedInstructionError, match=opcode.split(".")[0]):
        find(tuple(opcode.split(".")))


def test_simple_operations_are_the_ufuncs():
    for opcode, ufunc in {
        "add.s32": np.add,
        "add.f32": np.add,
        "and.b32": np.bitwise_and,
        "shl.b32": np.left_shift,
    }.items():
        assert find(tuple(opcode.split("."))).function is ufunc
