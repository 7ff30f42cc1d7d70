// The compiled kernels: choice of the image by compute capability, and launch by name.
#pragma once

#include <cuda.h>

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

namespace fp4attn {

struct Grid {
  uint32_t x, y, z;
};

enum class Target { kHopper, kBlackwell };

// Of the current device; loads its kernels, unless they are loaded.
Target CurrentTarget();

// The images that GPUs of a compute capability take kernels from, in the order in which they are searched; null behind
// the last one, and if there are none.
const char* ImageName(int major, int minor, int rank);

// Loads the kernels for the current device, unless they are loaded. Nothing after it touches files, allocates device
// memory or synchronises, so that a launch can be captured into a graph.
void LoadKernels();

namespace internal {

inline char Letter(const void*) { return 'p'; }
inline char Letter(int32_t) { return 'i'; }
inline char Letter(float) { return 'f'; }
inline char Letter(const CUtensorMap&) { return 't'; }

void Launch(CUstream stream, std::string_view name, Grid grid, std::string_view signature, void** parameters);

}  // namespace internal

// Multiprocessors of the current device.
int32_t Multiprocessors();

// Launches a kernel of the manifest. Pointers, int32, float32 and tensor maps are passed as they are, and must be those
// of its signature. An empty grid launches nothing.
template <typename... Parameters>
void Launch(CUstream stream, const std::string& name, Grid grid, const Parameters&... parameters) {
  const std::array<char, sizeof...(Parameters)> signature = {internal::Letter(parameters)...};
  void* addresses[] = {const_cast<void*>(static_cast<const void*>(&parameters))...};
  internal::Launch(stream, name, grid, std::string_view(signature.data(), signature.size()), addresses);
}

}  // namespace fp4attn
