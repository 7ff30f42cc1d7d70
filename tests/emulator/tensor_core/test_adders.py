"""Sums of products as an H200 forms them."""

import numpy as np
import pytest

from cuda.emulator.tensor_core.adders import Adder, wgmma_adder
from cuda.emulator.tensor_core.formats import WIDTH, decode
from cuda.emulator.tensor_core.products import from_accumulator
from tests.emulator.kernels.products import DTYPES
from tests.emulator.tensor_core.truncated_sums import truncated_sums

# Formats of a, b and the accumulator, the accumulator before and after a product, a and b, from tests/emulator/kernels/
# sums.py on an H200. Each of these fails for at least one sum of a kind: a bit more or less in an addend or the result,
# addends rounded down, a result rounded to the nearest (float32) or truncated (float16), groups of half the terms or
# fewer, normalised products, exact sums, and but for f16 to float16, an accumulator that is not aligned with products.
_RECORDED = """
bf16 bf16 f32 bd128d0e 3e43ded5
3f28be2b3f123ea0be86bf0bbecb3f123e4b3f48bf443fcfbefebfa63f773f46
3f41c018bf5540053ee93b463d82bf7cbde93e423e343f1bbf253f223f26bfcb
bf16 bf16 f32 3e0005a4 bf9eb29b
3e01be073f243dd7bf093eb93fa73f72bf34bfa2bf203d29c015be60bf9fbf3b
3f8cbf5cbf163f45befebfeb3f863c103ff43eb73e444038be30bf743e6b3f91
e4m3 e4m3 f16 9aa4 4b84
bdb4992114acd62cb049323bd4bb1d9d12b33d362a1f3144b723b7bfcb82190f
301e9b56d3bb4b24284a2d01ce49c4ca9b02bf39aa9d3f1548b72bac36aacda4
e4m3 e4m3 f16 3927 c467
20a0321db12c3a37b3bab213c1a6bab4b1aa2d38a03bb32b361cb4b7af26b8a5
b13a39b139b7bbc0b92faa3d35aba6a638ac87b43aabb2bc37b199ada4c0b5b9
e4m3 e4m3 f32 bfa61f55 3fd3dc00
22b1bbbb3038a3b936bab332c12cb11e9a2533b43b34353935361abba1b4bb28
b3b236be1fb2b03fb3b4bcbfa7b33325b73c390a353e2db11f2329392abdb5b9
e4m3 e4m3 f32 bffb7d7d 40410400
20a0321db12c3a37b3bab213c1a6bab4b1aa2d38a03bb32b361cb4b7af26b8a5
35202a3bb6192f38981dab3aaa339d10ba178fbcb4afbcba3cb8b6bb3a372a1b
e4m3 e5m2 f32 bfa61f55 3fcdc400
22b1bbbb3038a3b936bab332c12cb11e9a2533b43b34353935361abba1b4bb28
b9b93bbf30b9b83fbababebfb4b93a32bb3e3c253a3f36b83032343d35bfbabc
e4m3 e5m2 f32 bffb7d7d 404ee400
20a0321db12c3a37b3bab213c1a6bab4b1aa2d38a03bb32b361cb4b7af26b8a5
3a30353dbb2c383cac2eb63db539af28bd2ba8bebab7bebd3ebcbbbe3d3b352d
e5m2 e4m3 f32 bfc16f64 3fcdec00
bb3ba8323eb83fbebbbeba393a3534bdbd353db6bdbeb93eb3bcb9b834b9bbb2
b932b8baab3bbfb8bebaa2bb2a1e343fb8afb2ae2d32b03ba99fb6333401c1a8
e5m2 e4m3 f32 3f8adf22 40ba1400
30b0392fb8363d3cbabdb929c1b3bdbab8b5373cb03db9363b2ebabbb733bcb3
b0a9b333333740333238bc02bc3db03e38b1bdb938aabca63e3daf2a32bcb1ad
e5m2 e5m2 f32 be2093c8 40681400
3caab53fbdb9b839b9b9be3a3ab831bdb83e3041ba39b2399fb8bb42adc0b939
3ca9b6bf392dbfbdbcb7bb3abcb8bc3ab71d38a1b13a362fb631ba3e3537b9b3
e5m2 e5m2 f32 3f8adf22 40bc2400
30b0392fb8363d3cbabdb929c1b3bdbab8b5373cb03db9363b2ebabbb733bcb3
b8b5b9393a3b403a393cbe1dbe3eb83f3cb8bfbc3cb5beb33f3eb83539beb8b6
f16 f16 f16 351a c5a3
b5caa3203d5c297f3bf1b4e838b5410f384033a03100b6a0b1dcc0ac3cfd329f
4bfc2903a96bc5eb449436a7be63c2b2b3823fab348fc38136cebdcdb0e435dc
f16 f16 f16 3e37 bb4a
3e63bc6db978402e3586bac93c333c9d33c539f52c9f37c234f1bc153e5abc1b
b893b5cd38293837b05339eebd8038233c55ab873cecb919b5d5c01cbf46343f
f16 f16 f32 be91485f 3f4a766f
ba9c3e7cb21fb9f2af7b33a48958358834403f69b5cfbbf03733bc6dc1383d1c
b19db8a739e2b18cb4fbb8c93cb7b5bb2c56bb5428ab30b138d539fcbff3b83e
f16 f16 f32 3ea32b9e bf00718d
3006b03a39202eb7b84935c93d373b94b9a1bd10b8fc294ac0a6b300bcfcb9dc
bca9bb443732c265bc5f3a5db8b2be823fb4bda4b830b5f72d52b5e9ad2f2b5c
tf32 tf32 f32 be317ef3 3ef390e9
3f499f623f58158a3d9ad0d3bfb6a087be0a4943bf44fee9bfb61c673e8453ed
bf18c9b1bf2ba1ddbf30e1b7bfb9337b3f411f6cbecaaea83eefb1373f06d977
tf32 tf32 f32 3f93ff91 3fc8d3ce
3e00bf6cbe07467f3f23f2bd3dd6d5dfbf0921a13eb922fd3fa6e9793f7273e6
3f4e574cbf9ce9b9bcb895673dfe62813f5cbc2a3dedb1383f4dd81ebf011334
"""
_KINDS = [(a, a, "f32") for a in ("bf16", "f16", "tf32", "e4m3", "e5m2")] + [
    ("f16", "f16", "f16"), ("e4m3", "e5m2", "f32"), ("e5m2", "e4m3", "f32"), ("e4m3", "e4m3", "f16"),
]  # fmt: skip


