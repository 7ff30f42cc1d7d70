// The forward, between the custom call that describes it and the kernels of a target.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <string>

#include "code_maps.h"
#include "visibility.h"

namespace fp4attn {

struct ForwardSizes {
  int64_t batch, num_queries, num_keys, query_heads, kv_heads, head_size;
};

// What a call says. Pointers are to device memory; those that the call leaves out are null.
struct ForwardProblem {
  ForwardSizes sizes = {};
  bool is_mxfp4 = false;  // P and values
  bool is_ordered = false;  // with anchor keys that come first
  std::string probabilities;  // part of a kernel's name
  CodeMap map;
  float log2_scale = 0, block_offset = 0, shift = 0, margin = 0, rescale_threshold = 0, unit = 1;
  Window window;
  Limits limits;
  void *query_codes = nullptr, *query_pages = nullptr, *key_codes = nullptr, *key_pages = nullptr;
  void *value = nullptr, *value_pages = nullptr, *slot_order = nullptr;
  void *output = nullptr, *lse = nullptr;

  // A kernel for the head size.
  std::string Kernel(const char* name) const { return std::string(name) + "_h" + std::to_string(sizes.head_size); }

  // Query heads whose items run together. Where rows see different numbers of keys those of several heads are sorted,
  // at most as many heads as have their keys and values, of so many bytes a head, in the L2 cache together, and as
  // equally many as can be.
  int32_t Section(int64_t head_bytes) const;
};

// Key as float16, MXFP4 value as E5M2 and an exponent for each tile; and a count of the items that have been taken.
struct ExpandedOperands {
  void *key = nullptr, *value = nullptr, *value_exponents = nullptr, *counter = nullptr;
};

// Key in the order of the slots.
struct OrderedKey {
  void *codes = nullptr, *pages = nullptr;
};

void LaunchForwardOnHopper(CUstream stream, const ForwardProblem& problem, const ExpandedOperands& expanded);
void LaunchForwardOnBlackwell(CUstream stream, const ForwardProblem& problem, const OrderedKey& ordered);

}  // namespace fp4attn
