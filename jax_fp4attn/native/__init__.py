"""The native implementation: custom calls, the names and attributes that they have, and where they can run."""

from jax_fp4attn.native.availability import cross_compile, why_unavailable
from jax_fp4attn.native.calls import call, target_name, target_names

__all__ = ["call", "cross_compile", "target_name", "target_names", "why_unavailable"]
