"""The devices and settings that conftest.py promises."""

import hypothesis
import jax
import jax.numpy as jnp
import pytest


def _default_platform():
    (device,) = jnp.zeros(1).devices()
    return device.platform


def test_eight_cpu_devices(cpu_devices):
    assert len(cpu_devices) == 8
    assert {device.platform for device in cpu_devices} == {"cpu"}


@pytest.mark.gpu
def test_gpu_tests_run_on_a_gpu():
    assert _default_platform() == "gpu"


def test_other_tests_run_where_jax_does_by_default():
    assert _default_platform() == jax.default_backend()


def test_hypothesis_has_no_deadline():
    assert hypothesis.settings().deadline is None
