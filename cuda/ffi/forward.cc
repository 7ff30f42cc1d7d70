// Output and log-sum-exp from the quantised operands: expands key and value, then runs the attention kernel.
#include <algorithm>
#include <cmath>
#include <string>

#include "arguments.h"
#include "code_maps.h"
#include "failure.h"
#include "kernels.h"
#include "steps.h"
#include "tensor_maps.h"
#include "tiles.h"
#include "visibility.h"

namespace fp4attn {
namespace {

constexpr char kStep[] = "forward";
constexpr auto U8 = ffi::DataType::U8;
constexpr auto S32 = ffi::DataType::S32;
constexpr auto F16 = ffi::DataType::F16;
constexpr auto F32 = ffi::DataType::F32;
constexpr auto BF16 = ffi::DataType::BF16;

constexpr int64_t kQueryRows = 192;  // of an item, see cuda/kernels/hopper/forward.py
constexpr uint32_t kRowBytes = 128;  // of a box
constexpr int64_t kSectionBytes = 32 << 20;  // of expanded keys and values that the L2 cache keeps
constexpr double kLn2 = 0.6931471805599453, kLog2E = 1.4426950408889634;

struct Sizes {
  int64_t batch, num_queries, num_keys, query_heads, kv_heads, head_size;
};

class ForwardCall {
 public:
  ForwardCall(CUstream stream, ffi::RemainingArgs operands, ffi::RemainingRets results, ffi::Dictionary attributes)
      : stream_(stream), arguments_(kStep, operands, results), attributes_(kStep, attributes) {}

  void Run() {
    TakeAttributes();
    TakeOperands();
    TakeResults();
    if (sizes_.batch * sizes_.query_heads * sizes_.num_queries == 0) return;
    if (sizes_.num_keys > 0) Expand();
    Attend();
  }

 private:
  bool IsMxfp4() const { return attributes_.Choice("recipe_p_format") == "mxfp4"; }
  bool IsAnchored() const { return attributes_.Choice("recipe_row_reference") == "anchor"; }
  bool IsOrdered() const { return IsAnchored() && attributes_.Choice("recipe_anchor_order") == "strided"; }

  void TakeAttributes() {
    attributes_.Require("recipe_qk_format", {"nvfp4"});
    attributes_.Require("recipe_qk_tensor_scale", {"unit"});
    attributes_.Require("recipe_p_format", {"mxfp4", "e4m3"});
    attributes_.Require("recipe_v_format", {attributes_.Choice("recipe_p_format")});
    log2_scale_ = static_cast<float>(attributes_.Number("scale") * kLog2E);
    if (IsMxfp4()) {
      TakeDirectP();
    } else {
      attributes_.Require("recipe_denominator", {"unquantized"});
      attributes_.Require("recipe_row_reference", {"online_max"});
      probabilities_ = "e4m3";
      rescale_threshold_ = attributes_.Number("recipe_rescale_threshold_bits");
      unit_ = 1 / attributes_.Number("recipe_v_multiplier");
    }
    window_ = TakeWindow(attributes_);
  }

  void TakeDirectP() {
    attributes_.Require("recipe_denominator", {"represented"});
    map_ = ReadCodeMap(kStep, attributes_.Choice("recipe_code_map"));
    if (attributes_.IsChoice("recipe_p_exponent_rule")) {
      Fail(ffi::ErrorCode::kUnimplemented, kStep, ": recipe_p_exponent_rule: expected a number, got ",
           attributes_.Choice("recipe_p_exponent_rule"));
    }
    const double threshold = attributes_.Number("recipe_p_exponent_rule");
    if (!(threshold > 1 && threshold < 2)) {
      Fail(ffi::ErrorCode::kInvalidArgument, kStep, ": recipe_p_exponent_rule: expected a number between 1 and 2, got ",
           threshold);
    }
    block_offset_ = static_cast<float>(1 - std::log2(threshold));
    shift_ = static_cast<float>(attributes_.Integer("recipe_p_scale_shift"));
    probabilities_ = map_.kernel;
    attributes_.Require("recipe_row_reference", {map_.is_mixed ? "anchor" : "zero"});
    if (!IsAnchored()) return;
    const int32_t anchor_keys = attributes_.Integer("recipe_anchor_keys");
    if (anchor_keys != 32) {
      Fail(ffi::ErrorCode::kUnimplemented, kStep, ": recipe_anchor_keys: expected 32, got ", anchor_keys);
    }
    probabilities_ += "_anchor32";
    attributes_.Require("recipe_anchor_order", {"leading", "strided"});
    attributes_.Require("recipe_margin_unit", {"bits", "raw_score"});
    const float margin = attributes_.Number("recipe_margin");
    const bool bits = attributes_.Choice("recipe_margin_unit") == "bits";
    margin_ = bits ? margin / log2_scale_ : static_cast<float>(margin * kLn2);
  }

