"""How often the forward runs under rematerialisation, counted in the jaxpr of the gradient."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fp4attn
from jax_fp4attn import checkpoint_policies
from jax_fp4attn.checkpoint_policies import save_attention, save_attention_and_operands

X = jnp.asarray(np.random.default_rng(0).standard_normal((1, 8, 2, 64)), jnp.bfloat16)


def block(x: jax.Array) -> jax.Array:
    """Attention between two matrix products, as in a model; the second needs attention's output for its gradient."""
    y = jax_fp4attn.attention(x * 2, x, x, is_causal=True)
    return jnp.tanh(y @ jnp.ones((64, 64), x.dtype))


def loss(function: Any) -> Any:
    return lambda x: function(x).astype(jnp.float32).sum()


def count(jaxpr: Any, matches: Callable[[Any], bool], repeats: int = 1) -> int:
    """How often matching equations run in a jaxpr; the body of a scan counts as often as it runs."""
    total = 0
    for equation in jaxpr.eqns:
        total += repeats * matches(equation)
        inner = repeats * (equation.params["length"] if equation.primitive.name == "scan" else 1)
        for value in equation.params.values():
            for item in value if isinstance(value, tuple | list) else (value,):
                item = getattr(item, "jaxpr", item)
                if hasattr(item, "eqns"):
                    total += count(item, matches, inner)
    return total


def is_forward(equation: Any) -> bool:
    """The forward's walk over the key tiles ends with output [B, K, G, T, H], denominator and maximum [B, K, G, T]."""
    return equation.primitive.name == "scan" and [v.aval.ndim for v in equation.outvars] == [5, 4, 4]


def is_floor(equation: Any) -> bool:
    """Every rounding takes a `floor`."""
    return equation.primitive.name == "floor"


def count_in_gradient(function: Any, matches: Callable[[Any], bool] = is_forward) -> int:
    return count(jax.make_jaxpr(jax.grad(loss(function)))(X).jaxpr, matches)


def test_without_rematerialisation_the_forward_runs_once():
    assert count_in_gradient(block) == 1


def test_rematerialisation_without_a_policy_runs_the_forward_twice():
    assert count_in_gradient(jax.checkpoint(block)) == 2


@pytest.mark.parametrize(
    "policy",
    [
        save_attention,
        save_attention_and_operands,
        jax.checkpoint_policies.save_from_both_policies(jax.checkpoint_policies.dots_saveable, save_attention),
        jax.checkpoint_policies.save_only_these_names(checkpoint_policies.OUTPUT_NAME, checkpoint_policies.LSE_NAME),
        jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[checkpoint_policies.LSE_NAME],
            names_which_can_be_offloaded=[checkpoint_policies.OUTPUT_NAME],
            offload_src="device",
            offload_dst="pinned_host",
        ),
    ],
    ids=["save_attention", "with_operands", "with_dots", "by_name", "offload"],
)
def test_policies_that_keep_output_and_lse_run_the_forward_once(policy):
    assert count_in_gradient(jax.checkpoint(block, policy=policy)) == 1


@pytest.mark.parametrize("missing", [checkpoint_policies.OUTPUT_NAME, checkpoint_policies.LSE_NAME])
def test_both_names_are_needed(missing):
    names = {checkpoint_policies.OUTPUT_NAME, checkpoint_policies.LSE_NAME} - {missing}
    policy = jax.checkpoint_policies.save_only_these_names(*names)
    assert count_in_gradient(jax.checkpoint(block, policy=policy)) == 2


def test_saving_the_operands_runs_the_quantisers_once():
    once = count_in_gradient(block, is_floor)
    assert count_in_gradient(jax.checkpoint(block, policy=save_attention_and_operands), is_floor) == once
    assert count_in_gradient(jax.checkpoint(block, policy=save_attention), is_floor) > once


def test_scanned_layers_run_the_forward_once_each():
    def layers(function: Any) -> Any:
        return lambda x: jax.lax.scan(lambda carry, _: (function(carry), None), x, None, length=3)[0]

    assert count_in_gradient(layers(jax.checkpoint(block, policy=save_attention))) == 3
    assert count_in_gradient(layers(jax.checkpoint(block))) == 2 * 3


@pytest.mark.parametrize("policy", [None, save_attention, save_attention_and_operands])
def test_the_gradient_is_the_same(policy):
    plain = jax.jit(jax.grad(loss(block)))(X)
    again = jax.jit(jax.grad(loss(jax.checkpoint(block, policy=policy))))(X)
    # XLA may fuse what surrounds attention otherwise.
    np.testing.assert_allclose(np.float32(again), np.float32(plain), rtol=2**-7, atol=2**-7)
