"""Number formats of FP4 attention: element codes, block scaling, packing and scale layout.

Everything here is integer logic or exact float32 arithmetic. It is never a cast round trip: XLA:GPU
removes ``x.astype(narrow).astype(float32)`` under ``jit``, so a quantiser built from casts is the
identity there. Nor does a rounding hang on a division, which XLA rounds differently on each
platform.
"""

from jax_fp4attn.formats.block_scaled import BlockScaled
from jax_fp4attn.formats.minifloat import (
    E2M1,
    E4M3,
    E5M2,
    MiniFloat,
    decode,
    encode,
    round_to,
    round_to_bfloat16,
)
from jax_fp4attn.formats.mxfp4 import quantize_mxfp4
from jax_fp4attn.formats.nvfp4 import nvfp4_tensor_scale, quantize_nvfp4
from jax_fp4attn.formats.packing import pack_codes, unpack_codes
from jax_fp4attn.formats.power_of_two import (
    ExponentRule,
    block_exponent,
    decode_e8m0,
    encode_e8m0,
    exp2_int,
)
from jax_fp4attn.formats.scale_pages import from_scale_pages, to_scale_pages

__all__ = [
    "E2M1",
    "E4M3",
    "E5M2",
    "BlockScaled",
    "ExponentRule",
    "MiniFloat",
    "block_exponent",
    "decode",
    "decode_e8m0",
    "encode",
    "encode_e8m0",
    "exp2_int",
    "from_scale_pages",
    "nvfp4_tensor_scale",
    "pack_codes",
    "quantize_mxfp4",
    "quantize_nvfp4",
    "round_to",
    "round_to_bfloat16",
    "to_scale_pages",
    "unpack_codes",
]
