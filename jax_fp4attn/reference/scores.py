"""Raw scores of a key tile: product, dense bias and mask."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from jax_fp4attn.config import OperatorConfig, Visibility
from jax_fp4attn.reference.masking import dense_tile, visible_in_tile

_LARGEST_BIAS = 2.0**126  # log2(e) times that is finite


@dataclasses.dataclass(frozen=True)
class ScoreTile:
    """Computes raw scores of a tile; the forward and the backward share it, so that P can be rebuilt.

    Attributes:
      config: Static arguments.
      query: Dequantised query, float32 [B, K, G, T, H].
      bias: float32, broadcastable to [B, N, T, S], or None; natural-log units, added after the softmax scale.
      visibility: Run-time restrictions.
      num_keys: S.
    """

    config: OperatorConfig
    query: jax.Array
    bias: jax.Array | None
    visibility: Visibility
    num_keys: int

    def __call__(self, key: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Masked raw scores and visibility of one tile.

        Args:
          key: Dequantised keys of the tile, float32 [B, K, 128, H].
          positions: int32 [128], see :func:`jax_fp4attn.reference.tiles.key_positions`.

        Returns:
          float32 [B, K, G, T, 128] with -inf where not visible, and bool broadcastable to it.
        """
        raw = jnp.einsum("bkgth,bksh->bkgts", self.query, key, precision=lax.Precision.HIGHEST)
        num_kv_heads, num_queries = self.query.shape[1], self.query.shape[3]
        if self.bias is not None:
            slots = jnp.minimum(positions, self.num_keys - 1)
            raw = raw + _raw_bias(dense_tile(self.bias, slots, num_kv_heads), self.config.scale)
        visible = visible_in_tile(
            self.config,
            self.visibility,
            positions,
            num_queries=num_queries,
            num_keys=self.num_keys,
            num_kv_heads=num_kv_heads,
        )
        return jnp.where(visible, raw, -jnp.inf), visible


def _raw_bias(bias: jax.Array, scale: float) -> jax.Array:
    """A bias in units of raw scores, so that its log scores are finite or minus infinity.

    Masks are written as the lowest number of a dtype, too: a log score that overflows would be NaN as soon as it is
    the largest of its row.
    """
    limit = _LARGEST_BIAS / max(scale, 1.0)
    raw = bias / scale
    return jnp.where(raw < -limit, -jnp.inf, jnp.minimum(raw, limit))
