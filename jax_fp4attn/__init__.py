"""FP4 attention for JAX: one operator, the same codes and scales on every machine."""

from jax_fp4attn import checkpoint_policies, formats, native, recipes, reference
from jax_fp4attn.api import attention
from jax_fp4attn.config import SegmentIds
from jax_fp4attn.context import zigzag_order
from jax_fp4attn.export import export_disabled_checks
from jax_fp4attn.native import cross_compile
from jax_fp4attn.recipe import Recipe

__version__ = "0.1.0"

__all__ = [
    "Recipe",
    "SegmentIds",
    "attention",
    "checkpoint_policies",
    "cross_compile",
    "export_disabled_checks",
    "formats",
    "native",
    "recipes",
    "reference",
    "zigzag_order",
]
