// The code map of a recipe, from the text in which the custom call has it (jax_fp4attn/native/attributes.py).
#pragma once

#include <string>
#include <string_view>

namespace fp4attn {

struct CodeMap {
  std::string kernel;  // part of the kernel's name
  bool is_mixed = false;  // with the exponential on a quarter of the pairs
  bool is_mixed_in_odd_tiles = false;  // of query rows, and in no others
  float slope = 0, intercept = 0, constant = 0;
};

// Throws a Failure for a map that no kernel has; some kernels are mixed in odd tiles alone.
CodeMap ReadCodeMap(std::string_view step, std::string_view text, bool takes_odd_tiles);

}  // namespace fp4attn
