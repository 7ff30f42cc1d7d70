"""A native library and GPUs that need not be there."""

import dataclasses
from types import SimpleNamespace

import jax
import pytest

from jax_fp4attn.native import library

NO_LIBRARY = "this installation has no native library"
_IMAGES = {(9, 0): (b"of Hopper",), (10, 3): (b"first", b"second")}


@dataclasses.dataclass(frozen=True)
class Gpu:
    name: str
    compute_capability: str

    def __str__(self) -> str:
        return self.name


def set_gpus(monkeypatch: pytest.MonkeyPatch, *compute_capabilities: str) -> None:
    """Lets JAX have these CUDA devices, cuda:0 and so on, and no others."""
    gpus = [Gpu(f"cuda:{i}", compute_capability) for i, compute_capability in enumerate(compute_capabilities)]
    original = jax.local_devices

    def local_devices(*arguments, backend=None, **options):
        if backend != "cuda":
            return original(*arguments, backend=backend, **options)
        if not gpus:
            raise RuntimeError("Unknown backend cuda")
        return gpus

    monkeypatch.setattr(jax, "local_devices", local_devices)


def set_library(monkeypatch: pytest.MonkeyPatch, ffi_version: library.Version | None) -> None:
    """Lets there be a library for this version of XLA's FFI, or none."""
    handle = SimpleNamespace(jax_fp4attn_image=_image)
    loaded = NO_LIBRARY if ffi_version is None else library.Library(handle, ffi_version)
    monkeypatch.setattr(library, "load", lambda: loaded)


def _image(major: int, minor: int, rank: int) -> bytes | None:
    return dict(enumerate(_IMAGES.get((major, minor), ()))).get(rank)
