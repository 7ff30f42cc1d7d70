import jax
import jax.numpy as jnp
import pytest

import jax_fp4attn
from jax_fp4attn import native


@pytest.mark.parametrize("capability", [(8, 9), (9, 1), (12, 0), "sm_100", None], ids=str)
def test_only_gpus_with_kernels(capability):
    message = r"compute_capability: expected one of \(\(9, 0\), \(10, 0\), \(10, 3\)\), got"
    with pytest.raises(ValueError, match=message), jax_fp4attn.cross_compile(capability):
        pass


def test_lasts_as_long_as_the_block_even_if_it_raises():
    with pytest.raises(KeyError), jax_fp4attn.cross_compile((9, 0)):
        assert native.why_unavailable() is None
        raise KeyError
    assert "no native library" in native.why_unavailable()


def test_a_program_traced_before_is_traced_again():
    x = jnp.ones((1, 8, 1, 64), jnp.bfloat16)
    attend = jax.jit(lambda x: jax_fp4attn.attention(x, x, x))
    lower = lambda: attend.trace(x).lower(lowering_platforms=("cuda",)).as_text()  # noqa: E731
    before = lower()
    with jax_fp4attn.cross_compile((10, 0)):
        inside = lower()
    assert "jax_fp4attn_quantize_v1" not in before
    assert "jax_fp4attn_quantize_v1" in inside
    assert lower() == before
