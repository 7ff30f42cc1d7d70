"""Static and dynamic arguments of the operator, as every layer below the public function passes them."""

import dataclasses
from typing import Literal

import jax

from jax_fp4attn.recipe import Recipe

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453

Implementation = Literal["reference", "cuda", "cuda or reference"]
"""The last one is "cuda" where a program is compiled for CUDA and "reference" where it is compiled for others."""

ContextOrder = Literal["contiguous", "zigzag"]


@dataclasses.dataclass(frozen=True)
class ContextParallelism:
    """How the sequence is split over a mesh axis.

    Attributes:
      axis: Name of the mesh axis.
      order: Which part a shard holds: ``"contiguous"``, or ``"zigzag"`` (of 2 n equal parts, shard i holds i and
        2 n - 1 - i, in this order).
    """

    axis: str
    order: ContextOrder


@dataclasses.dataclass(frozen=True)
class OperatorConfig:
    """What is known at trace time; hashable.

    Attributes:
      recipe: Numerical choices.
      scale: Softmax scale, positive.
      is_causal: Whether key j is visible to query i only if j <= i.
      window: (left, right): key j is visible to query i only if i - left <= j <= i + right; None for no window.
      context: How the sequence is split over a mesh axis, or None.
      implementation: What runs the operator's steps.
    """

    recipe: Recipe
    scale: float
    is_causal: bool
    window: tuple[int, int] | None
    context: ContextParallelism | None = None
    implementation: Implementation = "reference"

    @property
    def log2_scale(self) -> float:
        """Factor from a raw score to a base-2 log score."""
        return self.scale * LOG2_E


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SegmentIds:
    """Segments of packed sequences: a query attends to keys of its own segment; segment 0 (or less) is padding.

    Attributes:
      query: int32 [*B, T]; JAX arrays of wider integers are cast, so their numbers have to fit.
      key_value: int32 [*B, S]; likewise.
    """

    query: jax.Array
    key_value: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Visibility:
    """Run-time restrictions on which keys a query sees, all optional; a pytree.

    Attributes:
      mask: bool, broadcastable to [B, N, T, S]; True keeps.
      query_lengths: int32 [B]; rows beyond see nothing.
      key_lengths: int32 [B]; keys beyond are seen by nobody.
      segment_ids: :class:`SegmentIds` with [B, T] and [B, S].
      key_offset: int32 [], position of the first key minus that of the first query, for causality and windows of a part
        of the sequence; None for 0.
    """

    mask: jax.Array | None = None
    query_lengths: jax.Array | None = None
    key_lengths: jax.Array | None = None
    segment_ids: SegmentIds | None = None
    key_offset: jax.Array | None = None


def padded_head_size(head_size: int) -> int:
    """Head size of the tiles: 64, 128 or 256; smaller heads are padded with zero channels, which change nothing."""
    return next(size for size in (64, 128, 256) if head_size <= size)
