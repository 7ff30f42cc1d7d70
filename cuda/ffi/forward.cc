// Output and log-sum-exp from the quantised operands: reads the call, and leaves the launches to the target.
#include "forward.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "arguments.h"
#include "failure.h"
#include "kernels.h"
#include "steps.h"
#include "tiles.h"

namespace fp4attn {
namespace {

constexpr char kStep[] = "forward";
constexpr auto U8 = ffi::DataType::U8;
constexpr auto S32 = ffi::DataType::S32;
constexpr auto F16 = ffi::DataType::F16;
constexpr auto F32 = ffi::DataType::F32;
constexpr auto BF16 = ffi::DataType::BF16;

constexpr int64_t kSectionBytes = 32 << 20;  // of keys and values that the L2 cache keeps
constexpr double kLn2 = 0.6931471805599453, kLog2E = 1.4426950408889634;

class ForwardCall {
 public:
  ForwardCall(CUstream stream, ffi::RemainingArgs operands, ffi::RemainingRets results, ffi::Dictionary attributes)
      : stream_(stream), arguments_(kStep, operands, results), attributes_(kStep, attributes) {}

  void Run() {
    target_ = CurrentTarget();
    TakeAttributes();
    TakeOperands();
    TakeResults();
    if (problem_.sizes.batch * problem_.sizes.query_heads * problem_.sizes.num_queries == 0) return;
    if (target_ == Target::kHopper) {
      LaunchForwardOnHopper(stream_, problem_, expanded_);
    } else {
      LaunchForwardOnBlackwell(stream_, problem_, ordered_);
    }
  }

 private:
  void TakeAttributes() {
    attributes_.Require("recipe_qk_format", {"nvfp4"});
    attributes_.Require("recipe_qk_tensor_scale", {"unit"});
    attributes_.Require("recipe_p_format", {"mxfp4", "e4m3"});
    attributes_.Require("recipe_v_format", {attributes_.Choice("recipe_p_format")});
    problem_.is_mxfp4 = attributes_.Choice("recipe_p_format") == "mxfp4";
    problem_.log2_scale = static_cast<float>(attributes_.Number("scale") * kLog2E);
    if (problem_.is_mxfp4) {
      TakeDirectP();
    } else {
      attributes_.Require("recipe_denominator", {"unquantized"});
      attributes_.Require("recipe_row_reference", {"online_max"});
      problem_.probabilities = "e4m3";
      problem_.rescale_threshold = attributes_.Number("recipe_rescale_threshold_bits");
      problem_.unit = 1 / attributes_.Number("recipe_v_multiplier");
    }
    problem_.window = TakeWindow(attributes_);
  }

  void TakeDirectP() {
    attributes_.Require("recipe_denominator", {"represented"});
    problem_.map = ReadCodeMap(kStep, attributes_.Choice("recipe_code_map"), target_ == Target::kBlackwell);
    if (attributes_.IsChoice("recipe_p_exponent_rule")) {
      Fail(ffi::ErrorCode::kUnimplemented, kStep, ": recipe_p_exponent_rule: expected a number, got ",
           attributes_.Choice("recipe_p_exponent_rule"));
    }
    const double threshold = attributes_.Number("recipe_p_exponent_rule");
    if (!(threshold > 1 && threshold < 2)) {
      Fail(ffi::ErrorCode::kInvalidArgument, kStep, ": recipe_p_exponent_rule: expected a number between 1 and 2, got ",
           threshold);
    }
    problem_.block_offset = static_cast<float>(1 - std::log2(threshold));
    problem_.shift = static_cast<float>(attributes_.Integer("recipe_p_scale_shift"));
    problem_.probabilities = problem_.map.kernel;
    attributes_.Require("recipe_row_reference", {problem_.map.is_mixed ? "anchor" : "zero"});
    if (problem_.map.is_mixed) TakeAnchor();
  }

