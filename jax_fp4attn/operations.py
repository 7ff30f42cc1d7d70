"""The steps of the operator as operations: quantise, forward, backward.

They are separate so that a rematerialisation policy which keeps output and lse runs the forward once.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from jax_fp4attn import layouts, split_sequence, steps
from jax_fp4attn.config import OperatorConfig, Visibility
from jax_fp4attn.reference import Gradients, Operands
from jax_fp4attn.transforms import Operation


@dataclasses.dataclass(frozen=True)
class Static:
    """Static arguments of the operations.

    Attributes:
      config: The operator's.
      num_keys: S, which operands padded to whole tiles no longer tell.
      head_size: H, likewise.
    """

    config: OperatorConfig
    num_keys: int
    head_size: int


def _forward(
    static: Static, operands: Operands, bias: jax.Array | None, visibility: Visibility
) -> tuple[jax.Array, jax.Array]:
    return steps.forward(
        static.config, operands, bias, visibility, num_keys=static.num_keys, head_size=static.head_size
    )


def _split_forward(
    static: Static, axis: str, operands: Operands, bias: None, visibility: Visibility
) -> tuple[jax.Array, jax.Array]:
    del bias
    return split_sequence.forward(static.config, axis, operands, visibility, head_size=static.head_size)


def _backward(static: Static, *arguments: Any) -> Gradients:
    backward: Callable[..., Gradients] = steps.backward
    return backward(static.config, *arguments, num_keys=static.num_keys)


def _split_backward(static: Static, axis: str, *arguments: Any) -> Gradients:
    operands, output, lse, output_gradient, lse_gradient, _, visibility = arguments
    return split_sequence.backward(
        static.config, axis, operands, output, lse, output_gradient, lse_gradient, visibility
    )


QUANTIZE = Operation(
    "jax_fp4attn_quantize",
    lambda static, *arguments: steps.quantize(static.config, *arguments),
    lambda static, axis, *arguments: split_sequence.quantize(static.config, axis, *arguments),
    lambda query, key, value, visibility: ("bsn*", "bsk*", "bsk*", layouts.visibility_of_all_heads(visibility)),
    layouts.operands,
)
QUANTIZE_FOR_BACKWARD = Operation(
    "jax_fp4attn_quantize_for_backward",
    lambda static, *arguments: steps.quantize_for_backward(static.config, *arguments),
    lambda static, axis, *arguments: split_sequence.quantize_for_backward(static.config, axis, *arguments),
    lambda operands, query, key, value, visibility: (
        layouts.operands(operands),
        "bsn*",
        "bsk*",
        "bsk*",
        layouts.visibility_of_all_heads(visibility),
    ),
    layouts.operands,
)
FORWARD = Operation(
    "jax_fp4attn_forward",
    _forward,
    _split_forward,
    lambda operands, bias, visibility: (
        layouts.operands(operands),
        layouts.scores(bias),
        layouts.visibility(visibility),
    ),
    lambda results: ("bsn*", layouts.ROW_STATISTICS),
)
BACKWARD = Operation(
    "jax_fp4attn_backward",
    _backward,
    _split_backward,
    lambda operands, output, lse, output_gradient, lse_gradient, bias, visibility: (
        layouts.operands(operands),
        "bsn*",
        layouts.ROW_STATISTICS,
        "bsn*",
        layouts.ROW_STATISTICS,
        layouts.scores(bias),
        layouts.visibility(visibility),
    ),
    layouts.gradients,
)
