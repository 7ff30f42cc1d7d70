// A stand-in for the CUDA driver. It runs nothing; every call becomes a line of JSON, which `stand_in_take` hands over.
//
// An image must be an ELF file that has the entries asked for. The image also says how many bytes each parameter of an
// entry has, so that a launch is read without help from the code under test. Pointers and numbers are written as the
// unsigned integers that their bytes are, and a tensor map as its number among all that were made.
#include <cuda.h>
#include <elf.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_PARAMETERS = 64, INFO_PARAMETER = 0x17, INFO_WITH_PAYLOAD = 4, MAX_LINE = 4096, MULTIPROCESSORS = 5,
       MAX_RANK = 5 };

struct kernel {
  char entry[128];
  int num_parameters;
  uint32_t bytes[MAX_PARAMETERS];
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static char *lines, *taken;
static size_t lines_size;
static int capability_major, capability_minor, current_device;
static char failing_call[64];
static int failing_code;
static uint64_t tensor_maps;

// Takes another device; no call fails any more.
void stand_in_pretend(int major, int minor, int device) {
  capability_major = major;
  capability_minor = minor;
  current_device = device;
  failing_call[0] = '\0';
}

void stand_in_fail(const char *call, int code) {
  snprintf(failing_call, sizeof failing_call, "%s", call);
  failing_code = code;
}

// The lines since the last call.
const char *stand_in_take(void) {
  pthread_mutex_lock(&mutex);
  free(taken);
  taken = lines;
  lines = NULL;
  lines_size = 0;
  pthread_mutex_unlock(&mutex);
  return taken ? taken : "";
}

// Adds the line of a call, and gives what the call shall return.
static CUresult record(const char *call, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  pthread_mutex_lock(&mutex);
  lines = realloc(lines, lines_size + MAX_LINE);
  lines_size += sprintf(lines + lines_size, "{\"call\": \"%s\", ", call);
  lines_size += vsprintf(lines + lines_size, format, arguments);
  lines_size += sprintf(lines + lines_size, "}\n");
  pthread_mutex_unlock(&mutex);
  va_end(arguments);
  return strcmp(call, failing_call) == 0 ? failing_code : CUDA_SUCCESS;
}

static const Elf64_Shdr *section(const unsigned char *image, const char *prefix, const char *entry) {
  const Elf64_Ehdr *header = (const Elf64_Ehdr *)image;
  const Elf64_Shdr *sections = (const Elf64_Shdr *)(image + header->e_shoff);
  const char *names = (const char *)image + sections[header->e_shstrndx].sh_offset;
  char wanted[256];
  snprintf(wanted, sizeof wanted, "%s%s", prefix, entry);
  for (int i = 0; i < header->e_shnum; ++i) {
    if (strcmp(names + sections[i].sh_name, wanted) == 0) return &sections[i];
  }
  return NULL;
}

static void read_parameters(struct kernel *kernel, const unsigned char *image, const Elf64_Shdr *info) {
  const unsigned char *at = image + info->sh_offset, *end = at + info->sh_size;
  while (at < end) {
    uint16_t payload, ordinal;
    uint32_t packed;
    memcpy(&payload, at + 2, sizeof payload);
    if (at[1] == INFO_PARAMETER) {
      memcpy(&ordinal, at + 8, sizeof ordinal);
      memcpy(&packed, at + 12, sizeof packed);
      kernel->bytes[ordinal] = packed >> 18;
      kernel->num_parameters += 1;
    }
    at += 4 + (at[0] == INFO_WITH_PAYLOAD ? payload : 0);
  }
}

CUresult cuCtxGetDevice(CUdevice *device) {
  *device = current_device;
  return record(__func__, "\"device\": %d", current_device);
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  *value = attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR   ? capability_major
           : attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR ? capability_minor
           : attribute == CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT     ? MULTIPROCESSORS
                                                                       : -1;
  return record(__func__, "\"attribute\": %d, \"device\": %d", attribute, device);
}

CUresult cuGetErrorString(CUresult error, const char **text_of_error) {
  static char texts[1024][32];
  const int known = error < 1000;
  *text_of_error = known ? texts[error] : NULL;
  if (known) sprintf(texts[error], "text of error %d", error);
  return known ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuLibraryLoadData(CUlibrary *library, const void *code, CUjit_option *jit_options, void **jit_values,
                           unsigned int num_jit_options, CUlibraryOption *options, void **values,
                           unsigned int num_options) {
  (void)jit_options, (void)jit_values, (void)options, (void)values;
  const Elf64_Ehdr *header = code;
  if (memcmp(header->e_ident, ELFMAG, SELFMAG) != 0) return CUDA_ERROR_INVALID_IMAGE;
  const size_t sections_end = header->e_shoff + (size_t)header->e_shnum * header->e_shentsize;
  const size_t segments_end = header->e_phoff + (size_t)header->e_phnum * header->e_phentsize;
  *library = (CUlibrary)code;
  return record(__func__, "\"image\": %zu, \"bytes\": %zu, \"options\": %u", (size_t)code,
                sections_end > segments_end ? sections_end : segments_end, num_jit_options + num_options);
}

CUresult cuLibraryGetKernel(CUkernel *handle, CUlibrary library, const char *entry) {
  const unsigned char *image = (const unsigned char *)library;
  const Elf64_Shdr *info = section(image, ".nv.info.", entry);
  if (!section(image, ".text.", entry) || !info) return CUDA_ERROR_NOT_FOUND;
  struct kernel *kernel = calloc(1, sizeof *kernel);
  snprintf(kernel->entry, sizeof kernel->entry, "%s", entry);
  read_parameters(kernel, image, info);
  *handle = (CUkernel)kernel;
  return record(__func__, "\"entry\": \"%s\"", entry);
}

CUresult cuKernelSetAttribute(CUfunction_attribute attribute, int value, CUkernel handle, CUdevice device) {
  return record(__func__, "\"entry\": \"%s\", \"attribute\": %d, \"value\": %d, \"device\": %d",
                ((const struct kernel *)handle)->entry, attribute, value, device);
}

static void print_list(char *text, const cuuint64_t *values, unsigned int count) {
  size_t length = sprintf(text, "[");
  for (unsigned int i = 0; i < count; ++i) {
    length += sprintf(text + length, "%s%llu", i ? ", " : "", (unsigned long long)values[i]);
  }
  sprintf(text + length, "]");
}

CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *data,
                                const cuuint64_t *extents, const cuuint64_t *strides, const cuuint32_t *box,
                                const cuuint32_t *steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  char lists[4][MAX_RANK * 24];
  cuuint64_t wide[2][MAX_RANK];
  if (rank == 0 || rank > MAX_RANK) return CUDA_ERROR_INVALID_VALUE;
  for (cuuint32_t i = 0; i < rank; ++i) {
    wide[0][i] = box[i];
    wide[1][i] = steps[i];
  }
  print_list(lists[0], extents, rank);
  print_list(lists[1], strides, rank - 1);
  print_list(lists[2], wide[0], rank);
  print_list(lists[3], wide[1], rank);
  const uint64_t number = __atomic_add_fetch(&tensor_maps, 1, __ATOMIC_RELAXED);
  memset(map, 0xff, sizeof *map);
  memcpy(map, &number, sizeof number);
  return record(__func__,
                "\"number\": %llu, \"type\": %d, \"data\": %zu, \"extents\": %s, \"strides\": %s, \"box\": %s, "
                "\"steps\": %s, \"interleave\": %d, \"swizzle\": %d, \"promotion\": %d, \"fill\": %d",
                (unsigned long long)number, type, (size_t)data, lists[0], lists[1], lists[2], lists[3], interleave,
                swizzle, promotion, fill);
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction handle, void **parameters, void **extra) {
  (void)extra;
  const struct kernel *kernel = (const struct kernel *)handle;
  char values[MAX_PARAMETERS * 24] = "", bytes[MAX_PARAMETERS * 4] = "", cluster[64] = "null";
  size_t length = 0, bytes_length = 0;
  for (int i = 0; i < kernel->num_parameters; ++i) {
    uint64_t value = 0;
    memcpy(&value, parameters[i], kernel->bytes[i] < sizeof value ? kernel->bytes[i] : sizeof value);
    length += sprintf(values + length, "%s%llu", i ? ", " : "", (unsigned long long)value);
    bytes_length += sprintf(bytes + bytes_length, "%s%u", i ? ", " : "", kernel->bytes[i]);
  }
  for (unsigned int i = 0; i < config->numAttrs; ++i) {
    if (config->attrs[i].id != CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION) continue;
    const CUlaunchAttributeValue *value = &config->attrs[i].value;
    sprintf(cluster, "[%u, %u, %u]", value->clusterDim.x, value->clusterDim.y, value->clusterDim.z);
  }
  return record(__func__,
                "\"entry\": \"%s\", \"device\": %d, \"stream\": %zu, \"grid\": [%u, %u, %u], \"block\": [%u, %u, %u], "
                "\"shared_bytes\": %u, \"attributes\": %u, \"cluster\": %s, \"parameters\": [%s], "
                "\"parameter_bytes\": [%s]",
                kernel->entry, current_device, (size_t)config->hStream, config->gridDimX, config->gridDimY,
                config->gridDimZ, config->blockDimX, config->blockDimY, config->blockDimZ, config->sharedMemBytes,
                config->numAttrs, cluster, values, bytes);
}
