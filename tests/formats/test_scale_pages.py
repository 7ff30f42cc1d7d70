import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_fp4attn.formats import from_scale_pages, to_scale_pages

SHAPES = [(128, 4), (1, 1), (127, 3), (129, 5), (256, 8), (300, 9), (2, 64, 8), (2, 3, 130, 6)]

all_shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)


def random_scales(shape):
    # No zeros, so that a byte lost to the padding shows.
    return np.random.default_rng(0).integers(1, 256, shape, dtype=np.uint8)


def pages_by_loop(scales):
    """One byte after the other, by the formula of the page."""
    *batch, rows, columns = scales.shape
    pages = np.zeros((*batch, -(-rows // 128), -(-columns // 4), 512), np.uint8)
    for row in range(rows):
        for column in range(columns):
            offset = (row % 32) * 16 + ((row % 128) // 32) * 4 + column % 4
            pages[..., row // 128, column // 4, offset] = scales[..., row, column]
    return pages


@all_shapes
def test_bytes_are_where_the_formula_says_and_the_padding_is_zero(shape):
    scales = random_scales(shape)
    pages = to_scale_pages(scales)
    assert pages.dtype == jnp.uint8
    np.testing.assert_array_equal(pages, pages_by_loop(scales))


@all_shapes
def test_round_trip(shape):
    scales = random_scales(shape)
    back = from_scale_pages(to_scale_pages(scales), *shape[-2:])
    assert back.dtype == jnp.uint8
    np.testing.assert_array_equal(back, scales)


def test_jit_and_vmap_lay_out_the_same():
    scales = random_scales((2, 130, 6))
    pages = to_scale_pages(scales)
    np.testing.assert_array_equal(jax.jit(to_scale_pages)(scales), pages)
    np.testing.assert_array_equal(jax.vmap(to_scale_pages)(scales), pages)
    back = jax.vmap(lambda page: from_scale_pages(page, 130, 6))(pages)
    np.testing.assert_array_equal(back, scales)


@pytest.mark.parametrize("shape", [(), (4,)])
def test_rejects_scales_without_rows(shape):
    with pytest.raises(ValueError, match=r"scales: expected \[..., rows, scales a row\], got shape"):
        to_scale_pages(np.zeros(shape, np.uint8))


@pytest.mark.parametrize("shape", [(512,), (1, 512), (1, 1, 511)])
def test_rejects_what_are_no_pages(shape):
    with pytest.raises(ValueError, match=r"pages: expected .* 512\], got shape"):
        from_scale_pages(np.zeros(shape, np.uint8), 1, 1)


@pytest.mark.parametrize(("rows", "columns"), [(257, 4), (256, 5), (0, 4), (128, 0), (-1, 4)])
def test_rejects_a_size_that_does_not_fit_in_the_pages(rows, columns):
    with pytest.raises(ValueError, match=f"rows, columns: {rows} x {columns} does not fit"):
        from_scale_pages(np.zeros((2, 1, 512), np.uint8), rows, columns)
