"""Which steps have kernels, for which recipes and sizes."""

from collections.abc import Iterator

import numpy as np

from jax_fp4attn.native.calls import STEPS, STEPS_WITH_HANDLERS
from jax_fp4attn.recipe import Recipe

STEPS_WITH_KERNELS = frozenset(STEPS_WITH_HANDLERS)

HEAD_SIZES = (64, 128)
MAX_BATCH = 65535  # a dimension of the grid


def missing_kernel(step: str, recipe: Recipe, head_size: int, batch: int = 1) -> str | None:
    """Why a step has no kernel.

    Args:
      step: One of :data:`jax_fp4attn.native.calls.STEPS`.
      recipe: Numerical choices.
      head_size: H of the inputs.
      batch: B of the inputs; a symbolic one is taken to fit.

    Returns:
      The reason, or None if there is one.

    Example:
      >>> from jax_fp4attn import recipes
      >>> missing_kernel("quantize", recipes.train, 128) is None
      True
      >>> missing_kernel("quantize", recipes.train, 80)
      'there are kernels for head sizes 64 and 128, not 80'
    """
    assert step in STEPS, step
    if step not in STEPS_WITH_KERNELS:
        return f"there is no kernel for the step {step!r} yet"
    if isinstance(batch, int) and batch > MAX_BATCH:
        return f"there are kernels for batches of at most {MAX_BATCH}, not {batch}"
    return next(_obstacles(step, recipe, head_size), None)


def _obstacles(step: str, recipe: Recipe, head_size: int) -> Iterator[str]:
    if head_size not in HEAD_SIZES:
        yield f"there are kernels for head sizes 64 and 128, not {head_size}"
    if step == "row_operands":
        yield from _other_than(recipe, "backward", "fp8")
        return
    yield from _other_than(recipe, "qk_format", "nvfp4")
    yield from _other_than(recipe, "qk_tensor_scale", "unit")
    yield from _other_than(recipe, "qk_scale_fold", "none", "k64_mse")
    yield from _other_than(recipe, "v_format", "mxfp4", "e4m3")
    rule = recipe.v_exponent_rule
    inexact = isinstance(rule, float) and float(np.float32(rule)) != rule
    if recipe.v_format == "mxfp4" and (rule == "best_l2" or inexact):
        yield f"there is no kernel for v_exponent_rule={rule!r}"
    if step == "quantize_for_training":
        yield from _other_than(recipe, "backward", "fp8")
        yield from _other_than(recipe, "backward_qk", "source")


def _other_than(recipe: Recipe, field: str, *choices: str) -> Iterator[str]:
    if getattr(recipe, field) not in choices:
        yield f"there is no kernel for {field}={getattr(recipe, field)!r}"
