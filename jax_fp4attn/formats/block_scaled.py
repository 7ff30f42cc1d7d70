"""`BlockScaled`: packed E2M1 codes with a scale byte for each block of the last axis."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from jax_fp4attn.formats.minifloat import E2M1, E4M3, decode
from jax_fp4attn.formats.packing import unpack_codes
from jax_fp4attn.formats.power_of_two import decode_e8m0

ScaleFormat = Literal["e4m3", "e8m0"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockScaled:
    """A block-scaled FP4 tensor; a pytree whose leaves are arrays.

    The value of an element is ``decode(code) * decode(scale) * tensor_scale * unit``, where
    ``unit`` is 1 or, in the alpha/6 convention of MXFP4 (the scale is the block's endpoint, not its
    step), 1/6.

    Attributes:
      codes: uint8 [..., n // 2], two E2M1 codes a byte, low nibble first.
      scales: uint8 [..., n // block_size], E4M3 or E8M0 bytes.
      tensor_scale: float32, broadcastable against [..., n], or None for 1.
      block_size: Elements of the last axis that share a scale.
      scale_format: Format of the scale bytes.
      endpoint_scale: Whether a scale stands for the block's largest value (code 6) instead of its
        unit.
    """

    codes: jax.Array
    scales: jax.Array
    tensor_scale: jax.Array | None = None
    block_size: int = dataclasses.field(default=16, metadata={"static": True})
    scale_format: ScaleFormat = dataclasses.field(default="e4m3", metadata={"static": True})
    endpoint_scale: bool = dataclasses.field(default=False, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape of the tensor."""
        return (*self.codes.shape[:-1], 2 * self.codes.shape[-1])

    def scale_values(self) -> jax.Array:
        """Scale of each block as float32, [..., n // block_size], without the tensor scale."""
        if self.scale_format == "e4m3":
            return decode(self.scales, E4M3)
        return decode_e8m0(self.scales)

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
