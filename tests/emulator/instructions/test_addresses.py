import numpy as np
import pytest

from cuda.emulator import Output, emulate
from tests.emulator.kernels.case import entry

_SPACES = ("global", "shared::cta", "shared::cluster", "param", "local", "const")


@pytest.mark.parametrize("per_lane", [False, True])
def test_spaces_of_generic_addresses(per_lane):
    body = """
cvt.u64.u32 %d10, %r1;
cvta.shared.u64 %d10, %d10;
mov.u32 %r10, %cluster_ctarank;
xor.b32 %r10, %r10, 1;
mapa.u64 %d11, %d10, %r10;
mov.b64 %d12, %out;
mov.b64 %d13, out;
cvta.param.u64 %d13, %d13;
mov.u32 %r11, %cluster_ctarank;
mul.wide.u32 %d20, %r11, 96;
add.u64 %d20, %out, %d20;
"""
    if per_lane:
        body += "cvt.u64.u32 %d30, %r0;\nshl.b64 %d30, %d30, 2;\n"
        body += "".join(f"add.u64 %d{n}, %d{n}, %d30;\n" for n in range(10, 14))
    for i, address in enumerate(("%d12", "%d10", "%d11", "%d13")):
        for j, space in enumerate(_SPACES):
            body += f"isspacep.{space} %p1, {address};\nselp.b32 %r12, 1, 0, %p1;\n"
            body += f"st.global.b32 [%d20+{4 * (6 * i + j)}], %r12;\n"
    result = emulate(
        entry({"out": "pointer"}, body),
        [Output(np.zeros((2, 4, 6), np.uint32))],
        2,
        block=32,
        cluster=2,
        shared_bytes=64,
    )
    own, peer = [0, 1, 1, 0, 0, 0], [0, 0, 1, 0, 0, 0]
    expected = [[1, 0, 0, 0, 0, 0], own, peer, [0, 0, 0, 1, 0, 0]]
    np.testing.assert_array_equal(result.arrays[0][0], [expected, expected])


def test_the_rank_of_a_shared_address():
    body = """
and.b32 %r10, %r0, 1;
mapa.shared::cluster.u32 %r11, %r1, %r10;
getctarank.shared::cluster.u32 %r12, %r11;
mapa.shared::cluster.u32 %r13, %r1, 1;
getctarank.shared::cluster.u32 %r14, %r13;
shl.b32 %r15, %r14, 1;
add.u32 %r12, %r12, %r15;
mul.wide.u32 %d1, %r0, 4;
add.u64 %d1, %out, %d1;
st.global.b32 [%d1], %r12;
"""
    result = emulate(entry({"out": "pointer"}, body), [np.zeros(32, np.uint32)], 2, block=32, cluster=2, races=False)
    np.testing.assert_array_equal(result.arrays[0][0], np.arange(32) % 2 + 2)
