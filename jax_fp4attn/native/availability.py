"""Whether the native implementation can be used, decided when a program is traced."""

import contextlib
from collections.abc import Iterator

import jax

# Hopper, Blackwell, Blackwell Ultra.
COMPUTE_CAPABILITIES = ((9, 0), (10, 0), (10, 3))

# A user context is part of the key of JAX's caches: what is traced under another value is traced again.
_cross_compiling = jax.make_user_context(None)


@contextlib.contextmanager
def cross_compile(compute_capability: tuple[int, int]) -> Iterator[None]:
    """Lets programs be traced and lowered for a GPU that this machine need not have, nor the native library.

    Args:
      compute_capability: Of the GPU: (9, 0), (10, 0) or (10, 3).

    Yields:
      Nothing.

    Raises:
      ValueError: For another compute capability.

    Example:
      >>> import jax, jax.numpy as jnp, jax_fp4attn
      >>> f = jax.jit(lambda x: jax_fp4attn.attention(x, x, x, is_causal=True, implementation="cuda"))
      >>> x = jax.ShapeDtypeStruct((1, 256, 2, 64), jnp.bfloat16)
      >>> with jax_fp4attn.cross_compile((10, 0)):
      ...     program = f.trace(x).lower(lowering_platforms=("cuda",)).as_text()
      >>> "jax_fp4attn_forward_v1" in program
      True
    """
    if compute_capability not in COMPUTE_CAPABILITIES:
        raise ValueError(f"compute_capability: expected one of {COMPUTE_CAPABILITIES}, got {compute_capability!r}")
    with _cross_compiling(compute_capability):
        yield


def why_unavailable() -> str | None:
    """The reason why no native call can be traced here, or None."""
    if _cross_compiling.value is not None:
        return None
    return (
        "this installation has no native library; use implementation='reference' or None, or lower for another machine "
        "under jax_fp4attn.cross_compile"
    )
