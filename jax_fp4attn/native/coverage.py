"""Which steps have kernels, for which recipes and sizes."""

from collections.abc import Iterator

import numpy as np

from jax_fp4attn.code_map import Affine, Exponential, MapSchedule, SignedSquare, uniform, with_exponential
from jax_fp4attn.native.availability import Architecture, architecture, capabilities
from jax_fp4attn.native.calls import STEPS, STEPS_WITH_HANDLERS
from jax_fp4attn.recipe import Recipe

STEPS_WITH_KERNELS = frozenset(STEPS_WITH_HANDLERS)
STEPS_FOR_HOPPER_ALONE = frozenset({"backward"})
"""Those of them that have none for other GPUs."""

# How many anchor keys the forward has kernels for, and which query tiles take the exponential with them.
_QUERY_TILES_OF_ANCHORS: dict[Architecture, dict[int, tuple[bool, bool]]] = {
    "hopper": {32: (True, True)},
    "blackwell": {32: (True, True), 128: (False, True)},
}
_ANY_GPU: Architecture = "hopper"  # where there is none yet, as before a program is compiled

HEAD_SIZES = (64, 128)
MAX_BATCH = 65535  # a dimension of the grid


def missing_kernel(step: str, recipe: Recipe, head_size: int, batch: int = 1) -> str | None:
    """Why a step has no kernel for one of the GPUs that programs are traced for.

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
    if step in STEPS_FOR_HOPPER_ALONE:
        others = {capability for capability in capabilities() if architecture(capability) != "hopper"}
        if others:
            major, minor = min(others)
            return f"there is no kernel for the step {step!r} on compute capability {major}.{minor} yet"
    if isinstance(batch, int) and batch > MAX_BATCH:
        return f"there are kernels for batches of at most {MAX_BATCH}, not {batch}"
    found = {architecture(capability) for capability in capabilities()} or {_ANY_GPU}
    obstacles = (obstacle for name in sorted(found) for obstacle in _obstacles(step, recipe, head_size, name))
    return next(obstacles, None)


def _obstacles(step: str, recipe: Recipe, head_size: int, name: Architecture) -> Iterator[str]:
    if head_size not in HEAD_SIZES:
        yield f"there are kernels for head sizes 64 and 128, not {head_size}"
    if step == "row_operands":
        yield from _other_than(recipe, "backward", "fp8")
        return
    yield from _other_than(recipe, "qk_format", "nvfp4")
    yield from _other_than(recipe, "qk_tensor_scale", "unit")
    if step == "backward":
        yield from _other_than(recipe, "backward", "fp8")
        yield from _other_than(recipe, "backward_qk", "source")
        yield from _other_than(recipe, "dq_accumulation", "float32", "float32_ordered")
        return
    yield from _other_than(recipe, "v_format", "mxfp4", "e4m3")
    if step == "forward":
        yield from _probabilities(recipe, name)
        return
    yield from _other_than(recipe, "qk_scale_fold", "none", "k64_mse")
    rule = recipe.v_exponent_rule
    inexact = isinstance(rule, float) and float(np.float32(rule)) != rule
    if recipe.v_format == "mxfp4" and (rule == "best_l2" or inexact):
        yield f"there is no kernel for v_exponent_rule={rule!r}"
    if step == "quantize_for_training":
        yield from _other_than(recipe, "backward", "fp8")
        yield from _other_than(recipe, "backward_qk", "source")


def _probabilities(recipe: Recipe, name: Architecture) -> Iterator[str]:
    """What stands against the ways of making probabilities that the forward has on an architecture."""
    if recipe.p_format != "mxfp4":
        yield from _other_than(recipe, "denominator", "unquantized")
        return
    yield from _other_than(recipe, "denominator", "represented")
    if recipe.p_exponent_rule == "ceil":
        yield f"there is no kernel for p_exponent_rule={recipe.p_exponent_rule!r}"
    assert recipe.code_map is not None
    if recipe.row_reference == "zero":
        if not _is_simple(recipe.code_map):
            yield f"there is no kernel for code_map={recipe.code_map!r} with row_reference='zero'"
        return
    yield from _other_than(recipe, "anchor_keys", *_QUERY_TILES_OF_ANCHORS[name])
    if not _is_mixed(recipe.code_map, _QUERY_TILES_OF_ANCHORS[name].get(recipe.anchor_keys)):
        yield f"there is no kernel for code_map={recipe.code_map!r} with {recipe.anchor_keys} anchor keys"


def _is_simple(schedule: MapSchedule) -> bool:
    code_map = schedule.quarters[0]
    return schedule == uniform(code_map) and isinstance(code_map, Affine | SignedSquare | Exponential)


def _is_mixed(schedule: MapSchedule, query_tiles: tuple[bool, bool] | None) -> bool:
    """Whether it is an affine map with the exponential on the published quarter of the pairs in these query tiles."""
    code_map = schedule.quarters[0]
    if query_tiles is None or not isinstance(code_map, Affine):
        return False
    return schedule == with_exponential(code_map, (1, 1, 1, 1), query_tiles=query_tiles)


def _other_than(recipe: Recipe, field: str, *choices: str | int) -> Iterator[str]:
    if getattr(recipe, field) not in choices:
        yield f"there is no kernel for {field}={getattr(recipe, field)!r}"
