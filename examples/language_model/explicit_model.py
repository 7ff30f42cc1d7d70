"""The language model as functions of its parameters, for a mesh whose axes are explicit.

On such a mesh the sharding of every array is part of its type, and JAX asks where it cannot follow from the operands'.
Three places have to say it: parameters are gathered before use, a product that contracts a split dimension names the
sharding of its result, and so does a look-up in a table. The comments give the types, with ``@`` for "split over".

Parameters are those of :class:`~examples.language_model.model.LanguageModel`, as nested dictionaries.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec, reshard

import jax_fp4attn
from examples.language_model.meshes import DATA, MODEL
from examples.language_model.sharding import computing_spec
from jax_fp4attn import Recipe
from jax_fp4attn.flax import apply_rotary

Parameters = Mapping[Any, Any]

BATCH = PartitionSpec(DATA)
EPSILON = 1e-6  # Of nnx.RMSNorm.


def mean_loss(parameters: Parameters, windows: jax.Array, recipe: Recipe) -> jax.Array:
    """Cross-entropy in nats a byte: each byte is predicted from those before it.

    Args:
      parameters: Of the model.
      windows: int [B@data, T + 1].
      recipe: Of attention.

    Returns:
      float32 [].
    """
    logits = predict(parameters, windows[:, :-1], recipe)
    # Scores stay where they are, split over the vocabulary; only their sums and the target's score travel.
    vocabulary = jnp.arange(logits.shape[-1], out_sharding=PartitionSpec(MODEL))
    is_target = windows[:, 1:, None] == vocabulary  # [B@data, T, vocabulary@model]
    target = jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1)
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - target)


def predict(parameters: Parameters, tokens: jax.Array, recipe: Recipe) -> jax.Array:
    """Computes logits.

    Args:
      parameters: Of the model.
      tokens: int [B@data, T].
      recipe: Of attention.

    Returns:
      float32 [B@data, T, vocabulary@model].
    """
    table = reshard(parameters["embedding"]["embedding"], PartitionSpec())
    x = table.at[tokens].get(out_sharding=BATCH)  # [B@data, T, width]
    for block in parameters["blocks"].values():
        x = x + _attention(block["attention"], _norm(block["attention_norm"], x), recipe)
        x = x + _feed_forward(block["mlp"], _norm(block["mlp_norm"], x))
    return _norm(parameters["norm"], x) @ _gather(parameters["head"]["kernel"])


def _gather(parameter: jax.Array) -> jax.Array:
    """Gathers a parameter along the data axis, just before use; its gradient is summed and split again."""
    return reshard(parameter, computing_spec(jax.typeof(parameter).sharding.spec))


def _norm(parameters: Parameters, x: jax.Array) -> jax.Array:
    return x * (jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + EPSILON) * parameters["scale"])


def _attention(parameters: Parameters, x: jax.Array, recipe: Recipe) -> jax.Array:
    # bfloat16 before the gather, so that half as many bytes travel.
    kernels = {name: _gather(layer["kernel"].astype(jnp.bfloat16)) for name, layer in parameters.items()}
    # [B@data, T, heads@model, head size]; key and value heads are whole where the shards outnumber them.
    query, key, value = (
        jnp.einsum("btw,wnh->btnh", x.astype(jnp.bfloat16), kernels[name]) for name in ("query", "key", "value")
    )
    heads = jax_fp4attn.attention(apply_rotary(query), apply_rotary(key), value, is_causal=True, recipe=recipe)
    return jnp.einsum("btnh,nhw->btw", heads, kernels["out"], out_sharding=BATCH)


def _feed_forward(parameters: Parameters, x: jax.Array) -> jax.Array:
    gate, up, down = (_gather(parameters[name]["kernel"]) for name in ("gate", "up", "down"))
    hidden = jax.nn.silu(x @ gate) * (x @ up)  # [B@data, T, hidden@model]
    return jnp.einsum("btf,fw->btw", hidden, down, out_sharding=BATCH)
