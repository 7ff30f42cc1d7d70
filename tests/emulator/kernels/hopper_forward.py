"""The library's forward for Hopper on the emulator, launched as cuda/ffi/forward.cc launches it."""

import dataclasses
import functools
import math
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from cuda.emulator import Output
from cuda.emulator.manifest import KernelEntry, read_manifest
from jax_fp4attn import SegmentIds, reference
from jax_fp4attn.code_map import Affine, Exponential, SignedSquare
from jax_fp4attn.config import LN_2, OperatorConfig, Visibility
from jax_fp4attn.recipe import Recipe
from jax_fp4attn.reference.tiles import key_order, padded_keys

_BUILT = pathlib.Path(__file__).parents[3] / "build" / "native" / "kernels.sm_90a.ptx"
_UNLIMITED = 1 << 30
_TILE = 128


def available() -> bool:
    """Whether the kernels have been built."""
    return _BUILT.exists() and "expand_key_h64" in _kernels()


@functools.cache
def _kernels() -> dict[str, KernelEntry]:
    return read_manifest(_BUILT.with_suffix(".json"))


@functools.cache
def _ptx() -> str:
    return _BUILT.read_text()


def launch(
    name: str, grid: tuple[int, int, int], values: Mapping[str, Any], seeds: Iterable[int] = (0,)
) -> list[dict[str, np.ndarray]]:
    """Runs a kernel, in which nothing may be found.

    Args:
      name: Of the kernel.
      grid: Thread blocks.
      values: Of its parameters.
      seeds: Of the schedules.

    Returns:
      For each seed the arrays behind the parameters, by name, after the run.
    """
    result = _kernels()[name].emulate(_ptx(), grid, values, seeds=seeds)
    assert not result.findings, list(result.findings)[:3]
    # As the emulator lists them: an array that two parameters share comes once.
    names: dict[int, str] = {}
    for parameter in _kernels()[name].parameters:
        value = values[parameter]
        array = value.array if isinstance(value, Output) else value
        if isinstance(array, np.ndarray):
            names.setdefault(id(array), parameter)
    return [dict(zip(names.values(), arrays, strict=True)) for arrays in result.arrays]


@dataclasses.dataclass(frozen=True)
class Problem:
    """What a call of the forward takes.

    Attributes:
      config: Static arguments.
      operands: Quantised query, key and value.
      visibility: Run-time restrictions.
      num_keys: S.
    """

    config: OperatorConfig
    operands: reference.Operands
    visibility: Visibility
    num_keys: int

    @property
    def recipe(self) -> Recipe:
        return self.config.recipe

    def expected(self) -> "Attention":
        """What the reference gives."""
        output, lse = _reference(self.config, self.operands, self.visibility, self.num_keys)
        return Attention(np.asarray(output, np.float32), np.asarray(lse))


@functools.partial(jax.jit, static_argnums=(0, 3))
def _reference(
    config: OperatorConfig, operands: reference.Operands, visibility: Visibility, num_keys: int
) -> tuple[jax.Array, jax.Array]:
    return reference.forward(config, operands, None, visibility, num_keys=num_keys)


@functools.partial(jax.jit, static_argnums=0)
def _quantize(recipe: Recipe, *arguments: Any) -> reference.Operands:
    return reference.quantize_operands(OperatorConfig(recipe, 1.0, is_causal=False, window=None), *arguments)


class Attention(NamedTuple):
    """Output, float32 [B, N, T, H] with bfloat16 values, and log-sum-exp [B, N, T]."""

    output: np.ndarray
    lse: np.ndarray


class Shape(NamedTuple):
    """Sizes of a problem."""

    B: int
    T: int
    S: int
    N: int
    K: int
    H: int


def inputs(shape: Shape, seed: int = 0) -> list[np.ndarray]:
    """Normally distributed query, key and value."""
    rng = np.random.default_rng(seed)
    B, T, S, N, K, H = shape
    shapes = ((B, T, N, H), (B, S, K, H), (B, S, K, H))
    return [rng.standard_normal(x, np.float32).astype(ml_dtypes.bfloat16) for x in shapes]


def problem(
    recipe: Recipe,
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    *,
    is_causal: bool = False,
    window: tuple[int, int] | None = None,
    scale: float | None = None,
    query_lengths: list[int] | None = None,
    key_lengths: list[int] | None = None,
    segments: tuple[np.ndarray, np.ndarray] | None = None,
    key_offset: int | None = None,
) -> Problem:
    """The problem of query, key and value, quantised by the reference."""
    config = OperatorConfig(recipe, query.shape[3] ** -0.5 if scale is None else scale, is_causal, window)
    number = lambda x: None if x is None else jnp.asarray(x, jnp.int32)  # noqa: E731
    visibility = Visibility(
        query_lengths=number(query_lengths),
        key_lengths=number(key_lengths),
        segment_ids=None if segments is None else SegmentIds(*map(number, segments)),
        key_offset=number(key_offset),
    )
    operands = _quantize(recipe, query, key, value, visibility)
    return Problem(config, operands, visibility, key.shape[1])


