"""The numerical contract in plain jax.numpy: every kernel is compared with these functions.

All of them use head-major arrays ([B, N, T, H]), walk over tiles of 128 keys in order, and take O(S) memory.
"""

from jax_fp4attn.reference.backward import (
    Gradients,
    backward,
    finish_gradients,
    partial_gradients,
)
from jax_fp4attn.reference.backward_operands import BackwardOperands
from jax_fp4attn.reference.forward import forward, partial_forward
from jax_fp4attn.reference.operands import Operands, quantize_operands
from jax_fp4attn.reference.row_operands import RowOperands, gradient_scale, row_operands
from jax_fp4attn.reference.training_operands import TrainingOperands, quantize_for_training

__all__ = [
    "BackwardOperands",
    "Gradients",
    "Operands",
    "RowOperands",
    "TrainingOperands",
    "backward",
    "finish_gradients",
    "forward",
    "gradient_scale",
    "partial_forward",
    "partial_gradients",
    "quantize_for_training",
    "quantize_operands",
    "row_operands",
]
