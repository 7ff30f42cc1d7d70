"""The steps of the operator as operations: quantise, forward, backward.

They are separate so that a rematerialisation policy which keeps output and lse runs the forward once.
"""

import dataclasses
from typing import Any

import jax

from jax_fp4attn import layouts, reference, split_sequence, steps
from jax_fp4attn.config import OperatorConfig, Visibility
from jax_fp4attn.reference import BackwardOperands, Gradients, Operands
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


def _backward(
    static: Static,
    operands: BackwardOperands,
    output: jax.Array,
    lse: jax.Array,
    output_gradient: jax.Array,
    lse_gradient: jax.Array,
    bias: jax.Array | None,
    visibility: Visibility,
) -> Gradients:
    config, cotangents = static.config, (output_gradient, lse_gradient)
    scale = reference.gradient_scale(config, lse, *cotangents, num_kv_heads=operands.value.shape[1])
    rows = steps.row_operands(config, output, lse, *cotangents, scale)
    arguments = (operands, rows, lse, scale, bias, visibility)
    return steps.backward(config, *arguments, num_keys=static.num_keys, head_size=static.head_size)


def _split_backward(static: Static, axis: str, *arguments: Any) -> Gradients:
    operands, output, lse, output_gradient, lse_gradient, _, visibility = arguments
    return split_sequence.backward(
        static.config, axis, operands, output, lse, output_gradient, lse_gradient, visibility
    )


def _input_layouts(query: Any, key: Any, value: Any, visibility: Visibility) -> Any:
    del query, key, value
    return "bsn*", "bsk*", "bsk*", layouts.visibility_of_all_heads(visibility)


QUANTIZE = Operation(
    "jax_fp4attn_quantize",
    lambda static, *arguments: steps.quantize(static.config, *arguments),
    lambda static, axis, *arguments: split_sequence.quantize(static.config, axis, *arguments),
    _input_layouts,
    layouts.operands,
)
QUANTIZE_FOR_TRAINING = Operation(
    "jax_fp4attn_quantize_for_training",
    lambda static, *arguments: steps.quantize_for_training(static.config, *arguments),
    lambda static, axis, *arguments: split_sequence.quantize_for_training(static.config, axis, *arguments),
    _input_layouts,
    layouts.training_operands,
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
        layouts.backward_operands(operands),
        "bsn*",
        layouts.ROW_STATISTICS,
        "bsn*",
        layouts.ROW_STATISTICS,
        layouts.scores(bias),
        layouts.visibility(visibility),
    ),
    layouts.gradients,
)
