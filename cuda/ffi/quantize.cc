// Query, key and value to the operands of the forward and, in training, of the backward.
#include <cmath>
#include <limits>
#include <string>

#include "arguments.h"
#include "failure.h"
#include "kernels.h"
#include "steps.h"
#include "tiles.h"

namespace fp4attn {
namespace {

constexpr auto U8 = ffi::DataType::U8;
constexpr auto S32 = ffi::DataType::S32;
constexpr auto BF16 = ffi::DataType::BF16;

struct Sizes {
  int64_t batch, num_queries, num_keys, query_heads, kv_heads, head_size;
};

// Which rows of an input count; null pointers where nothing restricts them.
struct Limits {
  void* lengths = nullptr;
  void* segments = nullptr;
};

class QuantizeCall {
 public:
  QuantizeCall(std::string_view step, bool for_training, CUstream stream, ffi::RemainingArgs operands,
               ffi::RemainingRets results, ffi::Dictionary attributes)
      : step_(step),
        for_training_(for_training),
        stream_(stream),
        arguments_(step, operands, results),
        attributes_(step, attributes) {}

  void Run() {
    TakeAttributes();
    TakeOperands();
    TakeResults();
    QuantizeRows(query_, query_limits_, query_codes_, query_pages_, query_columns_, sizes_.num_queries,
                 sizes_.query_heads, sizes_.num_queries);
    QuantizeRows(key_, key_limits_, key_codes_, key_pages_, key_columns_, sizes_.num_keys, sizes_.kv_heads,
                 PaddedRows(sizes_.num_keys));
    if (IsMxfp4()) {
      QuantizeValueMxfp4();
    } else {
      QuantizeValueE4m3();
    }
  }

 private:
  bool IsMxfp4() const { return attributes_.Choice("recipe_v_format") == "mxfp4"; }
  bool IsFolded() const { return attributes_.Choice("recipe_qk_scale_fold") == "k64_mse" && sizes_.head_size == 128; }
  bool HasSlotOrder() const {
    return attributes_.Choice("recipe_row_reference") == "anchor" &&
           attributes_.Choice("recipe_anchor_order") == "strided";
  }

  void TakeAttributes() {
    attributes_.Require("recipe_qk_format", {"nvfp4"});
    attributes_.Require("recipe_qk_tensor_scale", {"unit"});
    attributes_.Require("recipe_qk_scale_fold", {"none", "k64_mse"});
    attributes_.Require("recipe_qk_ties", {"even", "toward_zero"});
    attributes_.Require("recipe_v_format", {"mxfp4", "e4m3"});
    ties_toward_zero_ = attributes_.Choice("recipe_qk_ties") == "toward_zero";
    backward_multiplier_ = attributes_.Number("recipe_backward_multiplier");
    if (IsMxfp4()) {
      exponent_rule_ = ExponentRule();
      channels_per_scale_ = attributes_.Integer("recipe_v_channels_per_scale");
      if (channels_per_scale_ != 1 && channels_per_scale_ != 32) {
        Fail(ffi::ErrorCode::kUnimplemented, step_, ": recipe_v_channels_per_scale: expected 1 or 32, got ",
             channels_per_scale_);
      }
    } else {
      value_multiplier_ = attributes_.Number("recipe_v_multiplier");
    }
    if (for_training_) {
      attributes_.Require("recipe_backward", {"fp8"});
      attributes_.Require("recipe_backward_qk", {"source"});
    }
  }

  void TakeOperands() {
    const ffi::AnyBuffer query = arguments_.Operand("query", BF16, {-1, -1, -1, -1});
    const auto q = query.dimensions();
    const ffi::AnyBuffer key = arguments_.Operand("key", BF16, {q[0], -1, -1, q[3]});
    const auto k = key.dimensions();
    sizes_ = {q[0], q[1], k[1], q[2], k[2], q[3]};
    CheckSizes(step_, sizes_.batch, std::max(sizes_.num_queries, sizes_.num_keys),
               std::max(sizes_.query_heads, sizes_.kv_heads), sizes_.head_size);
    query_ = query.untyped_data();
    key_ = key.untyped_data();
    value_ = arguments_.Operand("value", BF16, {q[0], k[1], k[2], q[3]}).untyped_data();
    const auto optional = [&](const char* flag, const char* name, const Shape& shape) {
      return arguments_.OptionalOperand(attributes_.Flag(flag), name, S32, shape);
    };
    query_limits_.lengths = optional("has_query_lengths", "query_lengths", {q[0]});
    key_limits_.lengths = optional("has_key_lengths", "key_lengths", {q[0]});
    query_limits_.segments = optional("has_segment_ids", "segment_ids.query", {q[0], q[1]});
    key_limits_.segments = optional("has_segment_ids", "segment_ids.key_value", {q[0], k[1]});
    slot_order_ = arguments_.OptionalOperand(IsMxfp4() && HasSlotOrder(), "slot_order", S32, {k[1]});
  }