  void TakeAnchor() {
    const int32_t anchor_keys = attributes_.Integer("recipe_anchor_keys");
    const int32_t expected = problem_.map.is_mixed_in_odd_tiles ? 128 : 32;
    if (anchor_keys != expected) {
      Fail(ffi::ErrorCode::kUnimplemented, kStep, ": recipe_anchor_keys: expected ", expected, ", got ", anchor_keys);
    }
    problem_.probabilities += "_anchor" + std::to_string(anchor_keys);
    attributes_.Require("recipe_anchor_order", {"leading", "strided"});
    problem_.is_ordered = attributes_.Choice("recipe_anchor_order") == "strided";
    attributes_.Require("recipe_margin_unit", {"bits", "raw_score"});
    const float margin = attributes_.Number("recipe_margin");
    const bool bits = attributes_.Choice("recipe_margin_unit") == "bits";
    problem_.margin = bits ? margin / problem_.log2_scale : static_cast<float>(margin * kLn2);
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
    problem_.sizes = {b, t, s, n, k, h};
    CheckSizes(kStep, b, s, k, h);
    CheckHeads(kStep, n, k);
    problem_.query_codes = query.untyped_data();
    problem_.query_pages = query_pages.untyped_data();
    problem_.key_codes = key.untyped_data();
    problem_.key_pages = arguments_.Operand("key.scales", U8, {b, k, Tiles(s), h / 64, kPageBytes}).untyped_data();
    if (problem_.is_mxfp4) {
      problem_.value = arguments_.Operand("value.codes", U8, {b, k, h, PaddedRows(s) / 2}).untyped_data();
      problem_.value_pages = arguments_.Operand("value.scales", U8, {b, k, 1, Tiles(s), kPageBytes}).untyped_data();
    } else {
      problem_.value = arguments_.Operand("value", U8, {b, k, h, PaddedRows(s)}).untyped_data();
    }
    problem_.limits = TakeLimits(arguments_, attributes_, b, t, s);
    problem_.slot_order = arguments_.OptionalOperand(problem_.is_ordered, "slot_order", S32, {s});
  }

  // A program may be for several targets, and then has the memory that each of them works in.
  void TakeResults() {
    const auto& [b, t, s, n, k, h] = problem_.sizes;
    problem_.output = arguments_.Result("output", BF16, {b, t, n, h});
    problem_.lse = arguments_.Result("lse", F32, {b, n, t});
    const bool has_expanded = attributes_.Flag("has_expanded_operands");
    const bool has_ordered = attributes_.Flag("has_ordered_key");
    RequireMemory("has_expanded_operands", has_expanded || target_ != Target::kHopper);
    RequireMemory("has_ordered_key", has_ordered || target_ != Target::kBlackwell || !problem_.is_ordered);
    if (has_expanded) {
      expanded_.key = arguments_.Result("expanded key", F16, {b, k, PaddedRows(s), h});
      if (problem_.is_mxfp4) {
        expanded_.value = arguments_.Result("expanded value", U8, {b, k, h, PaddedRows(s)});
        expanded_.value_exponents = arguments_.Result("exponents of the expanded value", S32, {b, k, Tiles(s)});
      }
      expanded_.counter = arguments_.Result("items taken", S32, {1});
    }
    if (has_ordered) {
      ordered_.codes = arguments_.Result("ordered key.codes", U8, {b, k, PaddedRows(s), h / 2});
      ordered_.pages = arguments_.Result("ordered key.scales", U8, {b, k, Tiles(s), h / 64, kPageBytes});
    }
    arguments_.Finish();
  }

  static void RequireMemory(const char* name, bool is_enough) {
    if (is_enough) return;
    Fail(ffi::ErrorCode::kInvalidArgument, kStep, ": ", name,
         ": expected true on this GPU, got false; the program was made for another one");
  }

  CUstream stream_;
  Arguments arguments_;
  Attributes attributes_;
  Target target_ = Target::kHopper;
  ForwardProblem problem_;
  ExpandedOperands expanded_;
  OrderedKey ordered_;
};

}  // namespace

int32_t ForwardProblem::Section(int64_t head_bytes) const {
  if (window.right == kUnlimited) return 1;
  const int64_t group = std::max<int64_t>(sizes.query_heads / std::max<int64_t>(sizes.kv_heads, 1), 1);
  const int64_t heads = std::max(sizes.batch * sizes.query_heads, group);
  const int64_t most = std::clamp<int64_t>(kSectionBytes / std::max<int64_t>(head_bytes, 1) * group, group, heads);
  const int64_t sections = (heads + most - 1) / most;
  const int64_t groups = (heads / group + sections - 1) / sections;
  return static_cast<int32_t>(groups * group);
}

void Forward(CUstream stream, ffi::RemainingArgs operands, ffi::RemainingRets results, ffi::Dictionary attributes) {
  ForwardCall(stream, operands, results, attributes).Run();
}

}  // namespace fp4attn
