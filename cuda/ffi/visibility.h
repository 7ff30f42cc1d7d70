// Which keys a query sees: what the kernels take of it.
#pragma once

#include <cstdint>
#include <string_view>

#include "arguments.h"

namespace fp4attn {

// Larger than any sequence; kernels keep offsets below half of it, so that no sum overflows.
constexpr int32_t kUnlimited = 1 << 30;

struct Window {
  int32_t left = kUnlimited, right = kUnlimited;
};

// Of the attributes for causality and windows.
Window TakeWindow(const Attributes& attributes);

// Null where nothing restricts.
struct Limits {
  void* query_lengths = nullptr;
  void* key_lengths = nullptr;
  void* query_segments = nullptr;
  void* key_segments = nullptr;
  void* key_offset = nullptr;
};

// The next operands, as far as the attributes say that they are there.
Limits TakeLimits(Arguments& arguments, const Attributes& attributes, int64_t batch, int64_t num_queries,
                  int64_t num_keys);

// Throws unless key/value heads divide query heads.
void CheckHeads(std::string_view step, int64_t query_heads, int64_t kv_heads);

}  // namespace fp4attn
