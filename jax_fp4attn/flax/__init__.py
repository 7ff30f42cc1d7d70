"""Flax: the operator as an ``attention_fn``, and self-attention modules for Linen and NNX.

``attention_fn`` goes unchanged into Flax's own layers; ``linen.Attention`` and ``nnx.Attention`` also do what those
layers do not: rotary embedding, grouped-query heads, lengths, packed segments and windows, all without a dense mask.
"""

try:
    import flax as _flax  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "flax":
        raise
    raise ImportError("jax_fp4attn.flax needs Flax: pip install 'jax-fp4attn[flax]'") from error

from jax_fp4attn.flax import linen, nnx
from jax_fp4attn.flax.adapter import attention_fn, make_attention_fn
from jax_fp4attn.flax.rotary import apply_rotary

__all__ = ["apply_rotary", "attention_fn", "linen", "make_attention_fn", "nnx"]
