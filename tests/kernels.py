"""Kernels that are not there yet."""

import contextlib
from collections.abc import Iterator

import jax
import pytest

from jax_fp4attn.native import calls, coverage


@contextlib.contextmanager
def for_every_step() -> Iterator[None]:
    """Lets every step be traced as a custom call, so that their contract can be tested before their kernels exist."""
    jax.clear_caches()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coverage, "STEPS_WITH_KERNELS", frozenset(calls.STEPS))
        patch.setattr(coverage, "_obstacles", lambda *_: iter(()))
        yield
    jax.clear_caches()
