"""Products of eight-bit matrices to float32, with A from shared memory or from registers."""

from tests.emulator.kernels.gemm import Form

FORMS = {
    "gemm_e4m3": Form(("e4m3", "e4m3"), element_bytes=1, columns=96),
    "gemm_e5m2_e4m3": Form(("e5m2", "e4m3"), element_bytes=1, columns=64),
    "gemm_e4m3_registers": Form(("e4m3", "e4m3"), element_bytes=1, columns=64, a_from_registers=True),
}