def expanded_key(problem: Problem) -> np.ndarray:
    """Key as float16 [B, K, S', H], in the order of the kernel."""
    B, K, slots, H = problem.operands.key.shape
    values = {
        "codes": np.asarray(problem.operands.key.codes),
        "pages": np.asarray(problem.operands.key.scales),
        "order": _order(problem),
        "values": Output(np.zeros((B * K * slots, H), np.float16)),
        "num_keys": problem.num_keys,
        "num_heads": K,
    }
    (arrays,) = launch(f"expand_key_h{H}", (K, slots // _TILE, B), values)
    return arrays["values"].reshape(B, K, slots, H)


def expanded_value(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """MXFP4 value as E5M2 bytes [B, K, H, S'], and the exponent of each tile, [B, K, S' / 128]."""
    B, K, H, slots = problem.operands.value.shape
    values = {
        "codes": np.asarray(problem.operands.value.codes),
        "pages": np.asarray(problem.operands.value.scales),
        "values": Output(np.zeros((B * K * H, slots), np.uint8)),
        "exponents": Output(np.zeros((B, K, slots // _TILE), np.int32)),
        "num_keys": problem.num_keys,
        "num_heads": K,
    }
    (arrays,) = launch(f"expand_value_h{H}", (K, slots // _TILE, B), values)
    return arrays["values"].reshape(B, K, H, slots), arrays["exponents"]


def attend(problem: Problem, seeds: Iterable[int] = (0,), blocks: int = 2) -> list[Attention]:
    """Expands key and value and runs the attention kernel.

    Args:
      problem: What to compute.
      seeds: Of the schedules.
      blocks: Thread blocks at most.

    Returns:
      The result of each schedule.
    """
    B, N, T, H = problem.operands.query.shape
    K = problem.operands.key.shape[1]
    kernel = f"forward_h{H}_{_probabilities(problem.recipe)}"
    # All warpgroups but one have 64 rows each.
    rows_an_item = _kernels()[kernel].threads // 2 - 64
    items = B * N * math.ceil(T / rows_an_item)
    visibility, segments = problem.visibility, problem.visibility.segment_ids
    if problem.recipe.v_format == "mxfp4":
        value, exponents = expanded_value(problem)
    else:
        value, exponents = np.asarray(problem.operands.value), None
    values = {
        "query_codes": np.asarray(problem.operands.query.codes),
        "query_pages": np.asarray(problem.operands.query.scales),
        "key_map": expanded_key(problem).reshape(-1, H),
        "value_map": value.reshape(B * K * H, -1),
        "value_exponents": exponents,
        "output": Output(np.zeros((B, T, N, H), np.uint16)),
        "lse": Output(np.zeros((B, N, T), np.float32)),
        "query_lengths": _array(visibility.query_lengths),
        "key_lengths": _array(visibility.key_lengths),
        "query_segments": None if segments is None else _array(segments.query),
        "key_segments": None if segments is None else _array(segments.key_value),
        "order": _order(problem),
        "key_offset": _array(visibility.key_offset),
        "num_queries": T,
        "num_keys": problem.num_keys,
        "query_heads": N,
        "kv_heads": K,
        "batches": B,
        "num_items": items,
        **_numbers(problem.config, B * N),
    }
    return [
        Attention(x["output"].view(ml_dtypes.bfloat16).astype(np.float32).swapaxes(1, 2), x["lse"])
        for x in launch(kernel, (min(items, blocks), 1, 1), values, seeds)
    ]


def _array(x: jax.Array | None) -> np.ndarray | None:
    return None if x is None else np.asarray(x).reshape(-1) if x.ndim == 0 else np.asarray(x)


def _order(problem: Problem) -> np.ndarray | None:
    order = key_order(problem.recipe, problem.num_keys)
    return None if order is None else order.astype(np.int32)


def _probabilities(recipe: Recipe) -> str:
    if recipe.p_format == "e4m3":
        return "e4m3"
    assert recipe.code_map is not None
    kinds = {Affine: "affine", SignedSquare: "square", Exponential: "exponential"}
    kind = kinds[type(recipe.code_map.quarters[0])]
    return f"{kind}_mixed_anchor{recipe.anchor_keys}" if recipe.row_reference == "anchor" else kind


def _numbers(config: OperatorConfig, heads: int) -> dict[str, float]:
    """The numbers of a recipe and a window; whether heads come in sections does not matter to results."""
    recipe, log2_scale = config.recipe, config.log2_scale
    left, right = (_UNLIMITED, _UNLIMITED) if config.window is None else config.window
    right = 0 if config.is_causal else right
    numbers: dict[str, float] = {
        "section": 1 if right == _UNLIMITED else heads,
        "window_left": left,
        "window_right": right,
    }
    numbers |= {"log2_scale": log2_scale, "rescale_threshold": recipe.rescale_threshold_bits}
    numbers |= {"block_offset": 1 - math.log2(recipe.p_exponent_rule), "shift": recipe.p_scale_shift}
    in_bits = recipe.margin_unit == "bits"
    numbers |= {
        "margin": recipe.margin / log2_scale if in_bits else recipe.margin * LN_2,
        "unit": 1 / recipe.v_multiplier,
    }
    match recipe.code_map.quarters[0] if recipe.code_map else None:
        case Affine(slope, intercept):
            chosen = (slope, intercept, 0.0)
        case SignedSquare(slope, intercept, constant):
            chosen = (slope, intercept, constant)
        case Exponential(offset):
            chosen = (1.0, offset, 0.0)
        case _:
            chosen = (0.0, 0.0, 0.0)
    return numbers | dict(zip(("slope", "intercept", "constant"), chosen, strict=True))


def rows_of_keys(num_keys: int) -> np.ndarray:
    """The row of the expanded key that holds each slot: of each 16, row 8 h + 2 t + e has slot 4 t + 2 e + h."""
    slot = np.arange(padded_keys(num_keys))
    return slot // 16 * 16 + slot % 2 * 8 + slot % 16 // 4 * 2 + slot % 4 // 2
