import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

from jax_fp4attn.formats import E2M1, decode, pack_codes, unpack_codes


def every_pair():
    """All 256 pairs of codes, [256, 2]."""
    return np.stack(np.meshgrid(np.arange(16), np.arange(16), indexing="ij"), -1).reshape(-1, 2)


def test_the_even_element_is_in_the_low_nibble():
    pairs = every_pair()
    packed = pack_codes(pairs)
    assert packed.dtype == jnp.uint8
    np.testing.assert_array_equal(packed[:, 0], pairs[:, 0] + 16 * pairs[:, 1])


def test_unpacking_every_byte_gives_low_then_high_nibble():
    packed = np.arange(256, dtype=np.uint8)
    codes = unpack_codes(packed)
    assert codes.dtype == jnp.uint8
    np.testing.assert_array_equal(codes[0::2], packed % 16)
    np.testing.assert_array_equal(codes[1::2], packed // 16)


@pytest.mark.parametrize("shape", [(0,), (2,), (3, 6), (2, 0, 4), (2, 3, 4)])
def test_unpacking_undoes_packing(shape):
    codes = np.random.default_rng(0).integers(0, 16, shape, dtype=np.uint8)
    packed = pack_codes(codes)
    assert packed.shape == (*shape[:-1], shape[-1] // 2)
    np.testing.assert_array_equal(unpack_codes(packed), codes)


def test_packed_bytes_are_the_memory_of_a_float4_array():
    packed = np.arange(256, dtype=np.uint8)
    as_float4 = lax.bitcast_convert_type(packed, jnp.float4_e2m1fn)
    assert as_float4.shape == (256, 2)
    np.testing.assert_array_equal(as_float4.astype(jnp.float32).reshape(-1), decode(unpack_codes(packed), E2M1))


def test_packing_float4_values_gives_their_memory():
    codes = np.arange(16, dtype=np.uint8)[::-1]
    values = codes.copy().view(ml_dtypes.float4_e2m1fn)
    memory = lax.bitcast_convert_type(jnp.asarray(values).reshape(-1, 2), jnp.uint8)
    np.testing.assert_array_equal(pack_codes(codes), memory)


def test_jit_and_vmap_pack_the_same():
    codes = np.random.default_rng(0).integers(0, 16, (3, 4, 8))
    packed = pack_codes(codes)
    np.testing.assert_array_equal(jax.jit(pack_codes)(codes), packed)
    np.testing.assert_array_equal(jax.vmap(pack_codes)(codes), packed)
    np.testing.assert_array_equal(jax.vmap(unpack_codes)(packed), codes)


@pytest.mark.parametrize("shape", [(), (3,), (2, 5)])
def test_rejects_an_odd_number_of_codes(shape):
    with pytest.raises(ValueError, match="codes: expected an even last dimension, got shape"):
        pack_codes(np.zeros(shape, np.uint8))
