"""Custom calls: target names, operands, results and attributes, the contract with the native library.

Target names end in the version of their contract; from the first release on a change of operands, results, attributes
or their meaning makes a new version. Operands are the array arguments of the step in order, those that are None left
out; results are those of the reference, in order, and then the memory that the kernels work in. Attributes say which
operands are there.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jax_fp4attn.config import OperatorConfig, Visibility
from jax_fp4attn.native import availability, library
from jax_fp4attn.native.attributes import recipe_attributes

VERSION = 1

STEPS = (
    "quantize",
    "quantize_for_training",
    "forward",
    "partial_forward",
    "row_operands",
    "backward",
    "partial_gradients",
)

STEPS_WITH_HANDLERS = ("quantize", "quantize_for_training", "forward", "row_operands", "backward")


def target_name(step: str) -> str:
    """Name of a step's custom call."""
    assert step in STEPS
    return f"jax_fp4attn_{step}_v{VERSION}"


def target_names() -> tuple[str, ...]:
    """Names of all custom calls."""
    return tuple(target_name(step) for step in STEPS)


def register() -> None:
    """Registers all handlers of the native library with XLA.

    Only a process that runs programs without tracing a call, such as exported ones, has to call it; tracing registers
    what it needs. It can be called any number of times.

    Raises:
      RuntimeError: If there is no library that this process can load; the message says why.

    Example:
      >>> import jax_fp4attn
      >>> if jax_fp4attn.native.info().built_for is not None:
      ...     jax_fp4attn.native.register()
    """
    loaded = library.load()
    if isinstance(loaded, str):
        raise RuntimeError(loaded)
    for step in STEPS_WITH_HANDLERS:
        library.register(target_name(step))


def call(
    step: str,
    config: OperatorConfig,
    further: dict[str, int | bool],
    results: Any,
    *arguments: Any,
    workspace: Sequence[jax.ShapeDtypeStruct] = (),
) -> Any:
    """A step as a custom call.

    Args:
      step: Its name.
      config: Static arguments.
      further: Further attributes of the step.
      results: The reference's results, a pytree of shapes with their types.
      *arguments: The step's array arguments, pytrees.
      workspace: Arrays that the kernels work in.

    Returns:
      The results, a pytree like ``results``.
    """
    leaves, structure = jax.tree.flatten(results)
    buffers = [_placed(leaf) for leaf in (*leaves, *(_like(leaves[0], buffer) for buffer in workspace))]
    attributes = {
        "scale": np.float32(config.scale),
        "is_causal": config.is_causal,
        "window_left": np.int32(-1 if config.window is None else config.window[0]),
        "window_right": np.int32(-1 if config.window is None else config.window[1]),
        **{name: value if isinstance(value, bool) else np.int32(value) for name, value in further.items()},
        **_presence(arguments),
        **recipe_attributes(config.recipe),
    }
    if not availability.is_cross_compiling():
        library.register(target_name(step))
    outputs = jax.ffi.ffi_call(target_name(step), buffers)(*jax.tree.leaves(arguments), **attributes)
    return jax.tree.unflatten(structure, outputs[: len(leaves)])


def _like(result: jax.ShapeDtypeStruct, buffer: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """A buffer that varies over the mesh axes over which a result varies."""
    kind = _axis_type(result)
    return jax.ShapeDtypeStruct(buffer.shape, buffer.dtype, **{kind: getattr(result, kind)})


def _axis_type(result: jax.ShapeDtypeStruct) -> str:
    """The attribute that says over which manual mesh axes an array varies, which has another name before JAX 0.10."""
    return "manual_axis_type" if hasattr(result, "manual_axis_type") else "vma"


def _placed(result: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """A result's type with the mesh in scope: under a partly manual mesh ``ffi_call`` does not find it by itself."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or result.sharding is not None:
        return result
    sharding = NamedSharding(mesh, PartitionSpec())
    kind = _axis_type(result)
    return jax.ShapeDtypeStruct(result.shape, result.dtype, sharding=sharding, **{kind: getattr(result, kind)})


def _presence(arguments: tuple[Any, ...]) -> dict[str, bool]:
    """Which of the optional restrictions are among the operands."""
    found = [argument for argument in arguments if isinstance(argument, Visibility)]
    if not found:
        return {}
    (visibility,) = found
    return {
        "has_query_lengths": visibility.query_lengths is not None,
        "has_key_lengths": visibility.key_lengths is not None,
        "has_segment_ids": visibility.segment_ids is not None,
        "has_key_offset": visibility.key_offset is not None,
    }
