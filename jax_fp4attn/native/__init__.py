"""The native implementation: custom calls, the names and attributes that they have, and where they can run."""

from jax_fp4attn.native.availability import cross_compile, is_for, why_unavailable
from jax_fp4attn.native.calls import call, register, target_name, target_names
from jax_fp4attn.native.coverage import missing_kernel
from jax_fp4attn.native.information import Info, info

__all__ = [
    "Info",
    "call",
    "cross_compile",
    "info",
    "is_for",
    "missing_kernel",
    "register",
    "target_name",
    "target_names",
    "why_unavailable",
]
