"""The steps of the operator on a shard of a sequence that is split over a mesh axis.

Operands are kept in the order in which the ring works (:func:`ring_order`) from the quantiser on, residuals included;
outputs and gradients return to the order that the caller gave.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_fp4attn import layouts, reference, steps
from jax_fp4attn.config import ContextOrder, OperatorConfig, SegmentIds, Visibility
from jax_fp4attn.context import (
    LaidOut,
    PartialOutput,
    Relation,
    Visit,
    exchange,
    run_balanced_causal,
    run_contiguous,
)
from jax_fp4attn.recipe import Recipe
from jax_fp4attn.reference import BackwardOperands, Gradients, Operands, RowOperands, TrainingOperands
from jax_fp4attn.reference.tiles import KEY_TILE, QUARTER, QUERY_TILE, pad_axis, padded_keys, padded_queries


def ring_order(config: OperatorConfig) -> ContextOrder:
    """The order in which all shards have the same work: a window makes the work of contiguous parts equal."""
    return "zigzag" if config.is_causal and config.window is None else "contiguous"


def quantize(
    config: OperatorConfig, axis: str, query: jax.Array, key: jax.Array, value: jax.Array, visibility: Visibility
) -> Operands:
    """Quantises a shard; see :func:`jax_fp4attn.reference.quantize_operands`.

    Args:
      config: Static arguments.
      axis: The mesh axis.
      query: [B, T, N, H], the shard's rows.
      key: [B, S, K, H], the shard's keys.
      value: [B, S, K, H].
      visibility: Run-time restrictions.

    Returns:
      The operands, in ring order.

    Raises:
      ValueError: If the shards' parts are no whole tiles.
    """
    _check_parts(config, axis, query, key)
    operands = steps.quantize(config, query, key, value, visibility, sequence_axis=axis)
    result: Operands = _to_ring(config, axis, LaidOut(operands, layouts.operands(operands))).values
    return result


def quantize_for_training(
    config: OperatorConfig, axis: str, query: jax.Array, key: jax.Array, value: jax.Array, visibility: Visibility
) -> TrainingOperands:
    """The same for the forward and the backward; see :func:`jax_fp4attn.reference.quantize_for_training`.

    Args:
      config: Static arguments.
      axis: The mesh axis.
      query: [B, T, N, H], the shard's rows.
      key: [B, S, K, H], the shard's keys.
      value: [B, S, K, H].
      visibility: Run-time restrictions.

    Returns:
      The operands, in ring order.

    Raises:
      ValueError: If the shards' parts are no whole tiles.
    """
    _check_parts(config, axis, query, key)
    operands = steps.quantize_for_training(config, query, key, value, visibility, sequence_axis=axis)
    result: TrainingOperands = _to_ring(config, axis, LaidOut(operands, layouts.training_operands(operands))).values
    return result


def forward(
    config: OperatorConfig, axis: str, operands: Operands, visibility: Visibility, *, head_size: int
) -> tuple[jax.Array, jax.Array]:
    """Attention of a shard's rows to the keys of all shards.

    Args:
      config: Static arguments.
      axis: The mesh axis.
      operands: From :func:`quantize`.
      visibility: Segments of the shard, in the caller's order.
      head_size: H, without padding.

    Returns:
      Output, bfloat16 [B, T, N, H], and lse, float32 [B, N, T], in the caller's order.
    """
    segments = _ring_segments(config, axis, visibility)
    laid_out = layouts.operands(operands)
    rows = LaidOut((operands.query, segments.values.query), (laid_out.query, segments.layouts.query))
    keys = LaidOut(
        (operands.key, operands.value, segments.values.key_value),
        (laid_out.key, laid_out.value, segments.layouts.key_value),
    )

    def compute(rows: LaidOut, keys: LaidOut, relation: Relation) -> tuple[LaidOut, LaidOut]:
        num_keys = keys.values[0].shape[2]
        (query, query_segments), (key, value, key_segments) = rows.values, _pad_keys(keys, num_keys).values
        output, lse = steps.partial_forward(
            _related(config, relation),
            Operands(query, key, value),
            _visibility(query_segments, key_segments, relation),
            num_keys=num_keys,
        )
        return LaidOut(PartialOutput(output, lse), _PARTIAL_LAYOUTS), LaidOut((), ())

    visit = Visit(compute, PartialOutput.merge, PartialOutput.where)
    lengths = operands.query.shape[2], operands.key.shape[2]
    total = _run(config, axis, visit, rows, keys, lengths)[0]
    output = steps.input_layout(total.values.output, head_size).astype(jnp.bfloat16)
    moved = _from_ring(config, axis, LaidOut((output, total.values.lse), _RESULT_LAYOUTS)).values
    return moved[0], moved[1]


def backward(
    config: OperatorConfig,
    axis: str,
    operands: BackwardOperands,
    output: jax.Array,
    lse: jax.Array,
    output_gradient: jax.Array,
    lse_gradient: jax.Array,
    visibility: Visibility,
) -> Gradients:
    """Gradients of a shard's rows and keys; those of the keys travel with them, in float32.

    Args:
      config: Static arguments.
      axis: The mesh axis.
      operands: From :func:`quantize_for_training`.
      output: The forward's output, bfloat16 [B, T, N, H], in the caller's order.
      lse: The forward's lse, float32 [B, N, T].
      output_gradient: bfloat16 [B, T, N, H].
      lse_gradient: float32 [B, N, T].
      visibility: Segments of the shard.

    Returns:
      True gradients, bfloat16 [B, T, N, H] and [B, S, K, H], in the caller's order.
    """
    segments = _ring_segments(config, axis, visibility)
    head_size = output.shape[3]
    given = LaidOut((output, lse, output_gradient, lse_gradient), _RESULT_LAYOUTS * 2)
    output, lse, output_gradient, lse_gradient = _to_ring(config, axis, given).values
    cotangents = (output_gradient, lse_gradient)
    num_kv_heads = operands.value.shape[1]
    scale = reference.gradient_scale(config, lse, *cotangents, num_kv_heads, sequence_axis=axis)
    row_operands = steps.row_operands(config, output, lse, *cotangents, scale)
    laid_out = layouts.backward_operands(operands)
    rows = LaidOut(
        (row_operands, lse, scale, operands.score_query, operands.query, segments.values.query),
        (
            layouts.row_operands(),
            layouts.ROW_STATISTICS,
            layouts.GRADIENT_SCALE,
            laid_out.score_query,
            laid_out.query,
            segments.layouts.query,
        ),
    )
    keys = LaidOut(
        (operands.score_key, operands.key, operands.value, segments.values.key_value),
        (laid_out.score_key, laid_out.key, laid_out.value, segments.layouts.key_value),
    )

    def compute(rows: LaidOut, keys: LaidOut, relation: Relation) -> tuple[LaidOut, LaidOut]:
        num_keys = keys.values[2].shape[2]
        row_part, lse, scale, score_query, query, query_segments = rows.values
        row_part, query = _pad_rows(row_part, query, lse.shape[2])
        score_key, key, value, key_segments = _pad_keys(keys, num_keys).values
        gradients = steps.partial_gradients(
            _related(config, relation),
            BackwardOperands(score_query, score_key, query, key, value),
            row_part,
            lse,
            scale,
            _visibility(query_segments, key_segments, relation),
            num_keys=num_keys,
        )
        for_keys = (gradients.key[:, :, :num_keys], gradients.value[:, :, :num_keys])
        return LaidOut(gradients.query, layouts.ROWS), LaidOut(for_keys, ("bks*", "bks*"))

    visit = Visit(compute, jnp.add, lambda x, condition: jnp.where(condition, x, 0.0))
    lengths = operands.score_query.shape[2], operands.score_key.shape[2]
    for_rows, for_keys = _run(config, axis, visit, rows, keys, lengths)
    d_key, d_value = for_keys.values
    gradients = reference.finish_gradients(config, scale, Gradients(for_rows.values, d_key, d_value, None))
    finished = tuple(
        steps.input_layout(x, head_size).astype(jnp.bfloat16) for x in (gradients.query, gradients.key, gradients.value)
    )
    d_query, d_key, d_value = _from_ring(config, axis, LaidOut(finished, ("bsn*", "bsk*", "bsk*"))).values
    return Gradients(d_query, d_key, d_value, None)


_RESULT_LAYOUTS = ("bsn*", layouts.ROW_STATISTICS)
_PARTIAL_LAYOUTS: Any = PartialOutput(layouts.ROWS, layouts.ROW_STATISTICS)  # type: ignore[arg-type]


def _run(
    config: OperatorConfig, axis: str, visit: Visit, rows: LaidOut, keys: LaidOut, lengths: tuple[int, int]
) -> tuple[LaidOut, LaidOut]:
    if ring_order(config) == "zigzag":
        return run_balanced_causal(visit, axis, rows, keys)
    window = config.window
    if window is not None and config.is_causal:
        window = (window[0], 0)
    return run_contiguous(visit, axis, rows, keys, lengths, window)


def _local(config: OperatorConfig) -> OperatorConfig:
    return dataclasses.replace(config, context=None)


def _related(config: OperatorConfig, relation: Relation) -> OperatorConfig:
    local = _local(config)
    if relation.is_aligned or relation.key_offset is not None:
        return local
    return dataclasses.replace(local, is_causal=False, window=None)


def _visibility(query: jax.Array | None, key_value: jax.Array | None, relation: Relation) -> Visibility:
    ids = None if query is None or key_value is None else SegmentIds(query, key_value)
    return Visibility(segment_ids=ids, key_offset=relation.key_offset)


@dataclasses.dataclass(frozen=True)
class _NoSegments:
    """In place of segments and of their layouts."""

    query: None = None
    key_value: None = None


def _ring_segments(config: OperatorConfig, axis: str, visibility: Visibility) -> LaidOut:
    ids = visibility.segment_ids
    if ids is None:
        return LaidOut(_NoSegments(), _NoSegments())
    return _to_ring(config, axis, LaidOut(ids, layouts.each(ids, layouts.SEGMENTS)))


def _to_ring(config: OperatorConfig, axis: str, arrays: LaidOut) -> LaidOut:
    assert config.context is not None
    return exchange(axis, config.context.order, ring_order(config), arrays)


def _from_ring(config: OperatorConfig, axis: str, arrays: LaidOut) -> LaidOut:
    assert config.context is not None
    return exchange(axis, ring_order(config), config.context.order, arrays)


def _pad_keys(keys: LaidOut, num_keys: int) -> LaidOut:
    """Zeros up to whole tiles: half of a shard's keys may end within one."""
    missing = padded_keys(num_keys) - num_keys
    if missing == 0:
        return keys

    def pad(x: jax.Array, dimension: int) -> jax.Array:
        widths = [(0, 0)] * x.ndim
        widths[dimension] = (0, x.shape[dimension] * missing // num_keys)
        return jnp.pad(x, widths)

    return keys.along_sequence(pad)


def _pad_rows(rows: RowOperands, query: jax.Array | None, num_queries: int) -> tuple[RowOperands, jax.Array | None]:
    """The same for the rows of the backward."""
    slots = padded_queries(num_queries)
    padded = dataclasses.replace(
        rows,
        output_gradient=pad_axis(rows.output_gradient, 2, slots),
        output_gradient_columns=pad_axis(rows.output_gradient_columns, 3, slots),
    )
    return padded, None if query is None else pad_axis(query, 3, slots)


def _check_parts(config: OperatorConfig, axis: str, query: jax.Array, key: jax.Array) -> None:
    check_part(config, "query", query.shape[1], lax.axis_size(axis))
    check_part(config, "key", key.shape[1], lax.axis_size(axis))


def check_part(config: OperatorConfig, name: str, length: int, shards: int) -> None:
    """Checks the length of a shard's part.

    Args:
      config: Static arguments.
      name: Of the argument.
      length: Of the part.
      shards: Number of shards.

    Raises:
      ValueError: If it is no multiple of the tile, or of what the recipe treats alike.
    """
    assert config.context is not None
    axis = config.context.axis
    if length % KEY_TILE:
        raise ValueError(
            f"{name}: expected a length that is a multiple of {KEY_TILE * shards} (tiles of {KEY_TILE} on each of the "
            f"{shards} shards of mesh axis {axis!r}), got {length * shards}; pad the sequence and mark the "
            "padding with lengths or segment_ids"
        )
    part = length // 2 if ring_order(config) == "zigzag" else length
    unit = _tiles_that_look_alike(config.recipe)
    if part % unit:
        raise ValueError(
            f"{name}: expected parts of {unit} positions with recipe {config.recipe.name!r}, whose map depends on the "
            f"place in a tile, got parts of {part} ({shards} shards of mesh axis {axis!r}); use a longer sequence"
        )


def _tiles_that_look_alike(recipe: Recipe) -> int:
    """Positions after which the recipe treats the sequence as at its beginning."""
    if recipe.code_map is None:
        return 1
    if not all(recipe.code_map.alternate_query_tiles):
        return 2 * QUERY_TILE
    alike = len(set(recipe.code_map.quarters)) == 1 and len(set(recipe.code_map.alternate_pairs)) == 1
    return QUARTER if alike and recipe.denominator != "sampled" else KEY_TILE
