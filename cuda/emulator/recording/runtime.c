/* Stands in for CuTe DSL's runtime library, whose functions its compiled host code calls: launches and tensor maps go
   to the functions that Python registered, everything else succeeds without doing anything. */

#include <stddef.h>
#include <stdint.h>

typedef int (*Launch)(const void *configuration, void *kernel, void **parameters);
typedef int (*Encode)(void *map, int data_type, uint32_t rank, void *address, const uint64_t *dims,
                      const uint64_t *strides, const uint32_t *box, const uint32_t *element_strides, int interleave,
                      int swizzle, int l2_promotion, int fill);
typedef int (*FindKernel)(void **kernel, const char *name);

static Launch launch;
static Encode encode;
static FindKernel find_kernel;

void register_functions(Launch new_launch, Encode new_encode, FindKernel new_find_kernel) {
  launch = new_launch;
  encode = new_encode;
  find_kernel = new_find_kernel;
}

int _cudaLaunchKernelEx(const void *configuration, void *kernel, void **parameters) {
  return launch(configuration, kernel, parameters);
}

int _cuTensorMapEncodeTiled(void *map, int data_type, uint32_t rank, void *address, const uint64_t *dims,
                            const uint64_t *strides, const uint32_t *box, const uint32_t *element_strides,
                            int interleave, int swizzle, int l2_promotion, int fill) {
  return encode(map, data_type, rank, address, dims, strides, box, element_strides, interleave, swizzle, l2_promotion,
                fill);
}

int _cudaLibraryGetKernel(void **kernel, void *library, const char *name) {
  (void)library;
  return find_kernel(kernel, name);
}

int _cudaLibraryLoadData(void **library) {
  static int loaded;
  *library = &loaded;
  return 0;
}

int _cudaGetDevice(int *device) {
  *device = 0;
  return 0;
}

int _cudaDeviceGetAttribute(int *value) {
  *value = 0;
  return 0;
}

int _cuKernelGetAttribute(int *value) {
  *value = 0;
  return 0;
}

/* A failed call has left its exception with Python. */
void cuda_dialect_assert_success(void) {}

int _cudaLibraryUnload(void) { return 0; }
int _cudaKernelSetAttributeForDevice(void) { return 0; }
int _cudaFuncSetAttribute(void) { return 0; }
int _cudaSetDevice(void) { return 0; }
