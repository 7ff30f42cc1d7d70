#include "visibility.h"

#include <algorithm>

#include "failure.h"

namespace fp4attn {

Window TakeWindow(const Attributes& attributes) {
  const auto side = [&](const char* name) {
    const int32_t limit = attributes.Integer(name);
    return limit < 0 ? kUnlimited : std::min(limit, kUnlimited);
  };
  Window window = {side("window_left"), side("window_right")};
  if (attributes.Flag("is_causal")) window.right = 0;
  return window;
}

Limits TakeLimits(Arguments& arguments, const Attributes& attributes, int64_t batch, int64_t num_queries,
                  int64_t num_keys) {
  const auto optional = [&](const char* flag, const char* name, const Shape& shape) {
    return arguments.OptionalOperand(attributes.Flag(flag), name, ffi::DataType::S32, shape);
  };
  Limits limits;
  limits.query_lengths = optional("has_query_lengths", "query_lengths", {batch});
  limits.key_lengths = optional("has_key_lengths", "key_lengths", {batch});
  limits.query_segments = optional("has_segment_ids", "segment_ids.query", {batch, num_queries});
  limits.key_segments = optional("has_segment_ids", "segment_ids.key_value", {batch, num_keys});
  limits.key_offset = optional("has_key_offset", "key_offset", {});
  return limits;
}

void CheckHeads(std::string_view step, int64_t query_heads, int64_t kv_heads) {
  if (kv_heads == 0 ? query_heads == 0 : query_heads % kv_heads == 0) return;
  Fail(ffi::ErrorCode::kInvalidArgument, step, ": expected query heads that the key/value heads divide, got ",
       query_heads, " and ", kv_heads);
}

}  // namespace fp4attn
