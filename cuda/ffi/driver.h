// The CUDA driver, opened on first use, so that the library loads on a machine without one.
#pragma once

#include <cuda.h>

#include <string_view>

namespace fp4attn {

struct Driver {
  decltype(&cuCtxGetDevice) ctx_get_device;
  decltype(&cuDeviceGetAttribute) device_get_attribute;
  decltype(&cuGetErrorString) get_error_string;
  decltype(&cuKernelSetAttribute) kernel_set_attribute;
  decltype(&cuLaunchKernelEx) launch_kernel;
  decltype(&cuLibraryGetKernel) library_get_kernel;
  decltype(&cuLibraryLoadData) library_load_data;
  decltype(&cuTensorMapEncodeTiled) tensor_map_encode_tiled;

  // Throws a Failure that says what is missing.
  static const Driver& Get();

  // Throws a Failure with the driver's text unless the result is success.
  void Check(CUresult result, std::string_view call) const;
};

}  // namespace fp4attn
