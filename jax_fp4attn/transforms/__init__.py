"""Operations under transformations: vmap, automatic, explicit and manual sharding.

An :class:`Operation` is a function of array pytrees with a layout for each leaf: which dimension is the batch, which
holds query or key/value heads. From the layouts alone follow the vmap rule and the sharding of operands and results.
"""

from jax_fp4attn.transforms.array_type import ArrayType, explicit_spec, type_of, varying_axes
from jax_fp4attn.transforms.batching import apply
from jax_fp4attn.transforms.operation import Operation
from jax_fp4attn.transforms.routing import axis_types
from jax_fp4attn.transforms.sharding import check_sequence_axis

__all__ = [
    "ArrayType",
    "Operation",
    "apply",
    "axis_types",
    "check_sequence_axis",
    "explicit_spec",
    "type_of",
    "varying_axes",
]
