"""The library's backward for Hopper on the emulator, launched as cuda/ffi/backward.cc launches it."""

import dataclasses
import functools
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from cuda.emulator import Output
from cuda.emulator.tensor_map import TensorMap
from jax_fp4attn import SegmentIds, reference
from jax_fp4attn.config import OperatorConfig, Visibility
from jax_fp4attn.recipe import Recipe
from jax_fp4attn.reference.row_operands import lift_bits, multiplier
from tests.emulator.kernels import hopper_forward
from tests.emulator.kernels.forward import Launch, Shape
from tests.emulator.kernels.hopper_forward import LIBRARY
from tests.shapes import COMPILER_OPTIONS

_UNLIMITED = 1 << 30
_TILE, _STEP = 128, 64
_NAN = {np.uint16: 0x7FC0, np.float16: np.nan, np.float32: np.nan}  # uint16 is bfloat16


def available() -> bool:
    """Whether the kernels have been built."""
    return hopper_forward.available() and LIBRARY.has("backward_h64")


class Gradients(NamedTuple):
    """Of query, key and value, float32 in the inputs' layout with bfloat16 values."""

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray


@dataclasses.dataclass(frozen=True)
class Problem:
    """What a call of the backward takes, and what the reference makes of it.

    Attributes:
      config: Static arguments.
      shape: Sizes.
      operands: Quantised operands.
      rows: Row operands.
      lse: Of the forward.
      gradient_scale: Of the row operands.
      restrictions: The kernels' parameters for what is visible, by name; None where nothing restricts.
      expected: Gradients of the reference.
    """

    config: OperatorConfig
    shape: Shape
    operands: reference.BackwardOperands
    rows: reference.RowOperands
    lse: np.ndarray
    gradient_scale: np.ndarray
    restrictions: dict[str, np.ndarray | None]
    expected: Gradients


def inputs(shape: Shape, seed: int = 0) -> list[np.ndarray]:
    """Normally distributed query, key, value and cotangents of output and lse, these as small as a mean loss's."""
    rng = np.random.default_rng(seed)
    B, T, S, N, K, H = shape
    shapes = ((B, T, N, H), (B, S, K, H), (B, S, K, H), (B, T, N, H), (B, N, T))
    query, key, value, d_output, d_lse = (rng.standard_normal(x, np.float32) for x in shapes)
    arrays = (query, key, value, d_output * np.float32(2.0**-9))
    return [*(x.astype(ml_dtypes.bfloat16) for x in arrays), d_lse * np.float32(2.0**-9)]


def problem(
    recipe: Recipe,
    shape: Shape,
    arrays: list[np.ndarray] | None = None,
    *,
    is_causal: bool = False,
    window: tuple[int, int] | None = None,
    query_lengths: list[int] | None = None,
    key_lengths: list[int] | None = None,
    segments: tuple[np.ndarray, np.ndarray] | None = None,
    key_offset: int | None = None,
) -> Problem:
    """The problem of inputs of some shape, quantised by the reference."""
    config = OperatorConfig(recipe, shape.H**-0.5, is_causal, window)
    query_segments, key_segments = segments or (None, None)
    given: dict[str, Any] = {
        "query_lengths": query_lengths,
        "key_lengths": key_lengths,
        "query_segments": query_segments,
        "key_segments": key_segments,
        "key_offset": None if key_offset is None else [key_offset],
    }
    B, T, S, *_ = shape
    # The reference gets every restriction, so that problems that differ in them alone share a program.
    nothing: dict[str, Any] = {
        "query_lengths": [T] * B,
        "key_lengths": [S] * B,
        "query_segments": np.ones((B, T)),
        "key_segments": np.ones((B, S)),
        "key_offset": [0],
    }
    limits = {name: jnp.asarray(nothing[name] if x is None else x, jnp.int32) for name, x in given.items()}
    visibility = Visibility(
        query_lengths=limits["query_lengths"],
        key_lengths=limits["key_lengths"],
        segment_ids=SegmentIds(limits["query_segments"], limits["key_segments"]),
        key_offset=limits["key_offset"][0],
    )
    arrays = inputs(shape) if arrays is None else arrays
    operands, rows, lse, scale, expected = _reference(config, *arrays, visibility)
    return Problem(
        config=config,
        shape=shape,
        operands=operands,
        rows=rows,
        lse=np.asarray(lse),
        gradient_scale=np.asarray(scale),
        restrictions={name: None if x is None else np.asarray(x, np.int32) for name, x in given.items()},
        expected=Gradients(*(np.asarray(x, np.float32) for x in expected)),
    )


