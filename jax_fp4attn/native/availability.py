"""Whether the native implementation can be used, decided when a program is traced."""

import contextlib
from collections.abc import Iterator
from typing import Literal

import jax

from jax_fp4attn.native import library

ComputeCapability = tuple[int, int]

Architecture = Literal["hopper", "blackwell"]

# Blackwell's second one is Blackwell Ultra.
_ARCHITECTURES: dict[ComputeCapability, Architecture] = {
    (9, 0): "hopper",
    (10, 0): "blackwell",
    (10, 3): "blackwell",
}
COMPUTE_CAPABILITIES = tuple(_ARCHITECTURES)

# A user context is part of the key of JAX's caches: what is traced under another value is traced again.
_cross_compiling = jax.make_user_context(None)


@contextlib.contextmanager
def cross_compile(compute_capability: ComputeCapability) -> Iterator[None]:
    """Lets programs be traced and lowered for a GPU that this machine need not have, nor the native library.

    Args:
      compute_capability: Of the GPU: (9, 0), (10, 0) or (10, 3).

    Yields:
      Nothing.

    Raises:
      ValueError: For another compute capability.

    Example:
      >>> import jax, jax.numpy as jnp, jax_fp4attn
      >>> f = jax.jit(lambda x: jax_fp4attn.attention(x, x, x, is_causal=True))
      >>> x = jax.ShapeDtypeStruct((1, 256, 2, 64), jnp.bfloat16)
      >>> with jax_fp4attn.cross_compile((10, 0)):
      ...     program = f.trace(x).lower(lowering_platforms=("cuda",)).as_text()
      >>> "jax_fp4attn_quantize_v1" in program
      True
    """
    if compute_capability not in COMPUTE_CAPABILITIES:
        raise ValueError(f"compute_capability: expected one of {COMPUTE_CAPABILITIES}, got {compute_capability!r}")
    with _cross_compiling(compute_capability):
        yield


def is_cross_compiling() -> bool:
    """Whether programs are being traced for another machine."""
    return _cross_compiling.value is not None


def local_gpus() -> dict[str, ComputeCapability]:
    """The CUDA devices of this process, by name; empty where JAX has none."""
    try:
        devices = jax.local_devices(backend="cuda")
    except RuntimeError:
        return {}
    return {str(device): _capability(device) for device in devices}


def capabilities() -> set[ComputeCapability]:
    """Compute capabilities of the GPUs that programs are traced for, without those that no kernel runs on."""
    if is_cross_compiling():
        return {_cross_compiling.value}
    return set(local_gpus().values()) & set(COMPUTE_CAPABILITIES)


def architecture(capability: ComputeCapability) -> Architecture:
    """Which kernels a GPU takes that some kernel runs on."""
    return _ARCHITECTURES[capability]


def is_for(name: Architecture) -> bool:
    """Whether programs are traced for a GPU of an architecture, among others perhaps."""
    return any(architecture(capability) == name for capability in capabilities())


def why_unavailable() -> str | None:
    """The reason why no native call can be traced here, or None."""
    if is_cross_compiling():
        return None
    loaded = library.load()
    if isinstance(loaded, str):
        return f"{loaded}; {_ALTERNATIVES}"
    gpus = local_gpus()
    if not gpus:
        return f"JAX has no CUDA device here; {_ALTERNATIVES}"
    for name, capability in gpus.items():
        if capability not in COMPUTE_CAPABILITIES:
            expected = ", ".join(f"{major}.{minor}" for major, minor in COMPUTE_CAPABILITIES)
            return (
                f"{name} has compute capability {capability[0]}.{capability[1]}, and there are kernels for {expected}; "
                f"hide it with CUDA_VISIBLE_DEVICES if others are to be used, {_ALTERNATIVES}"
            )
    return None


_ALTERNATIVES = "use implementation='reference' or None, or lower for another machine under jax_fp4attn.cross_compile"


def _capability(device: jax.Device) -> ComputeCapability:
    major, minor = device.compute_capability.split(".")
    return int(major), int(minor)
