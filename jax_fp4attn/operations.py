"""The steps of the operator as operations: quantise, forward, backward.

They are separate so that a rematerialisation policy which keeps output and lse runs the forward once.
"""

import dataclasses

import jax

from jax_fp4attn import layouts, reference, split_sequence
from jax_fp4attn.config import OperatorConfig, Visibility
from jax_fp4attn.reference import BackwardOperands, Gradients, Operands
from jax_fp4attn.transforms import Operation


@dataclasses.dataclass(frozen=True)
class Static:
    """Static arguments of the operations.

    Attributes:
      config: The operator's.
      num_keys: S, which operands padded to whole tiles no longer tell.
    """

    config: OperatorConfig
    num_keys: int


def _quantize(static: Static, query: jax.Array, key: jax.Array, value: jax.Array, visibility: Visibility) -> Operands:
    return reference.quantize_operands(static.config, query, key, value, visibility)


def _quantize_for_backward(
    static: Static, operands: Operands, query: jax.Array, key: jax.Array, value: jax.Array, visibility: Visibility
) -> BackwardOperands:
    return reference.quantize_for_backward(static.config, operands, query, key, value, visibility)


def _forward(
    static: Static, operands: Operands, bias: jax.Array | None, visibility: Visibility
) -> tuple[jax.Array, jax.Array]:
    return reference.forward(static.config, operands, bias, visibility, num_keys=static.num_keys)


def _backward(
    static: Static,
    operands: BackwardOperands,
    output: jax.Array,
    lse: jax.Array,
    output_gradient: jax.Array,
    lse_gradient: jax.Array | None,
    bias: jax.Array | None,
    visibility: Visibility,
) -> Gradients:
    return reference.backward(
        static.config,
        operands,
        output,
        lse,
        output_gradient,
        lse_gradient,
        bias,
        visibility,
        num_keys=static.num_keys,
    )


QUANTIZE = Operation(
    "jax_fp4attn_quantize",
    _quantize,
    lambda static, axis, *arguments: split_sequence.quantize(static.config, axis, *arguments),
    lambda query, key, value, visibility: ("bsn*", "bsk*", "bsk*", layouts.visibility_of_all_heads(visibility)),
    layouts.operands,
)
QUANTIZE_FOR_BACKWARD = Operation(
    "jax_fp4attn_quantize_for_backward",
    _quantize_for_backward,
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
    lambda static, axis, operands, _, visibility: split_sequence.forward(static.config, axis, operands, visibility),
    lambda operands, bias, visibility: (
        layouts.operands(operands),
        layouts.scores(bias),
        layouts.visibility(visibility),
    ),
    lambda results: (layouts.ROWS, layouts.ROW_STATISTICS),
)
BACKWARD = Operation(
    "jax_fp4attn_backward",
    _backward,
    lambda static, axis, operands, output, lse, output_gradient, lse_gradient, _, visibility: split_sequence.backward(
        static.config, axis, operands, output, lse, output_gradient, lse_gradient, visibility
    ),
    lambda operands, output, lse, output_gradient, lse_gradient, bias, visibility: (
        layouts.operands(operands),
        layouts.ROWS,
        layouts.ROW_STATISTICS,
        layouts.ROWS,
        layouts.each(lse_gradient, layouts.ROW_STATISTICS),
        layouts.scores(bias),
        layouts.visibility(visibility),
    ),
    layouts.gradients,
)
