// The code map of a recipe, from the text in which the custom call has it (jax_fp4attn/native/attributes.py).
#pragma once

#include <string>
#include <string_view>

namespace fp4attn {

struct CodeMap {
  std::string kernel;  // part of the kernel's name
  bool is_mixed = false;  // with the exponential on a quarter of the pairs
  float slope = 0, intercept = 0, constant = 0;
};

// Throws a Failure for a map that no kernel has.
CodeMap ReadCodeMap(std::string_view step, std::string_view text);

}  // namespace fp4attn
