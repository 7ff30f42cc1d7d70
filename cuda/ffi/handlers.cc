// The symbols of the library: a handler for each step and stage, and the FFI version that they were built for.
#include <atomic>

#include "failure.h"
#include "kernels.h"
#include "steps.h"

namespace {

namespace ffi = xla::ffi;
using fp4attn::Guarded;

// How often handlers ran on the host; replays of a captured graph do not count.
std::atomic<int> handler_calls = 0;

template <void (*step)(CUstream, ffi::RemainingArgs, ffi::RemainingRets, ffi::Dictionary)>
ffi::Error Execute(CUstream stream, ffi::RemainingArgs operands, ffi::RemainingRets results,
                   ffi::Dictionary attributes) {
  ++handler_calls;
  return Guarded([&] { step(stream, operands, results, attributes); });
}

// Kernels are loaded before the first run, which may be the capture of a graph.
ffi::Error Initialize(ffi::RemainingArgs, ffi::RemainingRets, ffi::Dictionary) {
  return Guarded([] { fp4attn::LoadKernels(); });
}

}  // namespace

#define FP4ATTN_HANDLER(symbol, step)                                  \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(symbol, Execute<fp4attn::step>,        \
                                ffi::Ffi::Bind()                       \
                                    .Ctx<ffi::PlatformStream<CUstream>>() \
                                    .RemainingArgs()                   \
                                    .RemainingRets()                   \
                                    .Attrs(),                          \
                                {ffi::Traits::kCmdBufferCompatible})

// The macro leaves visibility to the command line, where it is hidden.
#pragma GCC visibility push(default)
FP4ATTN_HANDLER(jax_fp4attn_quantize_v1, Quantize);
FP4ATTN_HANDLER(jax_fp4attn_quantize_for_training_v1, QuantizeForTraining);
FP4ATTN_HANDLER(jax_fp4attn_forward_v1, Forward);
FP4ATTN_HANDLER(jax_fp4attn_row_operands_v1, RowOperands);
FP4ATTN_HANDLER(jax_fp4attn_backward_v1, Backward);

XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_fp4attn_initialize, Initialize,
                              ffi::Ffi::BindInitialize().RemainingArgs().RemainingRets().Attrs());

extern "C" int jax_fp4attn_handler_calls() { return handler_calls; }
extern "C" const char* jax_fp4attn_image(int major, int minor, int rank) {
  return fp4attn::ImageName(major, minor, rank);
}
extern "C" int jax_fp4attn_ffi_major() { return XLA_FFI_API_MAJOR; }
extern "C" int jax_fp4attn_ffi_minor() { return XLA_FFI_API_MINOR; }
#pragma GCC visibility pop
