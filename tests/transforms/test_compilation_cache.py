"""The persistent compilation cache, met by a second process: which ways of running an operation find their programs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

_PROGRAM = """
import functools, json, sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
import jax_fp4attn
from jax_fp4attn import recipes
from tests.shapes import COMPILER_OPTIONS

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
events = []
jax.monitoring.register_event_listener(lambda event, **_: events.append(event))

automatic, explicit = (
    Mesh(np.array(jax.devices()), ("data",), axis_types=(kind,)) for kind in (AxisType.Auto, AxisType.Explicit)
)
x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 8, 2, 16)), jnp.bfloat16)

def call(x, scale=0.5):
    return jax_fp4attn.attention(x, x, x, scale=scale, is_causal=True, recipe=recipes.bf16)

def run(function, x):
    lowered = jax.jit(lambda x: function(x)).lower(x)  # A new function, which this process has not compiled.
    events.clear()
    result = lowered.compile(COMPILER_OPTIONS)(x)
    hits, misses = (events.count("/jax/compilation_cache/cache_" + kind) for kind in ("hits", "misses"))
    assert hits + misses == 1
    return {"hit": hits == 1, "checksum": float(jnp.abs(result.astype(jnp.float32)).sum())}

on_automatic, on_explicit = (jax.device_put(x, NamedSharding(mesh, P("data"))) for mesh in (automatic, explicit))
results = {"one device": run(call, x)}
results["manual"] = run(jax.shard_map(call, mesh=automatic, in_specs=P("data"), out_specs=P("data")), on_automatic)
with jax.set_mesh(explicit):
    results["explicit"] = run(call, on_explicit)
results["automatic"] = run(call, on_automatic)
jax.config.update("jax_remove_custom_partitioning_ptr_from_cache_key", True)
results["automatic, without pointers"] = run(call, on_automatic)
results["automatic, another scale"] = run(functools.partial(call, scale=0.25), on_automatic)
results["one device, another scale"] = run(functools.partial(call, scale=0.25), x)
print(json.dumps(results))
"""


@pytest.fixture(scope="module", name="processes")
def _processes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, float]]]:
    """What two processes, one after the other, saw of one cache."""
    cache = tmp_path_factory.mktemp("cache")
    environment = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, sys.path)])

    def run() -> dict[str, dict[str, float]]:
        command = [sys.executable, "-c", _PROGRAM, str(cache)]
        process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
        assert process.returncode == 0, process.stderr
        results: dict[str, dict[str, float]] = json.loads(process.stdout)
        return results

    return [run(), run()]


def test_a_second_process_finds_the_program(processes):
    first, second = processes
    for name in ("one device", "manual", "explicit", "automatic, without pointers"):
        assert not first[name]["hit"], name
        assert second[name]["hit"], name
        assert second[name]["checksum"] == first["one device"]["checksum"], name
    # The program of an automatic mesh holds a pointer to Python's callback.
    assert [process["automatic"]["hit"] for process in processes] == [False, False]


def test_calls_that_differ_only_in_static_arguments_do_not_share_a_program(processes):
    first, second = processes
    assert not first["automatic, another scale"]["hit"]
    assert second["automatic, another scale"]["hit"]
    for process in processes:
        assert process["automatic, another scale"]["checksum"] == first["one device, another scale"]["checksum"]
