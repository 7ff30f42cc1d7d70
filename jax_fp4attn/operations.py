"""The three steps of the operator as operations: quantise, forward, backward.

They are separate so that a rematerialisation policy which keeps output and lse runs the forward once.
"""

import dataclasses
from typing import Any

import jax

from jax_fp4attn import reference
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


def _each(tree: Any, layout: str) -> Any:
    return jax.tree.map(lambda _: layout, tree)


def _scores_layout(x: jax.Array | None) -> str | None:
    """Layout of an array that is broadcastable to [B, N, T, S]."""
    if x is None:
        return None
    return ("b" if x.shape[0] > 1 else "*") + ("n" if x.shape[1] > 1 else "*") + "**"


def _visibility_layouts(visibility: Visibility) -> Any:
    return dataclasses.replace(
        _each(visibility, "b*"),
        mask=_scores_layout(visibility.mask),
        query_lengths=_each(visibility.query_lengths, "b"),
        key_lengths=_each(visibility.key_lengths, "b"),
    )


def _operand_layouts(operands: Operands | BackwardOperands) -> Any:
    layouts = {
        field.name: _each(getattr(operands, field.name), "bn**" if "query" in field.name else "bk**")
        for field in dataclasses.fields(operands)
    }
    return dataclasses.replace(operands, **layouts)


def _quantize(static: Static, query: jax.Array, key: jax.Array, value: jax.Array, visibility: Visibility) -> Operands:
    return reference.quantize_operands(static.config, query, key, value, visibility)


def _quantize_layouts(query: Any, key: Any, value: Any, visibility: Visibility) -> Any:
    del query, key, value
    layouts = _visibility_layouts(visibility)
    if layouts.mask is not None:
        # Whether some query of any head sees a key decides about zeroing it, so the mask is needed for all heads.
        layouts = dataclasses.replace(layouts, mask=layouts.mask[0] + "***")
    return "b*n*", "b*k*", "b*k*", layouts


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


def _gradient_layouts(gradients: Gradients) -> Gradients:
    bias = _scores_layout(gradients.bias)
    if bias is not None:
        bias = bias.replace("*", "B", 1) if bias[0] == "*" else bias
        bias = bias[0] + bias[1].replace("*", "N") + bias[2:]
    return Gradients(query="bn**", key="bK**", value="bK**", bias=bias)  # type: ignore[arg-type]


QUANTIZE = Operation("jax_fp4attn_quantize", _quantize, _quantize_layouts, _operand_layouts)
QUANTIZE_FOR_BACKWARD = Operation(
    "jax_fp4attn_quantize_for_backward",
    _quantize_for_backward,
    lambda operands, *rest: (_operand_layouts(operands), *_quantize_layouts(*rest)),
    _operand_layouts,
)
FORWARD = Operation(
    "jax_fp4attn_forward",
    _forward,
    lambda operands, bias, visibility: (
        _operand_layouts(operands),
        _scores_layout(bias),
        _visibility_layouts(visibility),
    ),
    lambda results: ("bn**", "bn*"),
)
BACKWARD = Operation(
    "jax_fp4attn_backward",
    _backward,
    lambda operands, output, lse, output_gradient, lse_gradient, bias, visibility: (
        _operand_layouts(operands),
        "bn**",
        "bn*",
        "bn**",
        _each(lse_gradient, "bn*"),
        _scores_layout(bias),
        _visibility_layouts(visibility),
    ),
    _gradient_layouts,
)
