"""Sharded calls on two real GPUs, with what NCCL carries between them, give what one GPU gives."""

import contextlib

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_fp4attn import recipes
from tests.assertions import relative_l2
from tests.meshes import causal, count_collectives, gradients, random_inputs

pytestmark = pytest.mark.gpu

SEQUENCE = P(None, "x")
# A ring's steps have no kernels yet, and kernels of whole sequences sum in another order.
REFERENCE, RING = {"implementation": "reference"}, {"context_axis": "x", "implementation": None}
# name: (query spec, key/value spec, key/value heads, options, options on the mesh, largest relative L2 of all results)
CASES = {
    "batch": (P("x"), P("x"), 2, {}, {}, 3e-5),
    "heads": (P(None, None, "x"), P(None, None, "x"), 2, {}, {}, 3e-5),
    "multi-query": (P(None, None, "x"), P(), 1, {}, {}, 2**-8),
    "ring, shiftless": (SEQUENCE, SEQUENCE, 2, {"recipe": recipes.square, **REFERENCE}, RING, 6e-5),
    "ring, running maximum": (SEQUENCE, SEQUENCE, 2, REFERENCE, RING, 0.02),
}


@pytest.fixture(name="gpus")
def _gpus() -> list[jax.Device]:
    devices = jax.devices("cuda")
    if len(devices) < 2:
        pytest.skip(f"needs two CUDA devices, found {len(devices)}")
    return devices[:2]


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("case", CASES)
def test_gradient_program_equals_one_gpu(case, kind, gpus):
    query_spec, kv_spec, kv_heads, options, mesh_options, tolerance = CASES[case]
    arrays = random_inputs(2, 512, 4, kv_heads, 64)
    expected = jax.jit(gradients(lambda *x: causal(*x, **options)))(*(jax.device_put(x, gpus[0]) for x in arrays))
    mesh = Mesh(np.array(gpus), ("x",), axis_types=(kind,))
    specs = (query_spec, kv_spec, kv_spec, query_spec)
    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)]
    with jax.set_mesh(mesh) if kind == AxisType.Explicit else contextlib.nullcontext():
        compiled = jax.jit(gradients(lambda *x: causal(*x, **options | mesh_options))).lower(*placed).compile()
        actual = compiled(*placed)
    assert "all-gather" not in count_collectives(compiled.as_text())
    for x, y in zip(actual, expected, strict=True):
        x, y = (np.asarray(z, np.float32) for z in (x, y))
        assert np.isfinite(x).all()
        assert relative_l2(x, y) < tolerance


@pytest.mark.parametrize("index", [0, 1])
def test_a_call_stays_on_the_gpu_of_its_arrays(index, gpus):
    arrays = [jax.device_put(x, gpus[index]) for x in random_inputs(1, 40, 2, 1, 64)]
    results = jax.jit(gradients(causal))(*arrays)
    assert all(x.devices() == {gpus[index]} for x in results)
    assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in results)
