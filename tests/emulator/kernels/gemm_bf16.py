"""Products of bfloat16 matrices: to float32, and to bfloat16 by stmatrix."""

from tests.emulator.kernels.gemm import Form

FORMS = {
    "gemm_bf16": Form(("bf16", "bf16"), element_bytes=2, columns=128),
    "gemm_bf16_to_bf16": Form(("bf16", "bf16"), element_bytes=2, columns=64, output="bf16"),
}
