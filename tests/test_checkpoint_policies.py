"""How often the forward runs under rematerialisation, counted in the jaxpr of the gradient and while it runs."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import jax_fp4attn
from jax_fp4attn import recipes, reference
from jax_fp4attn.checkpoint_policies import (
    LSE_NAME,
    OPERANDS_NAME,
    OUTPUT_NAME,
    offload_attention,
    save_attention,
    save_attention_and_operands,
)
from tests.assertions import relative_l2
from tests.shapes import COMPILER_OPTIONS

X = jnp.asarray(np.random.default_rng(0).standard_normal((1, 8, 2, 64)), jnp.bfloat16)
LAYERS = 3


def offload(*names: str) -> Any:
    """A policy that offloads some of our values and saves the others."""
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=sorted({OUTPUT_NAME, LSE_NAME, OPERANDS_NAME} - {*names}),
        names_which_can_be_offloaded=list(names),
        offload_src="device",
        offload_dst="pinned_host",
    )


SAVE_BOTH = jax.checkpoint_policies.save_from_both_policies(jax.checkpoint_policies.dots_saveable, save_attention)

# Each with how often it runs the forward of one layer.
POLICIES: dict[str, tuple[Any, int]] = {
    "no_policy": (None, 2),
    "dots_saveable": (jax.checkpoint_policies.dots_saveable, 2),
    "save_attention": (save_attention, 1),
    "save_attention_and_operands": (save_attention_and_operands, 1),
    "dots_and_attention": (SAVE_BOTH, 1),
    "by_name": (jax.checkpoint_policies.save_only_these_names(OUTPUT_NAME, LSE_NAME), 1),
    "offload_attention": (offload_attention, 1),
    "offload_everything": (offload(OUTPUT_NAME, LSE_NAME, OPERANDS_NAME), 1),
}


def block(x: jax.Array, **options: Any) -> jax.Array:
    """Attention between two matrix products, as in a model; the second needs attention's output for its gradient."""
    y = jax_fp4attn.attention(x * 2, x, x, is_causal=True, **options)
    return jnp.tanh(y @ jnp.ones((64, 64), x.dtype))


def loss(function: Any) -> Any:
    return lambda x: function(x).astype(jnp.float32).sum()


def layers(function: Any) -> Any:
    return lambda x: jax.lax.scan(lambda carry, _: (function(carry), None), x, None, length=LAYERS)[0]


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


@pytest.mark.parametrize("name", POLICIES)
def test_policies_that_keep_output_and_lse_run_the_forward_once(name):
    policy, runs = POLICIES[name]
    remat = jax.checkpoint(block, policy=policy)
    assert count_in_gradient(remat) == runs
    assert count_in_gradient(layers(remat)) == LAYERS * runs


@pytest.mark.parametrize("missing", [OUTPUT_NAME, LSE_NAME])
def test_both_names_are_needed(missing):
    names = {OUTPUT_NAME, LSE_NAME} - {missing}
    policy = jax.checkpoint_policies.save_only_these_names(*names)
    assert count_in_gradient(jax.checkpoint(block, policy=policy)) == 2


def test_a_name_that_the_caller_gives_does_not_save_the_forward():
    def named(x: jax.Array) -> jax.Array:
        return jnp.tanh(checkpoint_name(block(x), "mine"))

    policy = jax.checkpoint_policies.save_only_these_names("mine")
    assert count_in_gradient(jax.checkpoint(named, policy=policy)) == 2


def test_saving_the_operands_runs_the_quantisers_once():
    once = count_in_gradient(block, is_floor)
    for policy in (save_attention_and_operands, offload(OUTPUT_NAME, LSE_NAME, OPERANDS_NAME)):
        assert count_in_gradient(jax.checkpoint(block, policy=policy), is_floor) == once
    assert count_in_gradient(jax.checkpoint(block, policy=save_attention), is_floor) > once


@pytest.fixture(name="runs")
def _runs(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Grows whenever the forward runs. JAX keeps traces, so a test that counts needs a scale of its own."""
    runs: list[None] = []
    forward = reference.forward

    def note(*results: np.ndarray) -> tuple[np.ndarray, ...]:
        runs.append(None)
        return results

    def counted(*args: Any, **kwargs: Any) -> Any:
        results = forward(*args, **kwargs)
        return jax.pure_callback(note, tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results), *results)

    monkeypatch.setattr(reference, "forward", counted)
    return runs


def test_scanned_layers_run_the_forward_as_often_as_the_policy_says_and_have_the_same_gradient(runs):
    def run(function: Any) -> tuple[np.ndarray, int]:
        runs.clear()
        gradient = jax.jit(jax.grad(loss(layers(function))), compiler_options=COMPILER_OPTIONS)(X)
        return np.float32(gradient), len(runs)

    def counted(x: jax.Array) -> jax.Array:
        return block(x, recipe=recipes.bf16, scale=0.3)

    plain, once = run(counted)
    assert once == LAYERS
    for name, (policy, repeats) in POLICIES.items():
        gradient, actual = run(jax.checkpoint(counted, policy=policy))
        assert actual == LAYERS * repeats, name
        # XLA may fuse what surrounds attention otherwise.
        assert relative_l2(gradient, plain) < 2**-7, name


@pytest.mark.parametrize("name", ["no_policy", "save_attention", "save_attention_and_operands", "offload_everything"])
def test_the_gradient_is_the_same(name):
    plain = jax.jit(jax.grad(loss(block)))(X)
    again = jax.jit(jax.grad(loss(jax.checkpoint(block, policy=POLICIES[name][0]))))(X)
    np.testing.assert_allclose(np.float32(again), np.float32(plain), rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize(("policy", "moved"), [(offload_attention, 1), (offload(OUTPUT_NAME, LSE_NAME), 2)])
def test_offloaded_values_go_to_the_host_and_back(policy, moved):
    # On a CPU, whose memory is the host's, JAX leaves the annotations out; a GPU's program can be looked at anywhere.
    gradient = jax.jit(jax.grad(loss(layers(jax.checkpoint(block, policy=policy)))))
    program = gradient.trace(X).lower(lowering_platforms=("cuda",)).as_text()
    places = re.findall(r'_xla_buffer_placement = "(\w+)"', program)
    assert sorted(places) == ["device"] * moved + ["pinned_host"] * moved


@pytest.mark.gpu
def test_offloaded_values_leave_the_device():
    x = jnp.tile(X, (1, 128, 1, 1))
    remat = jax.checkpoint(block, policy=offload_attention)
    compiled = jax.jit(jax.grad(loss(layers(remat)))).lower(x).compile()
    assert compiled.memory_analysis().host_temp_size_in_bytes >= LAYERS * x.nbytes
    plain = jax.jit(jax.grad(loss(layers(jax.checkpoint(block, policy=save_attention)))))(x)
    assert relative_l2(np.float32(compiled(x)), np.float32(plain)) < 2**-7
