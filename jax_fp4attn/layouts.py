"""Layouts of the operator's arrays: which dimension is the batch, the heads, the sequence.

The letters are those of :class:`jax_fp4attn.transforms.Operation`.
"""

import dataclasses
from typing import Any

import jax

from jax_fp4attn.config import Visibility
from jax_fp4attn.formats import BlockScaled
from jax_fp4attn.reference import BackwardOperands, Gradients, Operands, RowOperands

ROWS = "bns*"
ROW_STATISTICS = "bns"
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


def operands(x: Operands | BackwardOperands) -> Any:
    """Layouts of quantised operands; blocks of MXFP4 and NVFP4 values run along the keys."""

    def field(name: str, value: Any) -> Any:
        along_keys = name == "value" and isinstance(value, BlockScaled)
        layout = "bk*s" if along_keys else ROWS if "query" in name else "bks*"
        # A tensor scale belongs to the whole sequence.
        return jax.tree.map(
            lambda leaf: layout if leaf.shape[layout.index("s")] > 1 else layout.replace("s", "*"), value
        )

    return dataclasses.replace(x, **{f.name: field(f.name, getattr(x, f.name)) for f in dataclasses.fields(x)})


def gradients(x: Gradients) -> Any:
    """Layouts of gradients in the inputs' layout; ``K``, ``B`` and ``N`` mark sums."""
    bias = scores(x.bias)
    if bias is not None:
        bias = bias.replace("*", "B", 1) if bias[0] == "*" else bias
        bias = bias[0] + bias[1].replace("*", "N") + bias[2:]
    return Gradients(query="bsn*", key="bsK*", value="bsK*", bias=bias)  # type: ignore[arg-type]


def row_operands(x: RowOperands) -> Any:
    """Layouts of the backward's rows, grouped by key/value head."""
    layouts: dict[str, Any] = {f.name: "bk*s" for f in dataclasses.fields(x)}
    layouts |= {"query": "bk*s*", "output_gradient": "bk*s*", "gradient_scale": "bk***"}
    return dataclasses.replace(x, **layouts)
