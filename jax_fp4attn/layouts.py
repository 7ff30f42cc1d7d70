"""Layouts of the operator's arrays: which dimension is the batch, the heads, the sequence.

The letters are those of :class:`jax_fp4attn.transforms.Operation`.
"""

import dataclasses
from typing import Any

import jax

from jax_fp4attn.config import Visibility
from jax_fp4attn.formats import BlockScaled
from jax_fp4attn.reference import BackwardOperands, Gradients, Operands, RowOperands, TrainingOperands

ROWS = "bns*"
ROW_STATISTICS = "bns"
GRADIENT_SCALE = "bk"
SEGMENTS = "bs"


def each(tree: Any, layout: str) -> Any:
    """The same layout for every array of a pytree."""
    return jax.tree.map(lambda _: layout, tree)


def scores(x: jax.Array | None) -> str | None:
    """Layout of an array that is broadcastable to [B, N, T, S]."""
    if x is None:
        return None
    return ("b" if x.shape[0] > 1 else "*") + ("n" if x.shape[1] > 1 else "*") + "**"


def visibility(x: Visibility) -> Any:
    """Layouts of the run-time restrictions."""
    return dataclasses.replace(
        each(x, SEGMENTS),
        mask=scores(x.mask),
        query_lengths=each(x.query_lengths, "b"),
        key_lengths=each(x.key_lengths, "b"),
        key_offset=each(x.key_offset, ""),
    )


def visibility_of_all_heads(x: Visibility) -> Any:
    """The same for the quantisers: whether some query of any head sees a key decides about zeroing it."""
    layouts = visibility(x)
    return dataclasses.replace(layouts, mask=None if layouts.mask is None else layouts.mask[0] + "***")


def operands(x: Operands) -> Any:
    """Layouts of the forward's operands."""
    return Operands(_tensor("bns*", x.query), _tensor("bks*", x.key), _tensor("bk*s", x.value))


def training_operands(x: TrainingOperands) -> Any:
    """Layouts of the operands of the forward and the backward."""
    backward = backward_operands(x.for_backward())
    return TrainingOperands(operands(x.forward), backward.query, backward.key, backward.value)


def backward_operands(x: BackwardOperands) -> Any:
    """Layouts of the backward's operands."""
    return BackwardOperands(
        score_query=_tensor("bns*", x.score_query),
        score_key=_tensor("bks*", x.score_key),
        query=each(x.query, "bn*s"),
        key=each(x.key, "bk*s"),
        value=each(x.value, "bks*"),
    )


def _tensor(layout: str, x: BlockScaled | jax.Array) -> Any:
    """Layouts of an operand; codes, and scales in rows, have that of the values."""
    if not isinstance(x, BlockScaled):
        return layout
    layouts: dict[str, Any] = {
        "codes": layout,
        "scales": layout if x.scale_layout == "rows" else f"{layout}*",
        # It belongs to the whole sequence.
        "tensor_scale": each(x.tensor_scale, layout.replace("s", "*")),
    }
    return dataclasses.replace(x, **layouts)


def gradients(x: Gradients) -> Any:
    """Layouts of gradients in the inputs' layout; ``K``, ``B`` and ``N`` mark sums."""
    bias = scores(x.bias)
    if bias is not None:
        bias = bias.replace("*", "B", 1) if bias[0] == "*" else bias
        bias = bias[0] + bias[1].replace("*", "N") + bias[2:]
    return Gradients(query="bsn*", key="bsK*", value="bsK*", bias=bias)  # type: ignore[arg-type]


def row_operands() -> Any:
    """Layouts of the backward's rows."""
    return RowOperands(ROWS, "bn*s", ROW_STATISTICS)  # type: ignore[arg-type]
