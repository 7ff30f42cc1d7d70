"""What is measured: each kernel with the bytes that it has to move, and the steps that they make up."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_fp4attn import recipes, reference, steps
from jax_fp4attn.config import OperatorConfig, Visibility
from jax_fp4attn.recipe import Recipe

BATCH, LENGTH, HEADS, HEAD_SIZE = 4, 4096, 32, 128
ELEMENTS = BATCH * LENGTH * HEADS * HEAD_SIZE

INPUT = 2.0
NVFP4 = 1 / 2 + 1 / 16
MXFP4 = 1 / 2 + 1 / 32
BYTE = 1.0
ROW_STATISTICS = 3 * 4 / HEAD_SIZE
"""Bytes an element: bfloat16; codes and scales; a byte; lse, its gradient and the row statistic."""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel and the bytes that it has to move for each element, input once and outputs once.

    Attributes:
      name: Of its function.
      choices: Suffix of its compile-time choices.
      bytes_an_element: Bytes.
      step: The step that runs it.
    """

    name: str
    choices: str
    bytes_an_element: float
    step: str

    @property
    def label(self) -> str:
        """For tables."""
        return f"{self.name}{self.choices}"


@dataclasses.dataclass(frozen=True)
class Step:
    """A step of the operator.

    Attributes:
      name: Of the table.
      recipe: Numerical choices.
      native: The step by its kernels.
      oracle: The step by the reference.
    """

    name: str
    recipe: Recipe
    native: Callable[..., Any]
    oracle: Callable[..., Any]


def _step(name: str, recipe: Recipe, native: Callable[..., Any], oracle: Callable[..., Any]) -> Step:
    def configured(function: Callable[..., Any], implementation: Any) -> Callable[..., Any]:
        config = OperatorConfig(recipe, 0.125, is_causal=False, window=None, implementation=implementation)
        return jax.jit(functools.partial(function, config))

    return Step(name, recipe, configured(native, "cuda or reference"), configured(oracle, "reference"))


STEPS = {
    step.name: step
    for step in (
        _step("quantize train", recipes.train, steps.quantize, reference.quantize_operands),
        _step("quantize square", recipes.square, steps.quantize, reference.quantize_operands),
        _step("quantize accurate", recipes.accurate, steps.quantize, reference.quantize_operands),
        _step("training train", recipes.train, steps.quantize_for_training, reference.quantize_for_training),
        _step("training square", recipes.square, steps.quantize_for_training, reference.quantize_for_training),
        _step("row operands", recipes.train, steps.row_operands, reference.row_operands),
    )
}

KERNELS = (
    Kernel("quantize_rows", "", INPUT + NVFP4, "quantize train"),
    Kernel("quantize_rows", "_with_columns", INPUT + NVFP4 + BYTE, "training train"),
    Kernel("quantize_folded_rows", "", INPUT + NVFP4, "quantize square"),
    Kernel("quantize_folded_rows", "_with_columns", INPUT + NVFP4 + BYTE, "training square"),
    Kernel("quantize_value_e4m3", "", INPUT + BYTE, "quantize train"),
    Kernel("quantize_value_e4m3", "_with_rows", INPUT + 2 * BYTE, "training train"),
    Kernel("quantize_value_mxfp4", "", INPUT + MXFP4, "quantize square"),
    Kernel("quantize_value_mxfp4", "_ordered", INPUT + MXFP4, "quantize accurate"),
    Kernel("quantize_value_mxfp4", "_with_rows", INPUT + MXFP4 + BYTE, "training square"),
    Kernel("publish_output_gradient", "", 2 * INPUT + 2 * BYTE + ROW_STATISTICS, "row operands"),
)


def arguments(step: Step) -> tuple[Any, ...]:
    """Random arguments of a step, on the GPU."""
    keys = jax.random.split(jax.random.key(0), 3)
    query, key, value = (jax.random.normal(k, (BATCH, LENGTH, HEADS, HEAD_SIZE), jnp.bfloat16) for k in keys)
    if step.name != "row operands":
        return query, key, value, Visibility()
    lse = jnp.zeros((BATCH, HEADS, LENGTH), jnp.float32)
    return query, lse, key, lse, jnp.ones((BATCH, HEADS), jnp.float32)
