"""Native calls on more than one device: where they run, whether devices agree, whether they end up in CUDA graphs."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jax_fp4attn
from jax_fp4attn import recipes
from jax_fp4attn.native import library

SHAPE = (2, 512, 8, 128)
KV_HEADS = 2
RUNS = 20
CALLS = 4
EXACT = dataclasses.replace(recipes.train, dq_accumulation="float32_ordered")
"""The training recipe with sums of a fixed order, so that devices can be compared bit by bit."""


@dataclasses.dataclass(frozen=True)
class Check:
    """Outcome of a check.

    Attributes:
      name: What is checked.
      passed: Whether it holds; None where it does not apply.
      found: In words.
    """

    name: str
    passed: bool | None
    found: str


def run() -> list[Check]:
    """Runs all checks on the first two devices."""
    devices = jax.devices()[:2]
    inputs = _inputs()
    results = [_gradients(jax.device_put(inputs, device)) for device in devices]
    mesh = Mesh(np.array(devices), ("data",), axis_types=(AxisType.Auto,))
    split = jax.device_put(inputs, NamedSharding(mesh, PartitionSpec("data")))
    return [
        *(
            Check(
                f"arrays on device {i} give results on device {i}",
                all(x.devices() == {device} for x in result),
                ", ".join(sorted({str(x) for array in result for x in array.devices()})),
            )
            for i, (device, result) in enumerate(zip(devices, results, strict=True))
        ),
        _equal("device 1 gives the bits of device 0", results[1], results[0]),
        _equal("one program over both devices gives the bits of device 0", _gradients(split), results[0]),
        *(
            _captured(f"calls on device {i} are captured in a CUDA graph", jax.device_put(inputs, device))
            for i, device in enumerate(devices)
        ),
        _captured("calls of one program over both devices are captured in CUDA graphs", split),
    ]


def _inputs() -> tuple[jax.Array, ...]:
    batch, length, heads, head_size = SHAPE
    rng = np.random.default_rng(0)
    shapes = [(batch, length, count, head_size) for count in (heads, KV_HEADS, KV_HEADS, heads)]
    return tuple(jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in shapes)


@jax.jit
def _gradients(inputs: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> Any:
        return jax_fp4attn.attention(query, key, value, is_causal=True, recipe=EXACT)

    output, pull_back = jax.vjp(attend, *inputs[:3])
    return output, *pull_back(inputs[3])


@jax.jit
def _many(inputs: tuple[jax.Array, ...]) -> list[Any]:
    return [_gradients((inputs[0] * 2.0**-i, *inputs[1:])) for i in range(CALLS)]


def _equal(name: str, actual: Any, expected: Any) -> Check:
    pairs = [(np.asarray(x), np.asarray(y)) for x, y in zip(actual, expected, strict=True)]
    differing = sum(int((x.view(np.uint16) != y.view(np.uint16)).sum()) for x, y in pairs)
    return Check(name, differing == 0, f"{differing} of {sum(x.size for x, _ in pairs)} numbers differ")


def _captured(name: str, inputs: tuple[jax.Array, ...]) -> Check:
    count = _handler_calls()
    if count is None:
        return Check(name, None, "no native calls here")
    jax.block_until_ready(_many(inputs))
    jax.block_until_ready(_many(inputs))
    before = count()
    for _ in range(RUNS):
        results = _many(inputs)
    jax.block_until_ready(results)
    made = count() - before
    # Of each call at least quantiser, forward, row operands and backward would be made on the host.
    expected = RUNS * CALLS * 4 * len(inputs[0].devices())
    return Check(
        name, made < expected / 4, f"{made} calls on the host in {RUNS} runs; at least {expected} without graphs"
    )


def _handler_calls() -> Callable[[], int] | None:
    loaded = library.load()
    if isinstance(loaded, str) or jax_fp4attn.native.why_unavailable() is not None:
        return None
    count: Callable[[], int] = loaded.handle.jax_fp4attn_handler_calls
    return count
