#include "code_maps.h"

#include <cstdlib>
#include <vector>

#include "failure.h"

namespace fp4attn {
namespace {

// The exponential on the published quarter of the pairs of keys, and the query tiles that have it.
constexpr std::string_view kMixed = "|exponential(0.0)|0,4,8,12;1,4,9,12;2,4,10,12;3,4,11,12|";
constexpr std::string_view kEveryTile = "xx", kOddTiles = "-x";

bool RemoveEnd(std::string_view& text, std::string_view end) {
  if (text.size() <= end.size() || text.substr(text.size() - end.size()) != end) return false;
  text.remove_suffix(end.size());
  return true;
}

[[noreturn]] void Unknown(std::string_view step, std::string_view text) {
  Fail(ffi::ErrorCode::kUnimplemented, step,
       ": recipe_code_map: expected one affine, signedsquare or exponential map, or an affine one mixed with the "
       "exponential on a quarter of the pairs, got ",
       text);
}

}  // namespace

CodeMap ReadCodeMap(std::string_view step, std::string_view text, bool takes_odd_tiles) {
  std::string_view map = text;
  const bool odd = takes_odd_tiles && RemoveEnd(map, kOddTiles);
  const bool mixed = (odd || RemoveEnd(map, kEveryTile)) && RemoveEnd(map, kMixed);
  const size_t open = map.find('(');
  if (open == std::string_view::npos || map.back() != ')' || map.find(')') != map.size() - 1) Unknown(step, text);
  const std::string_view kind = map.substr(0, open);
  const std::string inside(map.substr(open + 1, map.size() - open - 2));
  std::vector<float> numbers;
  const char* at = inside.c_str();
  for (char* end = nullptr;; at = end + 1) {
    numbers.push_back(static_cast<float>(std::strtod(at, &end)));
    if (end == at || (*end != ',' && *end != '\0')) Unknown(step, text);
    if (*end == '\0') break;
  }
  if (kind == "affine" && numbers.size() == 2) {
    return {odd ? "affine_mixed_odd" : mixed ? "affine_mixed" : "affine", mixed, odd, numbers[0], numbers[1], 0};
  }
  if (kind == "signedsquare" && numbers.size() == 3 && !mixed) {
    return {"square", false, false, numbers[0], numbers[1], numbers[2]};
  }
  if (kind == "exponential" && numbers.size() == 1 && !mixed) return {"exponential", false, false, 1, numbers[0], 0};
  Unknown(step, text);
}

}  // namespace fp4attn
