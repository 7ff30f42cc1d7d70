import jax
import jax.numpy as jnp
import pytest

import jax_fp4attn
from jax_fp4attn import native
from jax_fp4attn.native import availability, library
from tests.native import pretended

ALTERNATIVES = "use implementation='reference' or None, or lower for another machine under jax_fp4attn.cross_compile"


@pytest.fixture
def no_library(monkeypatch):
    pretended.set_library(monkeypatch, None)


@pytest.mark.parametrize("capability", [(8, 9), (9, 1), (12, 0), "sm_100", None], ids=str)
def test_only_gpus_with_kernels(capability):
    message = r"compute_capability: expected one of \(\(9, 0\), \(10, 0\), \(10, 3\)\), got"
    with pytest.raises(ValueError, match=message), jax_fp4attn.cross_compile(capability):
        pass


def test_lasts_as_long_as_the_block_even_if_it_raises(no_library):
    with pytest.raises(KeyError), jax_fp4attn.cross_compile((9, 0)):
        assert native.why_unavailable() is None
        raise KeyError
    assert native.why_unavailable() is not None


def test_a_program_traced_before_is_traced_again(no_library):
    x = jnp.ones((1, 8, 1, 64), jnp.bfloat16)
    attend = jax.jit(lambda x: jax_fp4attn.attention(x, x, x))
    lower = lambda: attend.trace(x).lower(lowering_platforms=("cuda",)).as_text()  # noqa: E731
    before = lower()
    with jax_fp4attn.cross_compile((10, 0)):
        inside = lower()
    assert "jax_fp4attn_quantize_v1" not in before
    assert "jax_fp4attn_quantize_v1" in inside
    assert lower() == before


class TestWhyUnavailable:
    """The first obstacle is told: the library, then that there is no GPU, then its compute capability."""

    @pytest.mark.parametrize("capabilities", [(), ("8.9",), ("9.0",)], ids=str)
    def test_no_library(self, capabilities, no_library, monkeypatch):
        pretended.set_gpus(monkeypatch, *capabilities)
        assert native.why_unavailable() == f"{pretended.NO_LIBRARY}; {ALTERNATIVES}"

    def test_no_gpu(self, monkeypatch):
        pretended.set_library(monkeypatch, (0, 0))
        pretended.set_gpus(monkeypatch)
        assert native.why_unavailable() == f"JAX has no CUDA device here; {ALTERNATIVES}"

    @pytest.mark.parametrize(
        ("capabilities", "culprit"),
        [
            (("8.9",), "cuda:0 has compute capability 8.9"),
            (("12.0",), "cuda:0 has compute capability 12.0"),
            (("9.0", "9.1"), "cuda:1 has compute capability 9.1"),
        ],
        ids=str,
    )
    def test_a_gpu_without_kernels(self, capabilities, culprit, monkeypatch):
        pretended.set_library(monkeypatch, (0, 0))
        pretended.set_gpus(monkeypatch, *capabilities)
        advice = f"hide it with CUDA_VISIBLE_DEVICES if others are to be used, {ALTERNATIVES}"
        assert native.why_unavailable() == f"{culprit}, and there are kernels for 9.0, 10.0, 10.3; {advice}"

    @pytest.mark.parametrize("capabilities", [("9.0",), ("10.0",), ("10.3", "9.0")], ids=str)
    def test_nothing(self, capabilities, monkeypatch):
        pretended.set_library(monkeypatch, (0, 0))
        pretended.set_gpus(monkeypatch, *capabilities)
        assert native.why_unavailable() is None

    def test_another_machine_needs_nothing_of_this_one(self, monkeypatch):
        monkeypatch.setattr(library, "load", lambda: pytest.fail("loads the library"))
        monkeypatch.setattr(availability, "local_gpus", lambda: pytest.fail("starts a backend"))
        with jax_fp4attn.cross_compile((10, 3)):
            assert native.why_unavailable() is None


def test_gpus_of_this_process(monkeypatch):
    pretended.set_gpus(monkeypatch, "9.0", "10.3", "12.1")
    assert availability.local_gpus() == {"cuda:0": (9, 0), "cuda:1": (10, 3), "cuda:2": (12, 1)}
    pretended.set_gpus(monkeypatch)
    assert availability.local_gpus() == {}
