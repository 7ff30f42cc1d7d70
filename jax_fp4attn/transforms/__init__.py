"""Operations under transformations: vmap, automatic, explicit and manual sharding.

An :class:`Operation` is a function of array pytrees with a layout for each leaf: which dimension is the batch, which
holds query or key/value heads. From the layouts alone follow the vmap rule and the sharding of operands and results.
"""

from jax_fp4attn.transforms.batching import apply
from jax_fp4attn.transforms.operation import Operation
from jax_fp4attn.transforms.routing import explicit_spec, match_spec

__all__ = ["Operation", "apply", "explicit_spec", "match_spec"]
