// The steps of the operator that have kernels: what a custom call launches.
#pragma once

#include <cuda.h>

#include "xla/ffi/api/ffi.h"

namespace fp4attn {

namespace ffi = xla::ffi;

// Each throws a Failure; see jax_fp4attn/steps.py for operands and results.
void Quantize(CUstream stream, ffi::RemainingArgs operands, ffi::RemainingRets results, ffi::Dictionary attributes);
void QuantizeForTraining(CUstream stream, ffi::RemainingArgs operands, ffi::RemainingRets results,
                         ffi::Dictionary attributes);
void Forward(CUstream stream, ffi::RemainingArgs operands, ffi::RemainingRets results, ffi::Dictionary attributes);
void Backward(CUstream stream, ffi::RemainingArgs operands, ffi::RemainingRets results, ffi::Dictionary attributes);
void RowOperands(CUstream stream, ffi::RemainingArgs operands, ffi::RemainingRets results, ffi::Dictionary attributes);

}  // namespace fp4attn
