import json

import numpy as np
import pytest

from cuda.emulator import Output
from cuda.emulator.front import program_of
from cuda.emulator.manifest import read_manifest
from cuda.emulator.tensor_map import TensorMap
from tests.emulator.text import module

COPY = module(
    """
    mov.u32 %r1, %tid.x; mov.b32 %r2, buffer; setp.ne.u32 %p1, %r1, 0; @%p1 bra WAIT;
    mbarrier.init.shared.b64 [%r2+2048], 1; fence.mbarrier_init.release.cluster;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r2+2048], 2048;
    mov.b64 %d1, a0; cvta.param.u64 %d1, %d1; ld.param.u32 %r3, [a2]; mov.b32 %r5, 0; add.s32 %r4, %r2, 2048;
    cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r2], [%d1, {%r5, %r3}], [%r4];
WAIT:
    bar.warp.sync -1;
AGAIN:
    mbarrier.try_wait.parity.shared.b64 %p2, [%r2+2048], 0; @!%p2 bra AGAIN;
    ld.param.u64 %d2, [a1]; shl.b32 %r6, %r1, 2; cvt.u64.u32 %d3, %r6; add.s64 %d2, %d2, %d3; add.u32 %r7, %r2, %r6;
    ld.shared.b32 %r8, [%r7+128]; st.global.b32 [%d2], %r8;
    """,
    "mpi",
    shared=2056,
)


@pytest.fixture
def manifest(tmp_path):
    kernel = {
        "name": "copy_row",
        "entry": "k",
        "parameters": "source: tensor_map(bf16, 64x16, 128B), target: pointer, row: int32",
        "threads": 32,
        "shared_bytes": 0,
    }
    path = tmp_path / "kernels.json"
    path.write_text(json.dumps({"target": "sm_90a", "kernels": [kernel]}))
    return path


def test_tensor_maps_are_made_as_the_manifest_says(manifest):
    kernel = read_manifest(manifest)["copy_row"]
    source = np.arange(64 * 64, dtype=np.uint16).reshape(64, 64)
    values = {"source": source, "target": Output(np.zeros(32, np.uint32)), "row": 5}
    result = kernel.emulate(COPY, 1, values, seeds=range(3))
    assert not result.findings
    # Row 1 of the tile is swizzled: its 16-byte chunks are exchanged in pairs.
    row = source[6].reshape(4, 2, 8)[:, ::-1].reshape(-1).view(np.uint32)
    np.testing.assert_array_equal(result.arrays[0][1], row)


def test_a_tensor_map_is_taken_if_it_is_of_the_type_in_the_manifest(manifest):
    kernel = read_manifest(manifest)["copy_row"]
    source = np.arange(64 * 64, dtype=np.uint16).reshape(64, 64)
    given = TensorMap.for_array(source, (64, 16), "128B", element="bf16")
    values = {"source": given, "target": Output(np.zeros(32, np.uint32)), "row": 5}
    assert kernel.arguments(**values)[0] is given
    from_array = kernel.emulate(COPY, 1, values | {"source": source})
    from_program = kernel.emulate(program_of(COPY), 1, values)
    np.testing.assert_array_equal(from_program.arrays[0][1], from_array.arrays[0][1])
    for box, swizzle, element in (((64, 8), "128B", "bf16"), ((32, 16), "64B", "bf16"), ((64, 16), "128B", "u16")):
        other = TensorMap.for_array(source, box, swizzle, element=element)
        with pytest.raises(ValueError, match=r"expected a tensor_map\(bf16, 64x16, 128B\), got a tensor_map"):
            kernel.arguments(**values | {"source": other})


def test_parameters_are_given_by_name(manifest):
    kernel = read_manifest(manifest)["copy_row"]
    with pytest.raises(TypeError, match=r"missing \['row', 'source'\], unknown \['line'\]"):
        kernel.arguments(target=None, line=3)


def test_the_library_s_own_manifest():
    kernels = read_manifest("cuda/manifest/kernels.sm_100f.json")
    rows = kernels["quantize_rows_h64"]
    assert list(rows.parameters)[:3] == ["source", "codes", "pages"] and rows.threads == 128
    quantisers = [kernel for name, kernel in kernels.items() if name.startswith("quantize")]
    kinds = {kind for kernel in quantisers for kind in kernel.parameters.values()}
    assert kinds == {"pointer", "int32", "float32"}


def test_tensor_maps_of_the_library_s_own_manifest():
    kernels = read_manifest("cuda/manifest/kernels.sm_100f.json")
    parameters = kernels["blackwell_forward_h128_square"].parameters
    assert parameters["key_map"] == "tensor_map(u8, 64x128, 64B)"
    kernels = read_manifest("cuda/manifest/kernels.sm_90a.json")
    for head_size in (64, 128):
        parameters = kernels[f"forward_h{head_size}_e4m3"].parameters
        assert parameters["key_map"] == "tensor_map(f16, 64x128, 128B)"
        assert parameters["value_map"] == f"tensor_map(u8, 128x{head_size}, 128B)"
