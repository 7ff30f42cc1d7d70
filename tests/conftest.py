"""Devices and settings that all tests share.

Tests run on eight virtual CPU devices, on every machine, so that a result does not depend on what
else the machine has. Only tests marked `gpu` run on a GPU. Setting JAX_PLATFORMS overrides the
choice of platforms.
"""

import ctypes
import importlib.util
import os
from collections.abc import Callable, Iterator

import hypothesis
import jax
import pytest

from tests import kernels, transforms_table

NUM_CPU_DEVICES = 8


def _has_cuda() -> bool:
    """Whether JAX would find a CUDA device, asked without starting a JAX backend."""
    if not any(importlib.util.find_spec(f"jax_cuda{major}_plugin") for major in (12, 13)):
        return False
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int()
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0


def _configure_jax() -> None:
    # JAX reads all of these once, when the first backend starts.
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", NUM_CPU_DEVICES)
    if "JAX_PLATFORMS" not in os.environ:
        # The first platform is the default one.
        jax.config.update("jax_platforms", "cpu,cuda" if _has_cuda() else "cpu")
    # pytest-xdist's workers share a GPU.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def _configure_hypothesis() -> None:
    # An example that meets new shapes compiles new code, so that time says nothing about a test.
    hypothesis.settings.register_profile(
        "dev",
        deadline=None,
        max_examples=25,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
    hypothesis.settings.register_profile(
        "ci",
        parent=hypothesis.settings.get_profile("dev"),
        database=None,
        derandomize=True,
        print_blob=True,
    )
    default = "ci" if os.environ.get("CI") else "dev"
    hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", default))


_configure_jax()
_configure_hypothesis()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-transforms-table",
        action="store_true",
        help="write the rows of docs/transforms.md that the tests of meshes measure with this JAX (without -n)",
    )


@pytest.fixture
def record_row(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Compares a row of the table of transforms with the one on file, if this JAX has been measured."""

    def record(case: str, mesh: str, equal: str, collectives: dict[str, int]) -> None:
        row = transforms_table.make_row(case, mesh, equal, collectives)
        rows = transforms_table.read()
        if request.config.getoption("--update-transforms-table"):
            transforms_table.write(rows | {row[:2]: row})
        elif rows:
            assert rows.get(row[:2]) == row

    return record


def _cuda_devices() -> list[jax.Device]:
    try:
        return jax.devices("cuda")
    except RuntimeError:
        return []


@pytest.fixture(autouse=True)
def _run_on_gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """Gives tests marked `gpu` a GPU as the default device, or skips them."""
    if request.node.get_closest_marker("gpu") is None:
        yield
        return
    devices = _cuda_devices()
    if not devices:
        pytest.skip(f"needs a CUDA device; JAX found only {jax.default_backend()} devices")
    with jax.default_device(devices[0]):
        yield


@pytest.fixture
def cpu_devices() -> list[jax.Device]:
    """Eight CPU devices, for meshes."""
    devices = jax.devices("cpu")
    if len(devices) < NUM_CPU_DEVICES:
        pytest.skip(f"needs {NUM_CPU_DEVICES} CPU devices, but XLA_FLAGS asks for {len(devices)}")
    return devices[:NUM_CPU_DEVICES]


@pytest.fixture(scope="module")
def every_step_has_a_kernel() -> Iterator[None]:
    """See :func:`tests.kernels.for_every_step`."""
    with kernels.for_every_step():
        yield
