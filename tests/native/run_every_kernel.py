"""Runs every kernel once on small arrays, for tools that watch a process.

Usage: python -m tests.native.run_every_kernel
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jax_fp4attn import SegmentIds, recipes, steps
from jax_fp4attn.config import OperatorConfig, Visibility

BATCH, QUERIES, KEYS, HEADS, KV_HEADS = 2, 130, 200, 2, 1


def main() -> None:
    visibility = Visibility(
        query_lengths=jnp.array([130, 7]),
        key_lengths=jnp.array([200, 131]),
        segment_ids=SegmentIds(jnp.ones((BATCH, QUERIES), jnp.int32), jnp.ones((BATCH, KEYS), jnp.int32)),
    )
    for head_size in (64, 128):
        rng = np.random.default_rng(0)
        query, key, value = (
            jnp.asarray(rng.standard_normal((BATCH, *shape, head_size)), jnp.bfloat16)
            for shape in ((QUERIES, HEADS), (KEYS, KV_HEADS), (KEYS, KV_HEADS))
        )
        guarded = recipes.guarded(10, 16)  # which has a kernel on Blackwell alone
        for recipe in (recipes.train, recipes.square, recipes.accurate, recipes.fast, recipes.exact_map, guarded):
            config = OperatorConfig(recipe, 0.1, is_causal=False, window=None, implementation="cuda or reference")
            arguments = (query, key, value, visibility)
            for step in (steps.quantize, steps.quantize_for_training):
                operands = jax.block_until_ready(jax.jit(lambda *x, s=step, c=config: s(c, *x))(*arguments))
            forward = functools.partial(steps.forward, config, num_keys=KEYS, head_size=head_size)
            jax.block_until_ready(jax.jit(lambda *x, f=forward: f(x[0], None, x[1]))(operands.forward, visibility))
        config = OperatorConfig(recipes.train, 0.1, is_causal=False, window=None, implementation="cuda or reference")
        lse = jnp.zeros((BATCH, HEADS, QUERIES))
        rows = jax.jit(lambda *x, c=config: steps.row_operands(c, *x))
        scale = jnp.ones((BATCH, KV_HEADS))
        row_operands = jax.block_until_ready(rows(query, lse, query, lse, scale))
        for accumulation in ("float32", "float32_ordered"):
            recipe = dataclasses.replace(recipes.train, dq_accumulation=accumulation)
            config = OperatorConfig(recipe, 0.1, is_causal=False, window=None, implementation="cuda or reference")
            backward = functools.partial(steps.backward, config, num_keys=KEYS, head_size=head_size)
            saved = (operands.for_backward(), row_operands, lse, scale)
            jax.block_until_ready(jax.jit(lambda *x, f=backward: f(*x[:4], None, x[4]))(*saved, visibility))
    print("every kernel ran")


if __name__ == "__main__":
    main()