  void TakeOperands() {
    const ffi::AnyBuffer query = arguments_.Operand("query.codes", U8, {-1, -1, -1, -1});
    const auto q = query.dimensions();
    const int64_t b = q[0], n = q[1], t = q[2], h = 2 * q[3], s = attributes_.Integer("num_keys");
    if (s < 0) Fail(ffi::ErrorCode::kInvalidArgument, kStep, ": num_keys: expected at least 0, got ", s);
    CheckSizes(kStep, b, std::max(t, s), n, h);
    const ffi::AnyBuffer query_pages = arguments_.Operand("query.scales", U8, {b, n, Tiles(t), h / 64, kPageBytes});
    const ffi::AnyBuffer key = arguments_.Operand("key.codes", U8, {b, -1, PaddedRows(s), h / 2});
    const int64_t k = key.dimensions()[1];
    sizes_ = {b, t, s, n, k, h};
    CheckSizes(kStep, b, s, k, h);
    CheckHeads(kStep, n, k);
    query_codes_ = query.untyped_data();
    query_pages_ = query_pages.untyped_data();
    key_codes_ = key.untyped_data();
    key_pages_ = arguments_.Operand("key.scales", U8, {b, k, Tiles(s), h / 64, kPageBytes}).untyped_data();
    if (IsMxfp4()) {
      value_ = arguments_.Operand("value.codes", U8, {b, k, h, PaddedRows(s) / 2}).untyped_data();
      value_pages_ = arguments_.Operand("value.scales", U8, {b, k, 1, Tiles(s), kPageBytes}).untyped_data();
    } else {
      value_ = arguments_.Operand("value", U8, {b, k, h, PaddedRows(s)}).untyped_data();
    }
    limits_ = TakeLimits(arguments_, attributes_, b, t, s);
    slot_order_ = arguments_.OptionalOperand(IsOrdered(), "slot_order", S32, {s});
  }

  void TakeResults() {
    const auto& [b, t, s, n, k, h] = sizes_;
    output_ = arguments_.Result("output", BF16, {b, t, n, h});
    lse_ = arguments_.Result("lse", F32, {b, n, t});
    key_values_ = arguments_.Result("expanded key", F16, {b, k, PaddedRows(s), h});
    if (IsMxfp4()) {
      value_values_ = arguments_.Result("expanded value", U8, {b, k, h, PaddedRows(s)});
      value_exponents_ = arguments_.Result("exponents of the expanded value", S32, {b, k, Tiles(s)});
    }
    arguments_.Finish();
  }

  std::string Kernel(const char* name) const { return std::string(name) + "_h" + std::to_string(sizes_.head_size); }

  void Expand() const {
    const Grid grid = TileGrid(sizes_.kv_heads, sizes_.num_keys, sizes_.batch);
    const int32_t keys = sizes_.num_keys, heads = sizes_.kv_heads;
    Launch(stream_, Kernel("expand_key"), grid, key_codes_, key_pages_, slot_order_, key_values_, keys, heads);
    if (!IsMxfp4()) return;
    Launch(stream_, Kernel("expand_value"), grid, value_, value_pages_, value_values_, value_exponents_, keys, heads);
  }

  void Attend() const {
    const auto& [b, t, s, n, k, h] = sizes_;
    const int64_t slots = PaddedRows(s), items = b * n * ((t + kQueryRows - 1) / kQueryRows);
    const CUtensorMap key_map = MatrixMap(CU_TENSOR_MAP_DATA_TYPE_FLOAT16, key_values_,
                                          b * k * slots, h, kTileRows, kRowBytes);
    const CUtensorMap value_map =
        MatrixMap(CU_TENSOR_MAP_DATA_TYPE_UINT8, IsMxfp4() ? value_values_ : value_, b * k * h,
                  std::max(slots, kTileRows), static_cast<uint32_t>(h), kRowBytes);
    const int32_t num_queries = t, num_keys = s, query_heads = n, kv_heads = k, batches = b, num_items = items;
    const Grid grid = {static_cast<uint32_t>(std::min<int64_t>(items, Multiprocessors())), 1, 1};
    Launch(stream_, Kernel("forward") + "_" + probabilities_, grid, query_codes_, query_pages_, key_map, value_map,
           value_exponents_, output_, lse_, limits_.query_lengths, limits_.key_lengths, limits_.query_segments,
           limits_.key_segments, slot_order_, limits_.key_offset, num_queries, num_keys, query_heads, kv_heads, batches,
           num_items, Section(), window_.left, window_.right, log2_scale_, block_offset_, shift_, margin_, map_.slope,
           map_.intercept, map_.constant, rescale_threshold_, unit_);
  }

  // Query heads whose items run together. Where rows see different numbers of keys those of several heads are sorted,
  // as many heads as have their keys and values in the L2 cache together.
  int32_t Section() const {
    if (window_.right == kUnlimited) return 1;
    const int64_t bytes = PaddedRows(sizes_.num_keys) * sizes_.head_size * 3;
    const int64_t group = sizes_.query_heads / std::max<int64_t>(sizes_.kv_heads, 1);
    return static_cast<int32_t>(std::clamp<int64_t>(kSectionBytes / std::max<int64_t>(bytes, 1) * group, group,
                                                    sizes_.batch * sizes_.query_heads));
  }

  CUstream stream_;
  Arguments arguments_;
  Attributes attributes_;
  std::string probabilities_;
  CodeMap map_;
  float log2_scale_ = 0, block_offset_ = 0, shift_ = 0, margin_ = 0, rescale_threshold_ = 0, unit_ = 1;
  Window window_ = {};
  Limits limits_ = {};
  Sizes sizes_ = {};
  void *query_codes_ = nullptr, *query_pages_ = nullptr, *key_codes_ = nullptr, *key_pages_ = nullptr;
  void *value_ = nullptr, *value_pages_ = nullptr;
  void* slot_order_ = nullptr;
  void *output_ = nullptr, *lse_ = nullptr;
  void *key_values_ = nullptr, *value_values_ = nullptr, *value_exponents_ = nullptr;
};

}  // namespace

void Forward(CUstream stream, ffi::RemainingArgs operands, ffi::RemainingRets results, ffi::Dictionary attributes) {
  ForwardCall(stream, operands, results, attributes).Run();
}

}  // namespace fp4attn
