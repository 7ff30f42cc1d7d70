"""Export of programs that hold the native implementation's custom calls."""

from jax import export

from jax_fp4attn import native


def export_disabled_checks() -> list[export.DisabledSafetyCheck]:
    """The checks to disable so that ``jax.export`` accepts this library's custom calls.

    JAX exports only custom calls that it promises to keep stable itself. Ours are versioned: a target name that ends in
    ``_v1`` keeps its operands, results and attributes, so an exported program runs wherever a library that has the
    target is registered: by tracing a call of this package, or by :func:`jax_fp4attn.native.register`.

    Returns:
      For ``jax.export.export(..., disabled_checks=...)``.

    Example:
      >>> import jax, jax.numpy as jnp, jax_fp4attn
      >>> from jax import export
      >>> f = jax.jit(lambda x: jax_fp4attn.attention(x, x, x, is_causal=True))
      >>> x = jax.ShapeDtypeStruct((1, 8, 1, 64), jnp.bfloat16)
      >>> with jax_fp4attn.cross_compile((10, 0)):
      ...     exported = export.export(f, platforms=("cpu", "cuda"), disabled_checks=export_disabled_checks())(x)
      >>> exported.platforms
      ('cpu', 'cuda')
    """
    return [export.DisabledSafetyCheck.custom_call(name) for name in native.target_names()]
