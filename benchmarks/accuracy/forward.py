"""The operator under measurement: the reference's steps, with quantised queries and keys shared between recipes."""

import functools
from collections.abc import Collection

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from benchmarks.accuracy.exact import exact_attention
from benchmarks.accuracy.inputs import SCALE, Sample, draw_groups
from benchmarks.accuracy.metrics import Accuracy, Comparison
from jax_fp4attn import Recipe, reference
from jax_fp4attn.config import OperatorConfig, Visibility
from jax_fp4attn.formats import E4M3, BlockScaled, decode
from jax_fp4attn.reference import Operands
from jax_fp4attn.reference.tiles import key_order


def operator_config(recipe: Recipe, *, is_causal: bool = False) -> OperatorConfig:
    """Static arguments of the operator for the inputs of this benchmark."""
    return OperatorConfig(recipe=recipe, scale=SCALE, is_causal=is_causal, window=None)


def quantize(recipe: Recipe, sample: Sample) -> Operands:
    """Operands of the forward pass.

    Recipes that agree on queries and keys share the compiled quantiser, whose scale search takes long to compile.

    Args:
      recipe: The recipe.
      sample: Inputs.

    Returns:
      The operands.
    """
    fields = ("qk_format", "qk_scale_fold", "qk_tensor_scale", "qk_ties")
    query_key_recipe = Recipe(**{field: getattr(recipe, field) for field in fields})
    query, key = _quantize_query_key(query_key_recipe, sample.query, sample.key)
    return Operands(query, key, _quantize_value(recipe, sample.value))


@functools.partial(jax.jit, static_argnames=("recipe",))
def _quantize_query_key(
    recipe: Recipe, query: jax.Array, key: jax.Array
) -> tuple[BlockScaled | jax.Array, BlockScaled | jax.Array]:
    operands = reference.quantize_operands(operator_config(recipe), query, key, key, Visibility())
    return operands.query, operands.key


@functools.partial(jax.jit, static_argnames=("recipe",))
def _quantize_value(recipe: Recipe, value: jax.Array) -> BlockScaled | jax.Array:
    return reference.quantize_operands(operator_config(recipe), value, value, value, Visibility()).value


@functools.partial(jax.jit, static_argnames=("recipe", "num_keys", "is_causal"))
def _forward(recipe: Recipe, operands: Operands, num_keys: int, is_causal: bool) -> tuple[jax.Array, jax.Array]:
    config = operator_config(recipe, is_causal=is_causal)
    output, lse = reference.forward(config, operands, None, Visibility(), num_keys=num_keys)
    return jnp.swapaxes(output, 1, 2), jnp.swapaxes(lse, 1, 2)


def forward(
    recipe: Recipe, operands: Operands, num_keys: int, *, is_causal: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Output [B, T, N, H] and lse [B, T, N] of a recipe."""
    return _forward(recipe, operands, num_keys, is_causal)


@functools.partial(jax.jit, static_argnames=("recipe", "num_keys"))
def represented(recipe: Recipe, operands: Operands, num_keys: int) -> Sample:
    """The values that quantised operands stand for.

    Args:
      recipe: The recipe.
      operands: From :func:`quantize`.
      num_keys: S.

    Returns:
      A sample of float32 arrays, keys in the order of the sequence.
    """

    def dequantize(x: BlockScaled | jax.Array) -> jax.Array:
        return x.dequantize() if isinstance(x, BlockScaled) else x.astype(jnp.float32)

    value = operands.value
    if recipe.v_format == "e4m3" and not isinstance(value, BlockScaled):
        values = decode(value, E4M3) / recipe.v_multiplier
    else:
        values = dequantize(value)
    values = jnp.swapaxes(values, 2, 3)
    order = key_order(recipe, num_keys)
    if order is not None:
        values = values[:, :, np.argsort(order)]
    query, key = dequantize(operands.query), dequantize(operands.key)[:, :, :num_keys]
    return Sample(*(jnp.swapaxes(x, 1, 2) for x in (query, key, values[:, :, :num_keys])))


def accuracies(
    recipes: Collection[Recipe], num_keys: int, *, rows: int, heads: int, group: int, progress: tqdm | None = None
) -> dict[str, Accuracy]:
    """Accuracy of recipes against exact attention on the same bfloat16 inputs, without a mask.

    Args:
      recipes: The recipes, told apart by name.
      num_keys: S.
      rows: T, the query rows of each head.
      heads: Number of heads, each with its own key and value.
      group: Heads that are held in memory at once.
      progress: Advances by one for each recipe and group.

    Returns:
      Accuracy over all heads and rows, by name.
    """
    comparisons = {recipe.name: Comparison() for recipe in recipes}
    for sample in draw_groups(num_keys, rows=rows, heads=heads, group=group):
        expected, _ = exact_attention(sample.query, sample.key, sample.value)
        for recipe in recipes:
            output, _ = forward(recipe, quantize(recipe, sample), num_keys)
            comparisons[recipe.name].add(output, expected)
            if progress is not None:
                progress.update()
    return {name: comparison.accuracy() for name, comparison in comparisons.items()}
