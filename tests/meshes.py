"""Programs on meshes: their results, their communication, and whether one device gives the same."""

import contextlib
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jax_fp4attn
from tests.assertions import assert_close, relative_l2
from tests.shapes import COMPILER_OPTIONS

# Before 0.10 XLA:CPU fuses the program of a shard in another way than that of one device, so that a few roundings of P
# fall the other way.
COMPILES_SHARDS_ALIKE = jax.__version_info__ >= (0, 10)

TO_SUMS = "to the order of sums"
TO_ROUNDING = "to the rounding of P"

COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")

Arrays = tuple[jax.Array, ...]


def random_inputs(batch: int, length: int, heads: int, kv_heads: int, head_size: int) -> Arrays:
    """Query, key, value and the output's cotangent, bfloat16."""
    rng = np.random.default_rng(0)
    shapes = [(batch, length, count, head_size) for count in (heads, kv_heads, kv_heads, heads)]
    return tuple(jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in shapes)


def gradients(attend: Callable[..., Any]) -> Callable[..., Any]:
    """A function of query, key, value and cotangent that returns output and all gradients."""

    def run(query: jax.Array, key: jax.Array, value: jax.Array, d_out: jax.Array) -> Any:
        out, vjp = jax.vjp(attend, query, key, value)
        return out, *vjp(d_out)

    return run


def causal(query: jax.Array, key: jax.Array, value: jax.Array, **options: Any) -> jax.Array:
    return jax_fp4attn.attention(query, key, value, is_causal=True, **options)


def one_device(function: Callable[..., Any], *arrays: jax.Array) -> Any:
    """Results of a compiled function on one device."""
    return jax.jit(function, compiler_options=COMPILER_OPTIONS)(*arrays)


def compile_sharded(
    mesh: Mesh, function: Callable[..., Any], arrays: Arrays, specs: tuple[PartitionSpec, ...]
) -> tuple[Callable[[], Any], str]:
    """A function that runs the compiled program on sharded arrays, and the program's text."""
    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)]

    def scope() -> contextlib.AbstractContextManager[Any]:
        return jax.set_mesh(mesh) if AxisType.Explicit in mesh.axis_types else contextlib.nullcontext()

    with scope():
        compiled = jax.jit(function).lower(*placed).compile(COMPILER_OPTIONS)

    def run() -> Any:
        with scope():
            return compiled(*placed)

    return run, compiled.as_text()


def run_sharded(
    mesh: Mesh, function: Callable[..., Any], arrays: Arrays, specs: tuple[PartitionSpec, ...]
) -> tuple[Any, dict[str, int]]:
    """Results, and how many collectives of each kind the compiled program has."""
    run, program = compile_sharded(mesh, function, arrays, specs)
    return run(), count_collectives(program)


def count_collectives(program: str) -> dict[str, int]:
    counts = {name: len(re.findall(rf" {name}(?:-start)?\(", program)) for name in COLLECTIVES}
    return {name: count for name, count in counts.items() if count}


def sent_bytes(program: str) -> int:
    """Bytes that a device sends by collective-permute when the program runs once, loops included."""
    computations = re.finditer(r"^(?:ENTRY )?%?([\w.-]+) \(.*\{$\n((?:.*\n)*?)\}", program, re.M)
    bodies = {match[1]: match[2] for match in computations}
    (entry,) = re.findall(r"^ENTRY %?([\w.-]+)", program, re.M)

    def total(name: str) -> int:
        arrays = re.findall(r"= (\w+)\[([\d,]*)\]\S* collective-permute\(", bodies[name])
        size = sum(_array_bytes(*array) for array in arrays)
        for body, trips in re.findall(r'while\(.*body=%?([\w.-]+).*"known_trip_count":\{"n":"(\d+)"\}', bodies[name]):
            size += int(trips) * total(body)
        for called in re.findall(r" call\(.*to_apply=%?([\w.-]+)", bodies[name]):
            size += total(called)
        return size

    return total(entry)


def _array_bytes(dtype: str, dimensions: str) -> int:
    bits = int(re.sub(r"\D", " ", dtype).split()[0]) if dtype != "pred" else 8
    return bits // 8 * int(np.prod([int(size) for size in dimensions.split(",") if size]))


def assert_equal(actual: Any, expected: Any, *, sums: bool = False) -> str:
    """Bit for bit, unless shards' sums, each rounded to bfloat16, are part of the results.

    Returns:
      How equal the results are, for the table of transforms.
    """
    actual, expected = jax.tree.map(np.asarray, (actual, expected))
    is_exact = all(np.array_equal(x, y) for x, y in zip(actual, expected, strict=True))
    tolerance = 2**-7 if sums else 0.0
    for x, y in zip(actual, expected, strict=True):
        if not sums and not is_exact and not COMPILES_SHARDS_ALIKE:
            assert relative_l2(x, y) < 2e-3
            continue
        size = float(np.abs(np.asarray(y, np.float32)).max())
        assert_close(jnp.asarray(x), jnp.asarray(y), rtol=0, atol=tolerance * size)
    return "yes" if is_exact and not sums else TO_SUMS if sums else TO_ROUNDING


def describe(mesh: Mesh) -> str:
    """The mesh's axes and their types."""
    kinds = {kind.name.lower() for kind in mesh.axis_types}
    return f"{'/'.join(sorted(kinds))} {' × '.join(f'{name}={size}' for name, size in mesh.shape.items())}"
