#include "kernels.h"

#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "driver.h"
#include "failure.h"
// Written by cuda/tabulate.py from the manifests: `Kernel kKernels[]` as declared below.
namespace fp4attn {
namespace {
struct Kernel {
  const char* name;
  const char* entry;
  const char* signature;
  uint32_t threads;
  uint32_t shared_bytes;
  uint32_t images;  // that have it, a bit for each
};
}  // namespace
}  // namespace fp4attn
#include "kernel_table.inc"

#define FP4ATTN_IMAGE(symbol, path)                                                                   \
  asm(".section .rodata\n.balign 64\n.global " #symbol "\n.hidden " #symbol "\n" #symbol ":\n.incbin \"" path \
      "\"\n.byte 0\n.previous\n");                                                                    \
  extern "C" const unsigned char symbol[]

FP4ATTN_IMAGE(fp4attn_image_sm_90a, FP4ATTN_IMAGES "/kernels.sm_90a.cubin");
FP4ATTN_IMAGE(fp4attn_image_sm_100f, FP4ATTN_IMAGES "/kernels.sm_100f.cubin");
FP4ATTN_IMAGE(fp4attn_image_sm_103a, FP4ATTN_IMAGES "/kernels.sm_103a.cubin");

namespace fp4attn {
namespace {

struct Image {
  const char* name;
  const unsigned char* bytes;
  uint32_t bit;  // in the table
};

const Image kSm90a = {"sm_90a", fp4attn_image_sm_90a, 1};
const Image kSm100f = {"sm_100f", fp4attn_image_sm_100f, 2};
const Image kSm103a = {"sm_103a", fp4attn_image_sm_103a, 4};

// GPUs of a compute capability. A kernel is taken from the first of their images that has it; no other image is loaded.
struct Generation {
  int major, minor;
  Target target;
  std::vector<const Image*> images;
};

const std::vector<Generation>& Generations() {
  static const std::vector<Generation>* generations = new std::vector<Generation>{
      {9, 0, Target::kHopper, {&kSm90a}},
      {10, 0, Target::kBlackwell, {&kSm100f}},
      {10, 3, Target::kBlackwell, {&kSm103a, &kSm100f}},
  };
  return *generations;
}

// Null if there are no kernels for them.
const Generation* FindGeneration(int major, int minor) {
  for (const Generation& generation : Generations()) {
    if (generation.major == major && generation.minor == minor) return &generation;
  }
  return nullptr;
}

// Up to this much shared memory a kernel needs no attribute.
constexpr uint32_t kSharedBytesWithoutAttribute = 48 << 10;

CUdevice CurrentDevice(const Driver& driver) {
  CUdevice device;
  driver.Check(driver.ctx_get_device(&device), "cuCtxGetDevice");
  return device;
}

const Generation& GenerationOf(const Driver& driver, CUdevice device) {
  int major = 0, minor = 0;
  driver.Check(driver.device_get_attribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device),
               "cuDeviceGetAttribute");
  driver.Check(driver.device_get_attribute(&minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device),
               "cuDeviceGetAttribute");
  if (const Generation* generation = FindGeneration(major, minor)) return *generation;
  Fail(ffi::ErrorCode::kInvalidArgument, "expected a GPU of compute capability 9.0, 10.0 or 10.3, got ", major, ".",
       minor, "; use implementation='reference'");
}

// An image is loaded once a process; what is remembered of a device is which kernels it takes, and that their
// attributes are set there.
class Library {
 public:
  static Library& Get() {
    static Library* library = new Library;  // Never destroyed: the driver may be gone by then.
    return *library;
  }

  std::pair<const Kernel*, CUkernel> Find(const Driver& driver, std::string_view name) {
    std::lock_guard<std::mutex> lock(mutex_);
    const Kernels& kernels = *Prepare(driver, CurrentDevice(driver)).kernels;
    auto found = kernels.find(name);
    if (found == kernels.end()) Fail(ffi::ErrorCode::kInternal, "no kernel is called ", name);
    return found->second;
  }

