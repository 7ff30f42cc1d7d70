"""Problems of the forward for the emulator, and what the library's kernels take and give."""

import dataclasses
import functools
import math
import pathlib
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from cuda.emulator import Output
from cuda.emulator.errors import Finding
from cuda.emulator.manifest import KernelEntry, read_manifest
from cuda.emulator.tensor_map import TensorMap
from jax_fp4attn import SegmentIds, reference
from jax_fp4attn.code_map import Affine, Exponential, SignedSquare
from jax_fp4attn.config import LN_2, OperatorConfig, Visibility
from jax_fp4attn.formats import BlockScaled, from_scale_pages, to_scale_pages
from jax_fp4attn.recipe import Recipe
from jax_fp4attn.reference.tiles import key_order
from tests.shapes import COMPILER_OPTIONS

_BUILT = pathlib.Path(__file__).parents[3] / "build" / "native"
_UNLIMITED = 1 << 30
TILE = 128


@dataclasses.dataclass(frozen=True)
class Library:
    """The built kernels of a target.

    Attributes:
      target: sm_90a, sm_100f or sm_103a.
    """

    target: str

    @property
    def _ptx_path(self) -> pathlib.Path:
        return _BUILT / f"kernels.{self.target}.ptx"

    def has(self, name: str) -> bool:
        """Whether a kernel has been built."""
        return self._ptx_path.exists() and name in self.kernels

    @functools.cached_property
    def kernels(self) -> dict[str, KernelEntry]:
        """By name."""
        return read_manifest(self._ptx_path.with_suffix(".json"))

    @functools.cached_property
    def ptx(self) -> str:
        return self._ptx_path.read_text()

    def run(
        self, name: str, grid: tuple[int, int, int], values: Mapping[str, Any], **options: Any
    ) -> tuple[list[dict[str, np.ndarray]], Counter[Finding]]:
        """Runs a kernel.

        Args:
          name: Of the kernel.
          grid: Thread blocks.
          values: Of its parameters.
          **options: Of the emulator.

        Returns:
          For each seed the arrays behind the parameters, by name, after the run; and what was found.
        """
        result = self.kernels[name].emulate(self.ptx, grid, values, **options)
        # As the emulator lists them: an array that two parameters share comes once.
        names: dict[int, str] = {}
        for parameter in self.kernels[name].parameters:
            value = values[parameter]
            array = value.array if isinstance(value, Output | TensorMap) else value
            if isinstance(array, np.ndarray):
                names.setdefault(id(array), parameter)
        return [dict(zip(names.values(), arrays, strict=True)) for arrays in result.arrays], result.findings


@dataclasses.dataclass(frozen=True)
class Launch:
    """A kernel of a library with its thread blocks and the values of its parameters."""

    library: Library
    kernel: str
    grid: tuple[int, int, int]
    values: Mapping[str, Any]

    def run(self, seeds: Iterable[int] = (0,)) -> list[dict[str, np.ndarray]]:
        """Runs it, and nothing may be found; see :meth:`Library.run`."""
        arrays, findings = self.library.run(self.kernel, self.grid, self.values, seeds=seeds)
        assert not findings, list(findings)[:3]
        return arrays


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


@functools.partial(jax.jit, static_argnums=(0, 3), compiler_options=COMPILER_OPTIONS)
def _reference(
    config: OperatorConfig, operands: reference.Operands, visibility: Visibility, num_keys: int
) -> tuple[jax.Array, jax.Array]:
    return reference.forward(config, operands, None, visibility, num_keys=num_keys)


@functools.partial(jax.jit, static_argnums=0, compiler_options=COMPILER_OPTIONS)
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


