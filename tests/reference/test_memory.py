"""Memory grows with the length of the sequence, not with its square."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import jax_fp4attn
from jax_fp4attn import recipes
from tests import shapes

ROOT = Path(__file__).parents[2]


def temporary_bytes(queries: int, keys: int, name: str) -> int:
    """Temporary memory of a compiled gradient, and so of the forward too, with two heads of size 64."""

    def loss(q, k, v):
        recipe = recipes.named()[name]
        return jax_fp4attn.attention(q, k, v, is_causal=True, recipe=recipe).astype(jnp.float32).sum()

    q = jax.ShapeDtypeStruct((1, queries, 2, 64), jnp.bfloat16)
    kv = jax.ShapeDtypeStruct((1, keys, 1, 64), jnp.bfloat16)
    lowered = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2))).lower(q, kv, kv)
    return lowered.compile(shapes.COMPILER_OPTIONS).memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("name", ["train", "accurate"])
def test_grows_linearly_with_the_keys_and_stays_below_a_score_matrix(name):
    small, large = (temporary_bytes(32, keys, name) for keys in (4096, 8192))
    assert large < 2.2 * small
    # One float32 matrix of scores of both heads would be 128 MiB; it takes about 37.
    assert temporary_bytes(4096, 4096, name) < 2 * 4096 * 4096 * 4 / 2


_LONG = """
import pathlib, time
import jax, jax.numpy as jnp
import jax_fp4attn

keys = jax.random.split(jax.random.key(0), 3)
q, k, v = (jax.random.normal(key, (1, 32768, 1, 128), jnp.bfloat16) for key in keys)

def loss(q, k, v):
    return (jax_fp4attn.attention(q, k, v, is_causal=True).astype(jnp.float32) ** 2).mean()

start = time.perf_counter()
value, gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(q, k, v)
assert all(bool(jnp.isfinite(g).all()) and bool((g != 0).any()) for g in gradients), "gradients"
assert jnp.isfinite(value)
# Not getrusage, whose maximum includes that of the process which started this one.
status = dict(line.split(":", 1) for line in pathlib.Path("/proc/self/status").read_text().splitlines())
print(f"{time.perf_counter() - start:.0f} s", status["VmHWM"].split()[0])
"""


@pytest.mark.slow
def test_32768_keys_forward_and_backward_take_less_than_six_gigabytes():
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, "-c", _LONG], env=environment, capture_output=True, text=True, timeout=1800)
    assert run.returncode == 0, run.stderr
    print(run.stdout)
    kilobytes = int(run.stdout.split()[-1])
    assert kilobytes < 6 * 2**20
