"""The numerical contract in plain jax.numpy: every kernel is compared with these functions.

All of them use head-major arrays ([B, N, T, H]), walk over tiles of 128 keys in order, and take O(S) memory.
"""

from jax_fp4attn.reference.backward import Gradients, backward
from jax_fp4attn.reference.backward_operands import BackwardOperands, quantize_for_backward
from jax_fp4attn.reference.forward import forward
from jax_fp4attn.reference.operands import Operands, quantize_operands

__all__ = [
    "BackwardOperands",
    "Gradients",
    "Operands",
    "backward",
    "forward",
    "quantize_for_backward",
    "quantize_operands",
]
