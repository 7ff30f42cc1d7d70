"""Kernels that are not there yet."""

import contextlib
from collections.abc import Iterator

import jax
import pytest

from jax_fp4attn.native import calls, coverage


@contextlib.contextmanager
def for_steps(*steps: str) -> Iterator[None]:
    """Lets these steps, and no others, have kernels, and these on every GPU."""
    # JAX does not know that what was traced before depends on it.
    jax.clear_caches()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coverage, "STEPS_WITH_KERNELS", frozenset(steps))
        patch.setattr(coverage, "STEPS_FOR_HOPPER_ALONE", frozenset())
        yield
    jax.clear_caches()


@contextlib.contextmanager
def for_every_step() -> Iterator[None]:
    """Lets every step be traced as a custom call, so that their contract can be tested before their kernels exist."""
    with for_steps(*calls.STEPS), pytest.MonkeyPatch.context() as patch:
        patch.setattr(coverage, "_obstacles", lambda *_: iter(()))
        yield
