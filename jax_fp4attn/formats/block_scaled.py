"""`BlockScaled`: packed E2M1 codes with a scale byte for each block of the last axis."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from jax_fp4attn.formats.minifloat import E2M1, E4M3, decode
from jax_fp4attn.formats.packing import unpack_codes
from jax_fp4attn.formats.power_of_two import decode_e8m0
from jax_fp4attn.formats.scale_pages import from_scale_pages, to_scale_pages

ScaleFormat = Literal["e4m3", "e8m0"]
ScaleLayout = Literal["rows", "pages"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockScaled:
    """A block-scaled FP4 tensor; a pytree whose leaves are arrays.

    The value of an element is ``decode(code) * decode(scale) * tensor_scale * unit``, where
    ``unit`` is 1 or, in the alpha/6 convention of MXFP4 (the scale is the block's endpoint, not its
    step), 1/6.

    Attributes:
      codes: uint8 [..., n // 2], two E2M1 codes a byte, low nibble first.
      scales: uint8 [..., n // block_size], E4M3 or E8M0 bytes; in pages uint8 [..., ceil(rows / 128),
        ceil(n // block_size / 4), 512] for codes [..., rows, n // 2], where padding bytes are zero.
      tensor_scale: float32, broadcastable against [..., n], or None for 1.
      block_size: Elements of the last axis that share a scale.
      scale_format: Format of the scale bytes.
      endpoint_scale: Whether a scale stands for the block's largest value (code 6) instead of its
        unit.
      scale_layout: ``"rows"``, or ``"pages"`` (:func:`jax_fp4attn.formats.to_scale_pages`). In pages a row of codes
        has no row of scales of its own: take pages apart before cutting or joining rows.

    Example:
      >>> from jax_fp4attn.formats import quantize_nvfp4
      >>> in_pages = quantize_nvfp4(jnp.ones((130, 64))).in_pages()
      >>> in_pages.scales.shape, in_pages.scale_values().shape, in_pages.in_rows().scales.shape
      ((2, 1, 512), (130, 4), (130, 4))
    """

    codes: jax.Array
    scales: jax.Array
    tensor_scale: jax.Array | None = None
    block_size: int = dataclasses.field(default=16, metadata={"static": True})
    scale_format: ScaleFormat = dataclasses.field(default="e4m3", metadata={"static": True})
    endpoint_scale: bool = dataclasses.field(default=False, metadata={"static": True})
    scale_layout: ScaleLayout = dataclasses.field(default="rows", metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape of the tensor."""
        return (*self.codes.shape[:-1], 2 * self.codes.shape[-1])

    def in_pages(self) -> "BlockScaled":
        """The same tensor with its scales in pages, as block-scaled tensor-core instructions read them.

        Returns:
          The tensor itself if they are already.

        Raises:
          ValueError: If the tensor has fewer than two dimensions.
        """
        if self.scale_layout == "pages":
            return self
        return dataclasses.replace(self, scales=to_scale_pages(self.scales), scale_layout="pages")

    def in_rows(self) -> "BlockScaled":
        """The same tensor with a row of scales for each row of codes; undoes :meth:`in_pages`.

        Returns:
          The tensor itself if it is that already.
        """
        if self.scale_layout == "rows":
            return self
        *_, rows, size = self.shape
        scales = from_scale_pages(self.scales, rows, size // self.block_size)
        return dataclasses.replace(self, scales=scales, scale_layout="rows")

    def scale_values(self) -> jax.Array:
        """Scale of each block as float32, [..., n // block_size], without the tensor scale."""
        scales = self.in_rows().scales
        return decode(scales, E4M3) if self.scale_format == "e4m3" else decode_e8m0(scales)

    def code_values(self) -> jax.Array:
        """Unscaled element values as float32, [..., n]."""
        return decode(unpack_codes(self.codes), E2M1)

    def scaled_code_values(self) -> jax.Array:
        """Code times block scale, [..., n].

        This is what a block-scaled MMA multiplies, before tensor scale and unit.
        """
        return self.code_values() * jnp.repeat(self.scale_values(), self.block_size, axis=-1)

    def dequantize(self) -> jax.Array:
        """The represented values as float32, [..., n].

        Example:
          >>> from jax_fp4attn.formats import quantize_nvfp4
          >>> quantize_nvfp4(jnp.full((16,), 3.0)).dequantize().tolist()[:2]
          [3.0, 3.0]
        """
        values = self.code_values()
        if self.endpoint_scale:
            values = values / 6.0  # before the scale, whose product with 6 may overflow
        values = values * jnp.repeat(self.scale_values(), self.block_size, axis=-1)
        if self.tensor_scale is not None:
            values = values * self.tensor_scale
        return values
