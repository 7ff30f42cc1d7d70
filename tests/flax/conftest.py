"""What all tests of the Flax modules share."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(autouse=True)
def _compile_quickly() -> Iterator[None]:
    """Turns most of XLA's optimisations off: these tests compile many programs and run each once or twice."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
