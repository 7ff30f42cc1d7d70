import jax
import jax.numpy as jnp
import pytest
from jax import export

import jax_fp4attn
from tests import meshes
from tests.meshes import gradients, one_device

pytestmark = pytest.mark.usefixtures("every_step_has_a_kernel")


def attend(*operands):
    return jax_fp4attn.attention(*operands, is_causal=True)


@pytest.fixture(scope="module")
def arrays():
    return meshes.random_inputs(2, 40, 4, 2, 64)


@pytest.fixture(scope="module")
def exported(arrays, every_step_has_a_kernel):
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
    run = jax.jit(gradients(attend))
    with jax_fp4attn.cross_compile((10, 0)):
        return export.export(run, platforms=("cpu", "cuda"), disabled_checks=jax_fp4attn.export_disabled_checks())(
            *shapes
        )


def test_round_trip_on_a_cpu(exported, arrays):
    restored = export.deserialize(exported.serialize())
    meshes.assert_equal(jax.jit(restored.call)(*arrays), one_device(gradients(attend), *arrays))


def test_the_serialised_program_holds_the_custom_calls_of_the_gpu(exported):
    restored = export.deserialize(exported.serialize())
    assert restored.platforms == ("cpu", "cuda")
    for step in ("quantize_for_training", "forward", "row_operands", "backward"):
        assert f"@jax_fp4attn_{step}_v1(" in restored.mlir_module()


def test_without_disabled_checks_jax_refuses(arrays):
    run = jax.jit(attend)
    with jax_fp4attn.cross_compile((10, 0)), pytest.raises(ValueError, match="jax_fp4attn_quantize_v1"):
        export.export(run, platforms=("cuda",))(*arrays[:3])


def test_symbolic_lengths_are_refused():
    (length,) = export.symbolic_shape("t")
    x = jax.ShapeDtypeStruct((1, length, 2, 16), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="only the batch may be symbolic"):
        export.export(jax.jit(lambda x: attend(x, x, x)), platforms=("cpu",))(x)


def test_symbolic_batch_of_the_reference():
    (batch,) = export.symbolic_shape("b")
    x = jax.ShapeDtypeStruct((batch, 8, 2, 16), jnp.bfloat16)
    exported = export.export(jax.jit(lambda x: attend(x, x, x)), platforms=("cpu",))(x)
    x = jax.random.normal(jax.random.key(0), (3, 8, 2, 16), jnp.bfloat16)
    meshes.assert_equal([exported.call(x)], [one_device(attend, x, x, x)])