  void TakeResults() {
    const auto& [b, t, s, n, k, h] = sizes_;
    const int64_t slots = PaddedRows(s), tiles = Tiles(s);
    query_codes_ = arguments_.Result("query.codes", U8, {b, n, t, h / 2});
    query_pages_ = arguments_.Result("query.scales", U8, {b, n, Tiles(t), h / 64, kPageBytes});
    key_codes_ = arguments_.Result("key.codes", U8, {b, k, slots, h / 2});
    key_pages_ = arguments_.Result("key.scales", U8, {b, k, tiles, h / 64, kPageBytes});
    if (IsMxfp4()) {
      value_codes_ = arguments_.Result("value.codes", U8, {b, k, h, slots / 2});
      value_pages_ = arguments_.Result("value.scales", U8, {b, k, 1, tiles, kPageBytes});
    } else {
      value_codes_ = arguments_.Result("value", U8, {b, k, h, slots});
    }
    if (for_training_) {
      query_columns_ = arguments_.Result("query for the backward", U8, {b, n, h, PaddedRows(t)});
      key_columns_ = arguments_.Result("key for the backward", U8, {b, k, h, slots});
      value_rows_ = arguments_.Result("value for the backward", U8, {b, k, slots, h});
    }
    arguments_.Finish();
  }

  std::string Kernel(const char* name, const char* suffix, const char* training_suffix) const {
    const std::string base = std::string(name) + "_h" + std::to_string(sizes_.head_size) + suffix;
    return for_training_ ? base + training_suffix : base;
  }

  void QuantizeRows(void* source, const Limits& limits, void* codes, void* pages, void* columns, int64_t num_rows,
                    int64_t heads, int64_t code_rows) const {
    const Grid grid = TileGrid(heads, num_rows, sizes_.batch);
    const int32_t rows = num_rows, num_heads = heads, written_rows = code_rows;
    const char* name = IsFolded() ? "quantize_folded_rows" : "quantize_rows";
    Launch(stream_, Kernel(name, "", "_with_columns"), grid, source, codes, pages, columns, limits.lengths,
           limits.segments, rows, num_heads, written_rows, ties_toward_zero_, backward_multiplier_);
  }

  void QuantizeValueE4m3() const {
    const Grid grid = TileGrid(sizes_.kv_heads, sizes_.num_keys, sizes_.batch);
    const int32_t rows = sizes_.num_keys, heads = sizes_.kv_heads;
    Launch(stream_, Kernel("quantize_value_e4m3", "", "_with_rows"), grid, value_, value_codes_, value_rows_,
           key_limits_.lengths, key_limits_.segments, rows, heads, value_multiplier_, backward_multiplier_);
  }

  void QuantizeValueMxfp4() const {
    const Grid grid = TileGrid(sizes_.kv_heads, sizes_.num_keys, sizes_.batch);
    const int32_t rows = sizes_.num_keys, heads = sizes_.kv_heads;
    const std::string name = Kernel("quantize_value_mxfp4", HasSlotOrder() ? "_ordered" : "", "_with_rows");
    Launch(stream_, name, grid, value_, value_codes_, value_pages_, value_rows_, key_limits_.lengths,
           key_limits_.segments, slot_order_, rows, heads, channels_per_scale_,
           exponent_rule_.round_up_at, exponent_rule_.odd_weight, backward_multiplier_);
  }

  struct Rule {
    int32_t round_up_at = 0, odd_weight = 0;
  };

  // From which mantissa of bfloat16, of 7 bits, the exponent of a block is raised.
  Rule ExponentRule() const {
    constexpr int32_t kNever = 1 << 8;
    constexpr char kName[] = "recipe_v_exponent_rule";
    if (!attributes_.IsChoice(kName)) {
      const float threshold = attributes_.Number(kName);
      if (!(threshold > 1 && threshold < 2)) {
        Fail(ffi::ErrorCode::kInvalidArgument, step_, ": ", kName, ": expected a number between 1 and 2, got ",
             threshold);
      }
      return {static_cast<int32_t>(std::ceil((threshold - 1) * 128)), 0};
    }
    const std::string_view rule = attributes_.Choice(kName);
    if (rule == "floor") return {kNever, 0};
    if (rule == "ceil") return {1, 0};
    if (rule == "rte") return {65, 1};
    Fail(ffi::ErrorCode::kUnimplemented, step_, ": ", kName, ": expected floor, ceil, rte or a number, got ", rule);
  }

  std::string_view step_;
  bool for_training_;
  CUstream stream_;
  Arguments arguments_;
  Attributes attributes_;
  Rule exponent_rule_;
  int32_t ties_toward_zero_ = 0, channels_per_scale_ = 0;
  float backward_multiplier_ = 0, value_multiplier_ = 0;
  Sizes sizes_ = {};
  Limits query_limits_, key_limits_;
  void *query_ = nullptr, *key_ = nullptr, *value_ = nullptr, *slot_order_ = nullptr;
  void *query_codes_ = nullptr, *query_pages_ = nullptr, *query_columns_ = nullptr;
  void *key_codes_ = nullptr, *key_pages_ = nullptr, *key_columns_ = nullptr;
  void *value_codes_ = nullptr, *value_pages_ = nullptr, *value_rows_ = nullptr;
};

}  // namespace

void Quantize(CUstream stream, ffi::RemainingArgs operands, ffi::RemainingRets results, ffi::Dictionary attributes) {
  QuantizeCall("quantize", false, stream, operands, results, attributes).Run();
}

void QuantizeForTraining(CUstream stream, ffi::RemainingArgs operands, ffi::RemainingRets results,
                         ffi::Dictionary attributes) {
  QuantizeCall("quantize_for_training", true, stream, operands, results, attributes).Run();
}

}  // namespace fp4attn
