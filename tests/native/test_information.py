import dataclasses

import pytest

from jax_fp4attn import native, recipes
from jax_fp4attn.native import library
from tests.native import pretended
from tests.native.pretended import NO_LIBRARY

ALTERNATIVES = "use implementation='reference' or None, or lower for another machine under jax_fp4attn.cross_compile"
NO_GPU = f"JAX has no CUDA device here; {ALTERNATIVES}"
TO_COME = {step: f"there is no kernel for the step '{step}' yet" for step in ("partial_forward", "partial_gradients")}
STEPS = ("quantize", "quantize_for_training", "forward", "partial_forward", "row_operands", "backward")
STEPS += ("partial_gradients",)


def for_hopper_alone(capability):
    """What stands against the steps that have kernels for Hopper alone."""
    text = f"there is no kernel for the step '{{}}' on compute capability {capability} yet"
    return {"backward": text.format("backward")}


def reasons(of_kernels):
    """Why each step runs by the reference, with one reason, or None, for those that have kernels."""
    return {step: TO_COME.get(step, of_kernels) for step in STEPS}


@pytest.fixture(autouse=True)
def _path(tmp_path, monkeypatch):
    monkeypatch.setattr(library, "PATH", tmp_path / "libjax_fp4attn.so")
    monkeypatch.setattr(library, "running_ffi_version", lambda: (0, 3))


@pytest.fixture
def has_library(monkeypatch):
    library.PATH.touch()
    pretended.set_library(monkeypatch, (0, 1))


def test_neither_library_nor_gpu(monkeypatch):
    pretended.set_library(monkeypatch, None)
    pretended.set_gpus(monkeypatch)
    info = native.info()
    assert info == native.Info(
        path=None,
        built_for=None,
        running=(0, 3),
        gpus={},
        images={},
        unavailable=f"{NO_LIBRARY}; {ALTERNATIVES}",
        steps=reasons("no kernel runs here"),
        recipe="train",
        head_size=128,
    )
    assert str(info).splitlines() == [
        "library: none",
        "XLA FFI: built for nothing, running 0.3",
        "GPUs: none",
        f"no kernel runs here: {NO_LIBRARY}; {ALTERNATIVES}",
        "steps of recipe 'train' with head size 128:",
        "  quantize: reference, no kernel runs here",
        "  quantize_for_training: reference, no kernel runs here",
        "  forward: reference, no kernel runs here",
        "  partial_forward: reference, there is no kernel for the step 'partial_forward' yet",
        "  row_operands: reference, no kernel runs here",
        "  backward: reference, no kernel runs here",
        "  partial_gradients: reference, there is no kernel for the step 'partial_gradients' yet",
    ]


def test_library_and_gpus(has_library, monkeypatch):
    pretended.set_gpus(monkeypatch, "9.0", "10.3")
    info = native.info()
    assert info == native.Info(
        path=library.PATH,
        built_for=(0, 1),
        running=(0, 3),
        gpus={"cuda:0": (9, 0), "cuda:1": (10, 3)},
        images={"cuda:0": ("of Hopper",), "cuda:1": ("first", "second")},
        unavailable=None,
        steps=reasons(None) | for_hopper_alone("10.3"),
        recipe="train",
        head_size=128,
    )
    assert str(info).splitlines()[:7] == [
        f"library: {library.PATH}",
        "XLA FFI: built for 0.1, running 0.3",
        "GPUs: cuda:0 (9.0, image of Hopper), cuda:1 (10.3, image first, else second)",
        "steps of recipe 'train' with head size 128:",
        "  quantize: kernel",
        "  quantize_for_training: kernel",
        "  forward: kernel",
    ]


def test_hopper(has_library, monkeypatch):
    pretended.set_gpus(monkeypatch, "9.0")
    info = native.info()
    assert info.steps == reasons(None)
    assert "\n  forward: kernel\n" in str(info)


def test_library_without_a_gpu(has_library, monkeypatch):
    pretended.set_gpus(monkeypatch)
    info = native.info()
    assert (info.path, info.built_for, info.gpus) == (library.PATH, (0, 1), {})
    assert info.unavailable == NO_GPU
    assert info.steps == reasons("no kernel runs here")


def test_library_that_does_not_load(monkeypatch):
    pretended.set_library(monkeypatch, None)
    pretended.set_gpus(monkeypatch, "9.0")
    library.PATH.touch()
    info = native.info()
    assert (info.path, info.built_for, info.gpus) == (library.PATH, None, {"cuda:0": (9, 0)})
    assert info.unavailable == f"{NO_LIBRARY}; {ALTERNATIVES}"
    assert info.images == {"cuda:0": ()}
    assert "\nGPUs: cuda:0 (9.0)\n" in str(info)


def test_a_gpu_without_kernels(has_library, monkeypatch):
    pretended.set_gpus(monkeypatch, "8.0")
    info = native.info()
    assert (info.gpus, info.images) == ({"cuda:0": (8, 0)}, {"cuda:0": ()})
    assert "cuda:0 has compute capability 8.0" in info.unavailable
    assert info.steps == reasons("no kernel runs here")


def test_a_recipe_and_a_head_size(has_library, monkeypatch):
    pretended.set_gpus(monkeypatch, "9.0")
    recipe = dataclasses.replace(recipes.square, name="mine", v_exponent_rule="best_l2")
    info = native.info(recipe, head_size=64)
    expected = "there is no kernel for v_exponent_rule='best_l2'"
    assert info.steps == reasons(None) | {"quantize": expected, "quantize_for_training": expected}
    assert (info.recipe, info.head_size, info.unavailable) == ("mine", 64, None)
    assert "\nsteps of recipe 'mine' with head size 64:\n" in str(info)
    assert f"\n  quantize: reference, {expected}\n" in str(info)
    assert "\n  row_operands: kernel\n" in str(info)


def test_a_step_tells_its_own_reason_before_that_of_the_machine(monkeypatch):
    pretended.set_library(monkeypatch, None)
    pretended.set_gpus(monkeypatch)
    expected = "there are kernels for head sizes 64 and 128, not 80"
    assert native.info(head_size=80).steps == reasons(expected)


def test_another_machine():
    with native.cross_compile((9, 0)):
        info = native.info()
    assert info.unavailable is None
    assert info.steps == reasons(None)
    with native.cross_compile((10, 0)):
        info = native.info()
    assert info.unavailable is None
    assert info.steps == reasons(None) | for_hopper_alone("10.0")
