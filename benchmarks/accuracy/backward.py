"""Section 6: gradients against a float64 oracle on the same operands, and against exact gradients."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike, NDArray
from tqdm import tqdm

from benchmarks.accuracy import published
from benchmarks.accuracy.figures import AtLeast, AtMost, Figure, Section
from benchmarks.accuracy.forward import quantize, represented
from benchmarks.accuracy.inputs import HEAD_SIZE, SCALE, Sample, draw, gaussian
from benchmarks.accuracy.metrics import compare
from jax_fp4attn import Recipe, attention, recipes
from jax_fp4attn.formats import E4M3, E5M2, block_exponent, exp2_int, round_to

_GROUP, _KV_HEADS = 4, 2
_LENGTHS = {"train": (256, 1024), "train_unit_gradient_scale": (1024,)}
_QUICK_LENGTH = 128
_LOSS_SCALE = 65536


@dataclasses.dataclass(frozen=True)
class _Case:
    recipe: Recipe
    std: float  # of dO
    loss_scale: float = 1.0

    def __str__(self) -> str:
        scaled = "" if self.loss_scale == 1 else f" x loss scale {self.loss_scale:g}"
        return f"{self.recipe.name}, dO std {self.std:g}{scaled}"


_CASES = (
    _Case(recipes.train, 1.0),
    _Case(recipes.train, 1e-3),
    _Case(recipes.train, 1e-6),
    _Case(recipes.train_unit_gradient_scale, 1.0),
    _Case(recipes.train_unit_gradient_scale, 1e-3),
    _Case(recipes.train_unit_gradient_scale, 1e-6),
    _Case(recipes.train_unit_gradient_scale, 1e-6, _LOSS_SCALE),
)

_Array = NDArray[np.float64]


@functools.partial(jax.jit, static_argnames=("recipe",))
def _gradients(recipe: Recipe, sample: Sample, d_output: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    # In float32, so that the cotangent and the results are not rounded once more on the way.
    inputs = (x.astype(jnp.float32) for x in (sample.query, sample.key, sample.value))
    call = functools.partial(attention, recipe=recipe, is_causal=True)
    _, pull_back = jax.vjp(call, *inputs)
    return pull_back(d_output)


def head_major(x: ArrayLike) -> _Array:
    """[1, T, N, H] to float64 [N, T, H]."""
    return np.swapaxes(np.asarray(x)[0].astype(np.float64), 0, 1)


def exact_gradients(
    score_query: _Array, score_key: _Array, query: _Array, key: _Array, value: _Array, d_output: _Array
) -> tuple[_Array, _Array, _Array]:
    """Gradients of causal attention in float64, with P from one pair of queries and keys and products with another."""
    num_queries = query.shape[1]
    visible = np.tril(np.ones((num_queries, num_queries), bool))
    d_query, d_key, d_value = np.zeros_like(query), np.zeros_like(key), np.zeros_like(value)
    for head in range(query.shape[0]):
        kv = head // _GROUP
        scores = np.where(visible, SCALE * score_query[head] @ score_key[kv].T, -np.inf)
        p = np.exp(scores - scores.max(axis=-1, keepdims=True))
        p /= p.sum(axis=-1, keepdims=True)
        d_p = d_output[head] @ value[kv].T
        d_scores = p * (d_p - (p * d_p).sum(axis=-1, keepdims=True))
        d_query[head] = SCALE * d_scores @ key[kv]
        d_key[kv] += SCALE * d_scores.T @ query[head]
        d_value[kv] += p.T @ d_output[head]
    return d_query, d_key, d_value


@functools.partial(jax.jit, static_argnames=("recipe",))
def _round_inputs(recipe: Recipe, sample: Sample) -> Sample:
    """E4M3 values of the inputs, as the products of the backward read them."""
    multiplier = recipe.backward_multiplier
    return jax.tree.map(lambda x: round_to(x.astype(jnp.float32) * multiplier, E4M3) / multiplier, sample)


@functools.partial(jax.jit, static_argnames=("recipe",))
def _round_d_output(recipe: Recipe, d_output: jax.Array) -> jax.Array:
    """E5M2 values of dO, which is multiplied by one power of two for each key/value head if the recipe says so."""
    grouped = d_output.astype(jnp.float32).reshape(*d_output.shape[:2], _KV_HEADS, _GROUP, HEAD_SIZE)
    gain = jnp.float32(recipe.backward_multiplier)
    if recipe.output_gradient_scale == "amax":
        largest = jnp.max(jnp.abs(grouped), axis=(1, 3, 4), keepdims=True)
        gain = gain * exp2_int(-block_exponent(largest, "floor"))
    return (round_to(grouped * gain, E5M2) / gain).reshape(d_output.shape)


def _measure_case(case: _Case, num_keys: int) -> list[Figure]:
    recipe = case.recipe
    sample = draw(num_keys, rows=num_keys, heads=_GROUP * _KV_HEADS, kv_heads=_KV_HEADS)
    d_output = gaussian(sample.query.shape, num_keys, 0, 3, std=case.std * case.loss_scale)
    ours = [head_major(x) for x in _gradients(recipe, sample, d_output.astype(jnp.float32))]
    scores = represented(recipe, quantize(recipe, sample), num_keys)
    rounded = _round_inputs(recipe, sample)
    oracle = exact_gradients(
        head_major(scores.query),
        head_major(scores.key),
        head_major(rounded.query),
        head_major(rounded.key),
        head_major(rounded.value),
        head_major(_round_d_output(recipe, d_output)),
    )
    query, key, value = (head_major(x) for x in (sample.query, sample.key, sample.value))
    unquantized = exact_gradients(query, key, query, key, value, head_major(d_output))

    figures = []
    is_required = recipe == recipes.train
    for i, field in enumerate(("query", "key", "value")):
        name, against_oracle = f"d{field[0].upper()}", compare(ours[i], oracle[i])
        bound, layer_12 = getattr(published.REQUIRED_BACKWARD, field), getattr(published.BACKWARD[12], field)
        label = f"{case}, S={num_keys}"
        figures += [
            Figure(
                label,
                f"{name} rel-L2, same operands",
                against_oracle.rel_l2,
                layer_12 if case.std == 1 else None,
                AtMost(bound) if is_required else None,
            ),
            Figure(label, f"{name} cosine, same operands", against_oracle.cosine),
            Figure(
                label,
                f"{name} cosine, exact gradients",
                compare(ours[i], unquantized[i]).cosine,
                None,
                AtLeast(published.REQUIRED_BACKWARD_COSINE) if is_required else None,
            ),
        ]
    return figures


def _measure(quick: bool) -> list[Figure]:
    pairs = [(case, num_keys) for case in _CASES for num_keys in _LENGTHS[case.recipe.name]]
    if quick:
        pairs = [(_CASES[0], _QUICK_LENGTH)]
    return [figure for case, num_keys in tqdm(pairs, desc="backward") for figure in _measure_case(case, num_keys)]


SECTION = Section(
    name="backward",
    title="FP8 backward, causal",
    note=(
        "8 query and 2 key/value heads, Gaussian inputs and dO. Same operands: a float64 straight-through backward on "
        "the values that the FP8 backward reads (P from the NVFP4 scores, Q, K and V in E4M3, dO in E5M2). Exact "
        "gradients: float64 without any quantisation. Published: layer 12 of a language model, whose activations are "
        "not Gaussian (layers 10 and 22: dQ .0676 and .0774, dK .0290 and .0263, dV .0152 and .0399). "
        "train_unit_gradient_scale takes dO as it comes: dS falls below E4M3's range before dO leaves E5M2's, so small "
        "gradients need a loss scale. Cosine 0 and rel-L2 1 stand for gradients that are zero throughout."
    ),
    measure=_measure,
)
