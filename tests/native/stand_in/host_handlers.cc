// The handlers without a stream, for XLA's CPU platform, and what a test needs to stand between them and the driver.
#include <dlfcn.h>

#include <string>

#include "failure.h"
#include "kernels.h"
#include "steps.h"

namespace {

namespace ffi = xla::ffi;
using fp4attn::Guarded;

std::string driver_path;

// Whatever it is, a launch has to pass it on.
const CUstream kStream = reinterpret_cast<CUstream>(0x57);

template <void (*step)(CUstream, ffi::RemainingArgs, ffi::RemainingRets, ffi::Dictionary)>
ffi::Error Execute(ffi::RemainingArgs operands, ffi::RemainingRets results, ffi::Dictionary attributes) {
  return Guarded([&] { step(kStream, operands, results, attributes); });
}

ffi::Error Load(ffi::RemainingArgs, ffi::RemainingRets, ffi::Dictionary) {
  return Guarded([] { fp4attn::LoadKernels(); });
}

// Launches a kernel with a single parameter.
ffi::Error LaunchByName(ffi::RemainingRets, std::string_view name) {
  return Guarded([&] { fp4attn::Launch(kStream, std::string(name), {1, 1, 1}, 1.0f); });
}

}  // namespace

// Hidden, so that it takes the place of the real one in this library alone.
extern "C" __attribute__((visibility("hidden"))) void* dlopen(const char* name, int mode) noexcept {
  static const auto real = reinterpret_cast<decltype(&dlopen)>(dlsym(RTLD_NEXT, "dlopen"));
  return real(std::string_view(name) == "libcuda.so.1" ? driver_path.c_str() : name, mode);
}

#define FP4ATTN_HOST_HANDLER(symbol, function) \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(symbol, function, ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attrs())

#pragma GCC visibility push(default)
FP4ATTN_HOST_HANDLER(quantize, Execute<fp4attn::Quantize>);
FP4ATTN_HOST_HANDLER(quantize_for_training, Execute<fp4attn::QuantizeForTraining>);
FP4ATTN_HOST_HANDLER(forward, Execute<fp4attn::Forward>);
FP4ATTN_HOST_HANDLER(row_operands, Execute<fp4attn::RowOperands>);
FP4ATTN_HOST_HANDLER(backward, Execute<fp4attn::Backward>);
FP4ATTN_HOST_HANDLER(load_kernels, Load);
XLA_FFI_DEFINE_HANDLER_SYMBOL(launch_by_name, LaunchByName,
                              ffi::Ffi::Bind().RemainingRets().Attr<std::string_view>("name"));

extern "C" void stand_in_driver(const char* path) { driver_path = path; }
#pragma GCC visibility pop