def _values(text: str, kind: str) -> np.ndarray:
    size = np.dtype(DTYPES[kind]).itemsize
    codes = np.frombuffer(bytes.fromhex(text), f">u{size}").astype(f"u{size}")
    return decode(codes.view(np.uint8)[None], kind)


def _recorded() -> list[tuple]:
    """Kinds, values of a and b, words of the accumulator before and after."""
    lines, found = _RECORDED.split("\n")[1:-1], []
    for head, a, b in zip(lines[0::3], lines[1::3], lines[2::3], strict=True):
        *kinds, start, end = head.split()
        words = [np.array([[int(word, 16)]], np.uint32) for word in (start, end)]
        found.append((tuple(kinds), _values(a, kinds[0]), _values(b, kinds[1]), *words))
    return found


def _mistaken(change: tuple[int, int]) -> dict[tuple, bool]:
    """By kind, whether an adder with more or fewer bits gives another sum than the hardware."""
    found = {}
    for kinds, a, b, start, end in _recorded():
        right = wgmma_adder(*kinds)
        adder = Adder(*kinds, right.fraction_bits + change[0], right.result_bits + change[1])
        found[kinds] = found.get(kinds, False) or adder.add(a, b, start)[0, 0] != end
    return found


def test_recorded_sums() -> None:
    assert len({kinds for kinds, *_ in _recorded()}) == 9
    for kinds, a, b, start, end in _recorded():
        assert wgmma_adder(*kinds).add(a, b, start)[0, 0] == end, kinds


@pytest.mark.parametrize("change", [-1, 1])
def test_recorded_sums_tell_the_bits_of_terms(change: int) -> None:
    assert all(_mistaken((change, 0)).values())


@pytest.mark.parametrize("change", [-1, 1])
def test_recorded_sums_tell_the_bits_of_results(change: int) -> None:
    mistaken = _mistaken((0, change))
    # A float16 has other bits, and a float32 no 24th behind the leading one.
    assert all(wrong for (a, _, d), wrong in mistaken.items() if d == "f32" and (change < 0 or WIDTH[a] == 8))