@functools.partial(jax.jit, static_argnums=0, compiler_options=COMPILER_OPTIONS)
def _reference(
    config: OperatorConfig,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    d_output: jax.Array,
    d_lse: jax.Array,
    visibility: Visibility,
) -> tuple[Any, ...]:
    num_keys, kv_heads = key.shape[1:3]
    operands = reference.quantize_for_training(config, query, key, value, visibility)
    output, lse = reference.forward(config, operands.forward, None, visibility, num_keys=num_keys)
    scale = reference.gradient_scale(config, lse, d_output, d_lse, kv_heads)
    output = jnp.swapaxes(output, 1, 2).astype(jnp.bfloat16)
    rows = reference.row_operands(config, output, lse, d_output, d_lse, scale)
    saved = operands.for_backward()
    found = reference.backward(config, saved, rows, lse, scale, None, visibility, num_keys=num_keys)
    # Keys come padded.
    expected = [jnp.swapaxes(x, 1, 2) for x in (found.query, found.key[:, :, :num_keys], found.value[:, :, :num_keys])]
    return saved, rows, lse, scale, expected


def expanded_query(problem: Problem, *, ordered: bool) -> dict[str, np.ndarray]:
    """Query as float16 [B N T', H], statistics of its rows, and zeros for the sums of dQ unless that has an order."""
    B, T, _, N, _, H = problem.shape
    rows = _padded(T)
    values = {
        "query_codes": np.asarray(problem.operands.score_query.codes),
        "query_pages": np.asarray(problem.operands.score_query.scales),
        "lse": problem.lse,
        "row_statistic": np.asarray(problem.rows.row_statistic),
        "values": _unwritten((B * N * rows, H), np.float16),
        "statistics": _unwritten((B, N, rows // _STEP, 2, _STEP), np.float32),
        "query_sums": None if ordered else _unwritten((B, N, rows, H), np.float32),
        "num_rows": T,
        "num_heads": N,
        "lift": lift_bits(problem.config.recipe),
        "correction": problem.config.recipe.backward_lse_correction,
        "factor": _factor(problem),
    }
    (arrays,) = Launch(LIBRARY, f"backward_prepare_h{H}", (N, rows // _TILE, B), values).run()
    return {name: arrays[name] for name in ("values", "statistics", "query_sums") if name in arrays}


def expanded_key(problem: Problem) -> np.ndarray:
    """Key as float16 [B K S', H]."""
    B, _, S, _, K, H = problem.shape
    values = {
        "codes": np.asarray(problem.operands.score_key.codes),
        "pages": np.asarray(problem.operands.score_key.scales),
        "order": None,
        "values": _unwritten((B * K * _padded(S), H), np.float16),
        "counter": None,
        "num_keys": S,
        "num_heads": K,
    }
    (arrays,) = Launch(LIBRARY, f"expand_key_h{H}", (K, _padded(S) // _TILE, B), values).run()
    return arrays["values"]


def differentiate(problem: Problem, *, ordered: bool, seeds: Iterable[int] = (0,), section: int = 1) -> list[Gradients]:
    """Runs the backward.

    Args:
      problem: What to compute.
      ordered: Whether dQ is always summed in the same order.
      seeds: Of the schedules.
      section: Key/value heads, of those of all batch entries, whose thread blocks come together.

    Returns:
      The gradients of each schedule.
    """
    found = keys_launch(problem, ordered=ordered, section=section).run(seeds)
    if ordered:
        query_gradients = [arrays["query_gradient"] for arrays in queries_launch(problem).run(seeds)]
    else:
        query_gradients = [_finished_query_gradient(problem, arrays["query_sums"]) for arrays in found]
    return [
        Gradients(*(x.view(ml_dtypes.bfloat16).astype(np.float32) for x in (d_query, *d_key_and_value)))
        for d_query, d_key_and_value in zip(
            query_gradients, ((x["key_gradient"], x["value_gradient"]) for x in found), strict=True
        )
    ]


def keys_launch(problem: Problem, *, ordered: bool, section: int = 1) -> Launch:
    """The main kernel, with a share of dQ unless that has an order; see :func:`differentiate`."""
    B, _, S, _, K, H = problem.shape
    query = expanded_query(problem, ordered=ordered)
    results = _results(problem)
    # Of 64 queries and 128 keys.
    values = {
        **_common(problem),
        **_maps(problem, query["values"], expanded_key(problem), query_rows=_STEP, key_rows=_TILE),
        "statistics": query["statistics"],
        "query_columns_map": _columns(problem.operands.query, _STEP),
        "gradient_columns_map": _columns(problem.rows.output_gradient_columns, _STEP),
        "key_columns_map": _columns(problem.operands.key, _TILE),
        "query_sums": query.get("query_sums"),
        "key_gradient": results.key,
        "value_gradient": results.value,
        "section": section,
    }
    name = f"backward_h{H}" + "_ordered" * ordered
    return Launch(LIBRARY, name, (B * K * (_padded(S) // _TILE), 1, 1), values)


def queries_launch(problem: Problem) -> Launch:
    """The kernel that gives dQ in a fixed order."""
    B, T, _, N, _, H = problem.shape
    query = expanded_query(problem, ordered=True)
    # Of 128 queries and 64 keys.
    values = {
        **_common(problem),
        **_maps(problem, query["values"], expanded_key(problem), query_rows=_TILE, key_rows=_STEP),
        "statistics": query["statistics"],
        "key_columns_map": _columns(problem.operands.key, _STEP),
        "query_gradient": _results(problem).query,
    }
    return Launch(LIBRARY, f"backward_query_h{H}", (N, _padded(T) // _TILE, B), values)


def _finished_query_gradient(problem: Problem, sums: np.ndarray) -> np.ndarray:
    B, T, _, N, K, H = problem.shape
    values = {
        "sums": sums,
        "lse": problem.lse,
        "gradient_scale": problem.gradient_scale,
        "query_gradient": _results(problem).query,
        "num_rows": T,
        "num_heads": N,
        "heads_a_group": N // K,
        "unit": _unit(problem),
    }
    (arrays,) = Launch(LIBRARY, f"backward_finish_query_h{H}", (N, math.ceil(T / _STEP), B), values).run()
    return arrays["query_gradient"]


def _maps(
    problem: Problem, query: np.ndarray, key: np.ndarray, *, query_rows: int, key_rows: int
) -> dict[str, TensorMap]:
    """The tensor maps of rows, which all kernels have, with the rows of their boxes."""
    return {
        "query_map": TensorMap.for_array(query, (64, query_rows), "128B"),
        "key_map": TensorMap.for_array(key, (64, key_rows), "128B"),
        "value_map": _paired_rows(problem.operands.value, key_rows),
        "gradient_map": _paired_rows(problem.rows.output_gradient, query_rows),
    }


def _paired_rows(x: jax.Array, box_rows: int) -> TensorMap:
    """Rows of bytes in boxes that have of each 16 first the even and then the odd ones."""
    H = x.shape[-1]
    array = _bytes(x).reshape(-1, H)
    extents, strides = (H, 8, 2, len(array) // 16), (2 * H, H, 16 * H)
    return TensorMap(array, extents, strides, (H, 8, 2, box_rows // 16), "u8", f"{H}B")


def _columns(x: jax.Array, box_bytes: int) -> TensorMap:
    """Rows of bytes [..., H, rows] in boxes of H rows."""
    array = _bytes(x).reshape(-1, x.shape[-1])
    return TensorMap.for_array(array, (box_bytes, x.shape[-2]), f"{box_bytes}B")


def _bytes(x: jax.Array) -> np.ndarray:
    return np.ascontiguousarray(np.asarray(x)).view(np.uint8)


def _common(problem: Problem) -> dict[str, Any]:
    """The parameters that all kernels with products have."""
    config, (_, T, S, N, K, _) = problem.config, problem.shape
    left, right = (_UNLIMITED, _UNLIMITED) if config.window is None else config.window
    return {
        **problem.restrictions,
        "gradient_scale": problem.gradient_scale,
        "num_queries": T,
        "num_keys": S,
        "query_heads": N,
        "kv_heads": K,
        "window_left": left,
        "window_right": 0 if config.is_causal else right,
        "log2_scale": config.log2_scale,
        "lift": lift_bits(config.recipe),
        "factor": _factor(problem),
        "unit": _unit(problem),
    }


def _results(problem: Problem) -> Gradients:
    B, T, S, N, K, H = problem.shape
    return Gradients(*(_unwritten(shape, np.uint16) for shape in ((B, T, N, H), (B, S, K, H), (B, S, K, H))))


def _unwritten(shape: tuple[int, ...], dtype: type) -> Output:
    return Output(np.full(shape, _NAN[dtype], dtype))


def _padded(rows: int) -> int:
    return math.ceil(rows / _TILE) * _TILE


def _factor(problem: Problem) -> float:
    return problem.config.scale / multiplier(problem.config.recipe) ** 2


def _unit(problem: Problem) -> float:
    recipe = problem.config.recipe
    return 1 / (2.0 ** lift_bits(recipe) * multiplier(recipe))
