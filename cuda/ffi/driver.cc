#include "driver.h"

#include <dlfcn.h>

#include <string>

#include "failure.h"

namespace fp4attn {
namespace {

struct Opened {
  Driver driver = {};
  std::string error;
};

template <typename Function>
void Load(void* handle, const char* symbol, Function& function, std::string& error) {
  function = reinterpret_cast<Function>(dlsym(handle, symbol));
  if (function == nullptr && error.empty()) {
    error = std::string("the CUDA driver has no ") + symbol + "; version 12.3 or newer is needed";
  }
}

Opened Open() {
  Opened opened;
  void* handle = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    opened.error = std::string("no CUDA driver: ") + dlerror();
    return opened;
  }
  Driver& driver = opened.driver;
  Load(handle, "cuCtxGetDevice", driver.ctx_get_device, opened.error);
  Load(handle, "cuDeviceGetAttribute", driver.device_get_attribute, opened.error);
  Load(handle, "cuGetErrorString", driver.get_error_string, opened.error);
  Load(handle, "cuKernelSetAttribute", driver.kernel_set_attribute, opened.error);
  Load(handle, "cuLaunchKernelEx", driver.launch_kernel, opened.error);
  Load(handle, "cuLibraryGetKernel", driver.library_get_kernel, opened.error);
  Load(handle, "cuLibraryLoadData", driver.library_load_data, opened.error);
  Load(handle, "cuTensorMapEncodeTiled", driver.tensor_map_encode_tiled, opened.error);
  return opened;
}

}  // namespace

const Driver& Driver::Get() {
  static const Opened opened = Open();
  if (!opened.error.empty()) Fail(ffi::ErrorCode::kUnavailable, opened.error);
  return opened.driver;
}

void Driver::Check(CUresult result, std::string_view call) const {
  if (result == CUDA_SUCCESS) return;
  const char* text = nullptr;
  get_error_string(result, &text);
  Fail(ffi::ErrorCode::kInternal, call, " failed with ", static_cast<int>(result), ": ", text ? text : "unknown error");
}

}  // namespace fp4attn
