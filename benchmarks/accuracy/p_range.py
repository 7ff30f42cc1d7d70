"""Section 2: what is left of P in each block format, before any kernel."""

import functools

import jax
import jax.numpy as jnp
from tqdm import tqdm

from benchmarks.accuracy import published
from benchmarks.accuracy.figures import Figure, Section
from benchmarks.accuracy.inputs import SCALE, draw
from benchmarks.accuracy.metrics import compare
from jax_fp4attn.formats import E2M1, E4M3, block_exponent, exp2_int, round_to

_BLOCK = 32
_HEADS, _ROWS = 4, 64
_LENGTHS = (1024, 4096, 8192)
_QUICK_LENGTHS = (1024,)


def _blocks(p: jax.Array) -> tuple[jax.Array, jax.Array]:
    blocks = p.reshape(*p.shape[:-1], -1, _BLOCK)
    return blocks, jnp.max(blocks, axis=-1, keepdims=True)


@functools.partial(jax.jit, static_argnames=("gain",))
def _nvfp4(p: jax.Array, gain: float) -> tuple[jax.Array, jax.Array]:
    """Values with scales E4M3(gain * amax / 6) / gain, and the scales."""
    blocks, largest = _blocks(p)
    encoded = round_to(largest * gain, E4M3, divisor=E2M1.max_value)
    values = round_to(blocks * gain, E2M1, ties="toward_zero", divisor=encoded) * (encoded / gain)
    return values.reshape(p.shape), encoded


@jax.jit
def _mxfp4(p: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Values with power-of-two scales, the better of the two nearest to amax / 6, and the scales."""
    blocks, largest = _blocks(p)
    floor = block_exponent(largest / E2M1.max_value, "floor")

    def candidate(exponent: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        scale = exp2_int(exponent)
        values = round_to(blocks, E2M1, ties="toward_zero", divisor=scale) * scale
        return values, scale, jnp.sum((values - blocks) ** 2, axis=-1, keepdims=True)

    low_values, low_scale, low_error = candidate(floor)
    high_values, high_scale, high_error = candidate(floor + 1)
    takes_high = high_error <= low_error
    values = jnp.where(takes_high, high_values, low_values)
    return values.reshape(p.shape), jnp.where(takes_high, high_scale, low_scale)


def _diagnose(p: jax.Array, value: jax.Array, quantized: jax.Array, scales: jax.Array) -> published.PRange:
    lost = quantized == 0
    total = jnp.sum(quantized, axis=-1, keepdims=True)
    renormalized = quantized / jnp.where(total == 0, 1.0, total)
    product = compare(renormalized @ value, p @ value)
    return published.PRange(
        zero_scales=float(jnp.mean(scales == 0)),
        zero_payloads=float(jnp.mean(lost)),
        lost_mass=float(jnp.mean(jnp.sum(jnp.where(lost, p, 0.0), axis=-1))),
        p_rel_l2=compare(renormalized, p).rel_l2,
        pv_cosine=product.cosine,
        pv_rel_l2=product.rel_l2,
    )


def _measure(quick: bool) -> list[Figure]:
    figures = []
    for num_keys in tqdm(_QUICK_LENGTHS if quick else _LENGTHS, desc="p_range"):
        sample = draw(num_keys, rows=_ROWS, heads=_HEADS, kv_heads=_HEADS)
        query, key, value = (
            jnp.swapaxes(x.astype(jnp.float32), 1, 2) for x in (sample.query, sample.key, sample.value)
        )
        p = jax.nn.softmax(SCALE * query @ jnp.swapaxes(key, 2, 3), axis=-1)
        formats = {"NV G=1": _nvfp4(p, 1.0), "NV G=448": _nvfp4(p, 448.0), "MX": _mxfp4(p)}
        for name, (quantized, scales) in formats.items():
            ours, theirs = _diagnose(p, value, quantized, scales), published.P_RANGE[name, num_keys]
            case = f"{name}, S={num_keys}"
            figures += [Figure(case, field, getattr(ours, field), x) for field, x in vars(theirs).items()]
    return figures


SECTION = Section(
    name="p_range",
    title="Range of P in block formats",
    note=(
        "Exact softmax probabilities (4 heads, 64 rows) in blocks of 32 keys, midpoints to the smaller magnitude. NV: "
        "scale E4M3(G amax / 6) / G. MX: the better of the two powers of two around amax / 6 as the unit of codes. The "
        "result is divided by its own row sum; P V takes V unrounded. With G=1 nearly all blocks of a long row vanish, "
        "so the errors of what remains depend on a few rows of one draw."
    ),
    measure=_measure,
)
