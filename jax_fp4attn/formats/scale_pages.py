"""The 128 x 4 scale-factor page that block-scaled tensor-core instructions read."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

_ROWS = 128
_COLUMNS = 4


def to_scale_pages(scales: ArrayLike) -> jax.Array:
    """Lays scale bytes out in pages of 128 rows by 4 scales, padding with zero bytes.

    Within a page the byte of (row, column) sits at ``(row % 32) * 16 + (row // 32) * 4 + column``;
    pages follow one another along the scales of a row, then along rows (PTX ISA, tcgen05.mma
    scale-factor layout).

    Args:
      scales: uint8 array [..., rows, scales a row].

    Returns:
      uint8 array [..., ceil(rows / 128), ceil(scales / 4), 512].

    Raises:
      ValueError: If ``scales`` has fewer than two dimensions.

    Example:
      >>> pages = to_scale_pages(jnp.arange(128 * 4, dtype=jnp.uint8).reshape(128, 4))
      >>> pages.shape, pages[0, 0, 4:8].tolist()
      ((1, 1, 512), [128, 129, 130, 131])
    """
    scales = jnp.asarray(scales)
    if scales.ndim < 2:
        raise ValueError(f"scales: expected [..., rows, scales a row], got shape {scales.shape}")
    *batch, rows, columns = scales.shape
    pad = [(0, 0)] * len(batch) + [(0, -rows % _ROWS), (0, -columns % _COLUMNS)]
    scales = jnp.pad(scales, pad)
    row_pages, column_pages = scales.shape[-2] // _ROWS, scales.shape[-1] // _COLUMNS
    tiles = scales.reshape(*batch, row_pages, 4, 32, column_pages, _COLUMNS)
    n = len(batch)
    tiles = tiles.transpose(*range(n), n, n + 3, n + 2, n + 1, n + 4)
    return tiles.reshape(*batch, row_pages, column_pages, _ROWS * _COLUMNS)


def from_scale_pages(pages: ArrayLike, rows: int, columns: int) -> jax.Array:
    """Undoes :func:`to_scale_pages` and drops the padding.

    Args:
      pages: uint8 array [..., row pages, column pages, 512].
      rows: Rows of the result, at most 128 x row pages.
      columns: Scales a row of the result, at most 4 x column pages.

    Returns:
      uint8 array [..., rows, columns].

    Raises:
      ValueError: If the page size is not 512 or the result does not fit in the pages.

    Example:
      >>> scales = jnp.arange(130 * 5, dtype=jnp.uint8).reshape(130, 5)
      >>> bool((from_scale_pages(to_scale_pages(scales), 130, 5) == scales).all())
      True
    """
    pages = jnp.asarray(pages)
    if pages.ndim < 3 or pages.shape[-1] != _ROWS * _COLUMNS:
        raise ValueError(f"pages: expected [..., row pages, column pages, {_ROWS * _COLUMNS}], got shape {pages.shape}")
    *batch, row_pages, column_pages, _ = pages.shape
    if not (0 < rows <= row_pages * _ROWS and 0 < columns <= column_pages * _COLUMNS):
        raise ValueError(
            f"rows, columns: {rows} x {columns} does not fit in {row_pages} x {column_pages} pages "
            f"of {_ROWS} x {_COLUMNS}"
        )
    n = len(batch)
    tiles = pages.reshape(*batch, row_pages, column_pages, 32, 4, _COLUMNS)
    tiles = tiles.transpose(*range(n), n, n + 3, n + 2, n + 1, n + 4)
    return tiles.reshape(*batch, row_pages * _ROWS, column_pages * _COLUMNS)[..., :rows, :columns]