  Target PrepareCurrentDevice(const Driver& driver) {
    std::lock_guard<std::mutex> lock(mutex_);
    return Prepare(driver, CurrentDevice(driver)).target;
  }

 private:
  using Kernels = std::map<std::string_view, std::pair<const Kernel*, CUkernel>>;

  struct Device {
    const Kernels* kernels;
    Target target;
  };

  const Device& Prepare(const Driver& driver, CUdevice device) {
    auto ready = devices_.find(device);
    if (ready != devices_.end()) return ready->second;
    const Generation& generation = GenerationOf(driver, device);
    const Kernels& kernels = KernelsOf(driver, generation);
    for (const auto& [name, kernel] : kernels) {
      if (kernel.first->shared_bytes <= kSharedBytesWithoutAttribute) continue;
      driver.Check(driver.kernel_set_attribute(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                               kernel.first->shared_bytes, kernel.second, device),
                   "cuKernelSetAttribute");
    }
    return devices_[device] = {&kernels, generation.target};
  }

  const Kernels& KernelsOf(const Driver& driver, const Generation& generation) {
    auto known = kernels_.find(&generation);
    if (known != kernels_.end()) return known->second;
    Kernels kernels;
    for (const Image* image : generation.images) {
      CUlibrary library = Load(driver, *image);
      for (const Kernel& kernel : kKernels) {
        if ((kernel.images & image->bit) == 0 || kernels.count(kernel.name) > 0) continue;
        CUkernel handle;
        driver.Check(driver.library_get_kernel(&handle, library, kernel.entry), "cuLibraryGetKernel");
        kernels[kernel.name] = {&kernel, handle};
      }
    }
    return kernels_[&generation] = std::move(kernels);
  }

  CUlibrary Load(const Driver& driver, const Image& image) {
    auto loaded = libraries_.find(&image);
    if (loaded != libraries_.end()) return loaded->second;
    CUlibrary library;
    driver.Check(driver.library_load_data(&library, image.bytes, nullptr, nullptr, 0, nullptr, nullptr, 0),
                 std::string("cuLibraryLoadData of the image ") + image.name);
    return libraries_[&image] = library;
  }

  std::mutex mutex_;
  std::map<const Image*, CUlibrary> libraries_;
  std::map<const Generation*, Kernels> kernels_;
  std::map<CUdevice, Device> devices_;
};

}  // namespace

const char* ImageName(int major, int minor, int rank) {
  const Generation* generation = FindGeneration(major, minor);
  if (generation == nullptr || rank < 0 || static_cast<size_t>(rank) >= generation->images.size()) return nullptr;
  return generation->images[rank]->name;
}

int32_t Multiprocessors() {
  const Driver& driver = Driver::Get();
  int count = 0;
  driver.Check(driver.device_get_attribute(&count, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, CurrentDevice(driver)),
               "cuDeviceGetAttribute");
  return count;
}

void LoadKernels() { Library::Get().PrepareCurrentDevice(Driver::Get()); }

Target CurrentTarget() { return Library::Get().PrepareCurrentDevice(Driver::Get()); }

void internal::Launch(CUstream stream, std::string_view name, Grid grid, std::string_view signature,
                      void** parameters) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  const Driver& driver = Driver::Get();
  auto [kernel, handle] = Library::Get().Find(driver, name);
  if (signature != kernel->signature) {
    Fail(ffi::ErrorCode::kInternal, name, ": expected parameters ", kernel->signature, ", got ", signature);
  }
  CUlaunchConfig config = {};
  config.gridDimX = grid.x;
  config.gridDimY = grid.y;
  config.gridDimZ = grid.z;
  config.blockDimX = kernel->threads;
  config.blockDimY = config.blockDimZ = 1;
  config.sharedMemBytes = kernel->shared_bytes;
  config.hStream = stream;
  driver.Check(driver.launch_kernel(&config, reinterpret_cast<CUfunction>(handle), parameters, nullptr),
               "cuLaunchKernelEx");
}

}  // namespace fp4attn
