import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_fp4attn.formats import BlockScaled, to_scale_pages
from tests.formats import oracles
from tests.formats.oracles import assert_same_bytes, assert_same_floats, decode_e2m1, decode_e4m3


def random_tensor(shape=(3, 64), *, tensor_scale=None, **static):
    rng = np.random.default_rng(0)
    block = static.get("block_size", 16)
    low, high = (1, 0x7E) if static.get("scale_format", "e4m3") == "e4m3" else (100, 150)
    return BlockScaled(
        jnp.asarray(rng.integers(0, 256, (*shape[:-1], shape[-1] // 2), dtype=np.uint8)),
        jnp.asarray(rng.integers(low, high, (*shape[:-1], shape[-1] // block), dtype=np.uint8)),
        tensor_scale,
        **static,
    )


MXFP4 = {"block_size": 32, "scale_format": "e8m0"}

TENSORS = {
    "nvfp4": random_tensor(),
    "nvfp4 with tensor scale": random_tensor(tensor_scale=jnp.full((3, 1), 0.25)),
    "mxfp4 endpoint": random_tensor(endpoint_scale=True, **MXFP4),
    "mxfp4 ocp": random_tensor(**MXFP4),
}

every_tensor = pytest.mark.parametrize("q", TENSORS.values(), ids=TENSORS)


class TestValues:
    @every_tensor
    def test_of_every_convention(self, q):
        """Code times scale in float64, over 6 for an endpoint."""
        codes = decode_e2m1(oracles.unpack(q.codes)).astype(np.float64)
        stored = np.asarray(q.scales)
        if q.scale_format == "e4m3":
            scales = decode_e4m3(stored).astype(np.float64)
        else:
            scales = 2.0 ** (stored.astype(np.float64) - 127)
        scaled = codes * np.repeat(scales, q.block_size, axis=-1)
        unit = 1 / 6 if q.endpoint_scale else 1.0
        tensor_scale = 1.0 if q.tensor_scale is None else np.asarray(q.tensor_scale, np.float64)

        assert_same_floats(q.code_values(), codes)
        assert_same_floats(q.scale_values(), scales)
        assert_same_floats(q.scaled_code_values(), scaled)
        assert_same_floats(q.dequantize(), (scaled * unit * tensor_scale).astype(np.float32))
        assert q.shape == q.dequantize().shape == (3, 64)

    def test_a_tensor_scale_broadcasts_against_the_tensor(self):
        q = random_tensor((2, 3, 32))
        values = q.dequantize()
        for scale in (jnp.float32(3.0), jnp.array([[[2.0]], [[4.0]]]), jnp.full((2, 3, 1), 5.0)):
            scaled = dataclasses.replace(q, tensor_scale=scale)
            assert_same_floats(scaled.dequantize(), values * scale)

    def test_an_endpoint_is_the_value_of_code_6_for_every_byte(self):
        # 6 * 2**127 overflows, so that the order of the products counts. Below byte 4 a sixth of the
        # scale is subnormal, which may be flushed.
        byte = np.arange(4, 255, dtype=np.uint8)[:, None]
        q = BlockScaled(jnp.full((251, 16), 0x77, jnp.uint8), jnp.asarray(byte), endpoint_scale=True, **MXFP4)
        expected = np.broadcast_to(np.ldexp(1.0, byte.astype(int) - 127), (251, 32))
        assert_same_floats(q.dequantize(), expected)
        assert_same_floats(jax.jit(BlockScaled.dequantize)(q), expected)

    def test_finite_values_pass_where_nans_are_errors(self):
        with jax.debug_nans(True):
            for q in TENSORS.values():
                assert np.isfinite(q.dequantize()).all()

    def test_a_nan_scale_makes_its_block_nan(self):
        scales = jnp.array([0x38, 0x7F], jnp.uint8)
        q = BlockScaled(jnp.full((16,), 0x22, jnp.uint8), scales)
        assert_same_floats(q.dequantize(), [1.0] * 16 + [np.nan] * 16)


class TestPages:
    TENSORS: ClassVar = {
        "nvfp4": random_tensor((2, 130, 80)),
        "nvfp4 with tensor scale": random_tensor((3, 128, 64), tensor_scale=jnp.full((3, 1, 1), 0.25)),
        "mxfp4 endpoint": random_tensor((2, 200, 160), endpoint_scale=True, **MXFP4),
    }
    all_of_these = pytest.mark.parametrize("q", TENSORS.values(), ids=TENSORS)

    @all_of_these
    def test_scales_are_pages_with_zeros_behind_rows_and_blocks(self, q):
        pages = q.in_pages()
        assert pages.scale_layout == "pages"
        assert pages.scales.dtype == jnp.uint8
        *batch, rows, blocks = q.scales.shape
        assert pages.scales.shape == (*batch, -(-rows // 128), -(-blocks // 4), 512)
        np.testing.assert_array_equal(pages.scales, to_scale_pages(q.scales))
        np.testing.assert_array_equal(pages.scales.sum(dtype=int), q.scales.sum(dtype=int))

    @all_of_these
    def test_values_are_the_same(self, q):
        pages = q.in_pages()
        for values in (BlockScaled.scale_values, BlockScaled.scaled_code_values, BlockScaled.dequantize):
            assert_same_floats(values(pages), values(q))
            assert_same_floats(jax.jit(values)(pages), values(q))
        assert pages.shape == q.shape

    @all_of_these
    def test_round_trip(self, q):
        assert_same_bytes(q.in_pages().in_rows(), q)

    def test_a_layout_that_it_has_already_is_left_alone(self):
        q = self.TENSORS["nvfp4"]
        pages = q.in_pages()
        assert q.in_rows() is q
        assert pages.in_pages() is pages

    def test_a_vector_has_no_pages(self):
        with pytest.raises(ValueError, match="scales: expected"):
            BlockScaled(jnp.zeros(16, jnp.uint8), jnp.zeros(2, jnp.uint8)).in_pages()


class TestPytree:
    def test_leaves_are_the_arrays(self):
        q = TENSORS["nvfp4 with tensor scale"]
        leaves = jax.tree.leaves(q)
        arrays = (q.codes, q.scales, q.tensor_scale)
        assert all(leaf is array for leaf, array in zip(leaves, arrays, strict=True))
        assert len(jax.tree.leaves(TENSORS["nvfp4"])) == 2

    @every_tensor
    def test_tree_map_keeps_the_static_fields(self, q):
        mapped = jax.tree.map(lambda leaf: leaf[1:], q)
        assert isinstance(mapped, BlockScaled)
        assert mapped.shape == (2, 64)
        for name in ("block_size", "scale_format", "endpoint_scale", "scale_layout"):
            assert getattr(mapped, name) == getattr(q, name)
        assert_same_floats(mapped.dequantize(), q.dequantize()[1:])

    @pytest.mark.parametrize(
        "change",
        [{"block_size": 32}, {"scale_format": "e8m0"}, {"endpoint_scale": True}, {"scale_layout": "pages"}],
    )
    def test_static_fields_distinguish_tree_structures(self, change):
        q = TENSORS["nvfp4"]
        assert jax.tree.structure(q) != jax.tree.structure(dataclasses.replace(q, **change))

    @every_tensor
    def test_jit_takes_and_returns_it(self, q):
        assert_same_bytes(jax.jit(lambda q: q)(q), q)
        assert_same_floats(jax.jit(BlockScaled.dequantize)(q), q.dequantize())

    @every_tensor
    def test_vmap_maps_over_its_rows(self, q):
        assert_same_floats(jax.vmap(BlockScaled.dequantize)(q), q.dequantize())
        assert_same_bytes(jax.vmap(lambda q: q)(q), q)

    @every_tensor
    def test_scan_carries_it(self, q):
        def exchange(carry, _):
            return jax.tree.map(lambda leaf: jnp.roll(leaf, 1, axis=0), carry), carry.dequantize()

        last, values = jax.lax.scan(exchange, q, length=3)
        assert_same_bytes(last, q)
        expected = [np.roll(q.dequantize(), i, axis=0) for i in range(3)]
        assert_same_floats(values, np.stack(expected))

    def test_scan_maps_over_its_rows(self):
        q = TENSORS["mxfp4 endpoint"]
        _, values = jax.lax.scan(lambda carry, row: (carry, row.dequantize()), None, q)
        assert_same_floats(values, q.dequantize())

    def test_is_frozen(self):
        with pytest.raises(dataclasses.FrozenInstanceError):
            TENSORS["nvfp4"].block_size = 32