def _operands(kinds: tuple[str, str, str], rng: np.random.Generator, exponents: int) -> list[np.ndarray]:
    shapes, types = ((16, 16), (24, 16), (16, 24)), (DTYPES[kinds[0]], DTYPES[kinds[1]], kinds[2].replace("f", "float"))
    drawn = []
    for shape, type_ in zip(shapes, types, strict=True):
        wide = rng.standard_normal(shape) * 2.0 ** rng.integers(-exponents, exponents + 1, shape)
        narrow = wide.astype(np.float32).astype(type_)
        drawn.append(decode(narrow.view(np.uint8), "tf32") if type_ == np.float32 else narrow.astype(np.float64))
    return drawn


def _words(start: np.ndarray, kind: str) -> np.ndarray:
    """(N, M) words of accumulators (M, N)."""
    start = np.ascontiguousarray(start.T)
    return (
        start.astype(np.float32).view(np.uint32)
        if kind == "f32"
        else start.astype(np.float16).view(np.uint16).astype(np.uint32)
    )


@pytest.mark.parametrize("exponents", [0, 4, 7])
@pytest.mark.parametrize("kinds", _KINDS, ids="-".join)
def test_integer_arithmetic(kinds: tuple[str, str, str], exponents: int) -> None:
    a, b, start = _operands(kinds, np.random.default_rng(exponents), exponents)
    actual = from_accumulator(wgmma_adder(*kinds).add(a, b, _words(start, kinds[2])), kinds[2]).T
    np.testing.assert_array_equal(actual, truncated_sums(a, b, start, kinds))


@pytest.mark.parametrize("kind", ["bf16", "tf32"])
@pytest.mark.parametrize("shift", [-62, -70, 56])
def test_exponents_beyond_those_of_float32_products(kind: str, shift: int) -> None:
    a, b, start = _operands((kind, kind, "f32"), np.random.default_rng(0), 4)
    a, b, start = (x * 2.0**s for x, s in ((a, shift), (b, shift), (start, 2 * shift)))
    start = start.astype(np.float32).astype(np.float64)
    actual = wgmma_adder(kind, kind, "f32").add(a, b, _words(start, "f32")).view(np.float32).T
    np.testing.assert_array_equal(actual, truncated_sums(a, b, start, (kind, kind, "f32")))


def test_order_is_of_no_effect() -> None:
    rng = np.random.default_rng(1)
    a, b, start = _operands(("e4m3", "e4m3", "f32"), rng, 3)
    order, add = rng.permutation(16), wgmma_adder("e4m3", "e4m3", "f32").add
    words = _words(start, "f32")
    np.testing.assert_array_equal(add(a, b, words), add(a[:, order], b[:, order], words))


def test_no_accumulators_are_zeros() -> None:
    a, b, _ = _operands(("bf16", "bf16", "f32"), np.random.default_rng(2), 3)
    add = wgmma_adder("bf16", "bf16", "f32").add
    np.testing.assert_array_equal(add(a, b, None), add(a, b, np.zeros((24, 16), np.uint32)))


@pytest.mark.parametrize(
    ("a", "b", "start", "expected"),
    [
        ([2.0, -2.0], [3.0, 3.0], 0.0, 0x00000000),
        ([-0.0, -0.0], [1.0, 1.0], -0.0, 0x00000000),
        ([1.0, -(2.0**-30)], [1.0, 1.0], -1.0, 0x00000000),
        ([np.inf, 1.0], [1.0, 1.0], 0.0, 0x7F800000),
        ([1.0, 1.0], [1.0, 1.0], -np.inf, 0xFF800000),
        ([np.inf, np.inf], [1.0, -1.0], 0.0, 0x7FFFFFFF),
        ([np.inf, 1.0], [0.0, 1.0], 0.0, 0x7FFFFFFF),
        ([1.0, 1.0], [1.0, 1.0], np.nan, 0x7FFFFFFF),
        ([2.0**64, 2.0**64], [2.0**63, 2.0**63], 0.0, 0x7F800000),
    ],
)
def test_zeros_infinities_and_nan(a: list[float], b: list[float], start: float, expected: int) -> None:
    words = wgmma_adder("bf16", "bf16", "f32").add(np.array([a]), np.array([b]), _words(np.array([[start]]), "f32"))
    assert words.tolist() == [[expected]]


def test_float16_nan_and_overflow() -> None:
    add = wgmma_adder("f16", "f16", "f16").add
    a, b = np.array([[256.0, 256.0]]), np.array([[256.0, 256.0], [np.nan, 0.0]])
    assert add(a, b, None).tolist() == [[0x7C00], [0x7FFF]]