def problem_of(
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


def array(x: jax.Array | None) -> np.ndarray | None:
    return None if x is None else np.asarray(x).reshape(-1) if x.ndim == 0 else np.asarray(x)


def order_of(problem: Problem) -> np.ndarray | None:
    order = key_order(problem.recipe, problem.num_keys)
    return None if order is None else order.astype(np.int32)


def probabilities(recipe: Recipe) -> str:
    """Part of the name of the forward's kernel."""
    if recipe.p_format == "e4m3":
        return "e4m3"
    assert recipe.code_map is not None
    kinds = {Affine: "affine", SignedSquare: "square", Exponential: "exponential"}
    kind = kinds[type(recipe.code_map.quarters[0])]
    if recipe.row_reference != "anchor":
        return kind
    odd = "" if all(recipe.code_map.alternate_query_tiles) else "_odd"
    return f"{kind}_mixed{odd}_anchor{recipe.anchor_keys}"


def common_values(problem: Problem, num_items: int) -> dict[str, Any]:
    """Arguments of an attention kernel, by name, that do not depend on how it takes its operands."""
    B, N, T, H = problem.operands.query.shape
    K = problem.operands.key.shape[1]
    visibility, segments = problem.visibility, problem.visibility.segment_ids
    return {
        "output": Output(np.zeros((B, T, N, H), np.uint16)),
        "lse": Output(np.zeros((B, N, T), np.float32)),
        "query_lengths": array(visibility.query_lengths),
        "key_lengths": array(visibility.key_lengths),
        "query_segments": None if segments is None else array(segments.query),
        "key_segments": None if segments is None else array(segments.key_value),
        "order": order_of(problem),
        "key_offset": array(visibility.key_offset),
        "num_queries": T,
        "num_keys": problem.num_keys,
        "query_heads": N,
        "kv_heads": K,
        "batches": B,
        "num_items": num_items,
        **numbers(problem.config, B * N),
    }


def numbers(config: OperatorConfig, heads: int) -> dict[str, float]:
    """The numbers of a recipe and a window; whether heads come in sections does not matter to results."""
    left, right = (_UNLIMITED, _UNLIMITED) if config.window is None else config.window
    right = 0 if config.is_causal else right
    visible = {"section": 1 if right == _UNLIMITED else heads, "window_left": left, "window_right": right}
    others = dict.fromkeys(("block_offset", "shift", "margin", "slope", "intercept", "constant"), 0.0)
    others |= {"rescale_threshold": 0.0, "unit": 1.0}
    if config.recipe.p_format == "e4m3":
        recipe = config.recipe
        others |= {"rescale_threshold": recipe.rescale_threshold_bits, "unit": 1 / recipe.v_multiplier}
    else:
        others |= _direct_p(config)
    return visible | {"log2_scale": config.log2_scale} | others


def _direct_p(config: OperatorConfig) -> dict[str, float]:
    recipe = config.recipe
    assert isinstance(recipe.p_exponent_rule, float) and recipe.code_map is not None
    in_bits = recipe.margin_unit == "bits"
    found = {
        "block_offset": 1 - math.log2(recipe.p_exponent_rule),
        "shift": recipe.p_scale_shift,
        "margin": recipe.margin / config.log2_scale if in_bits else recipe.margin * LN_2,
    }
    match recipe.code_map.quarters[0]:
        case Affine(slope, intercept):
            return found | {"slope": slope, "intercept": intercept}
        case SignedSquare(slope, intercept, constant):
            return found | {"slope": slope, "intercept": intercept, "constant": constant}
        case Exponential(offset):
            return found | {"slope": 1.0, "intercept": offset}
    raise AssertionError(f"no kernel takes {recipe.code_map!r}")


def same_bits(one: Iterable[np.ndarray], other: Iterable[np.ndarray]) -> bool:
    """Whether float32 arrays are equal, NaN and signs of zeros included."""
    return all(np.array_equal(x.view(np.uint32), y.view(np.uint32)) for x, y in zip(one, other, strict=True))


def random_segments(batch: int, num_queries: int, num_keys: int) -> tuple[np.ndarray, np.ndarray]:
    """Segments 0 (padding) to 3, which follow one another."""
    rng = np.random.default_rng(7)
    queries, keys = (np.sort(rng.integers(0, 4, (batch, length)), axis=1) for length in (num_queries, num_keys))
    return queries, keys


def with_nan_scales(x: BlockScaled, rows: np.ndarray) -> BlockScaled:
    """NVFP4 with NaN scales in some rows [B, tiles * 128] of every head, rows that have no codes among them."""
    num_scales = x.shape[-1] // x.block_size
    scales = from_scale_pages(x.scales, rows.shape[1], num_scales)
    scales = jnp.where(rows[:, None, :, None], np.uint8(0x7F), scales)
    return dataclasses.replace(x, scales=to_scale_pages(scales))
