// Gradients of query, key and value from the quantised operands and the row operands.
#include <algorithm>
#include <cmath>
#include <string>

#include "arguments.h"
#include "failure.h"
#include "kernels.h"
#include "steps.h"
#include "tensor_maps.h"
#include "tiles.h"
#include "visibility.h"

namespace fp4attn {
namespace {

constexpr char kStep[] = "backward";
constexpr auto U8 = ffi::DataType::U8;
constexpr auto F16 = ffi::DataType::F16;
constexpr auto F32 = ffi::DataType::F32;
constexpr auto BF16 = ffi::DataType::BF16;
constexpr auto kF16Map = CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
constexpr auto kU8Map = CU_TENSOR_MAP_DATA_TYPE_UINT8;
constexpr int64_t kStepRows = 64;  // queries, or keys, of one step of the loops; see cuda/kernels/hopper/backward*.py
constexpr uint32_t kHalfRow = 64, kRow = 128;  // bytes of a box
constexpr int64_t kQueryBytes = 9;  // of a channel: float16 and E4M3 of the query, E5M2 dO twice, float32 dQ
constexpr int64_t kSectionBytes = 20 << 20;      // of queries that the L2 cache keeps
constexpr int64_t kMostSectionBytes = 80 << 20;  // of which it keeps enough
constexpr double kLog2E = 1.4426950408889634;

struct Sizes {
  int64_t batch, num_queries, num_keys, query_heads, kv_heads, head_size;
};

class BackwardCall {
 public:
  BackwardCall(CUstream stream, ffi::RemainingArgs operands, ffi::RemainingRets results, ffi::Dictionary attributes)
      : stream_(stream), arguments_(kStep, operands, results), attributes_(kStep, attributes) {}

  void Run() {
    TakeAttributes();
    TakeOperands();
    TakeResults();
    const auto& [b, t, s, n, k, h] = sizes_;
    if (b * n * t == 0 && b * k * s == 0) return;
    Prepare();
    if (b * k * s > 0) KeysAndValues();
    if (ordered_) {
      Queries();
    } else {
      FinishQueries();
    }
  }

 private:
  void TakeAttributes() {
    attributes_.Require("recipe_backward", {"fp8"});
    attributes_.Require("recipe_backward_qk", {"source"});
    attributes_.Require("recipe_qk_format", {"nvfp4"});
    attributes_.Require("recipe_qk_tensor_scale", {"unit"});
    attributes_.Require("recipe_dq_accumulation", {"float32", "float32_ordered"});
    ordered_ = attributes_.Choice("recipe_dq_accumulation") == "float32_ordered";
    const float scale = attributes_.Number("scale"), multiplier = attributes_.Number("recipe_backward_multiplier");
    log2_scale_ = static_cast<float>(scale * kLog2E);
    lift_ = static_cast<float>(attributes_.Integer("recipe_backward_p_lift_bits"));
    correction_ = attributes_.Number("recipe_backward_lse_correction");
    factor_ = scale / (multiplier * multiplier);
    unit_ = 1 / (std::exp2(lift_) * multiplier);
    window_ = TakeWindow(attributes_);
  }

  void TakeOperands() {
    const ffi::AnyBuffer query = arguments_.Operand("score_query.codes", U8, {-1, -1, -1, -1});
    const auto q = query.dimensions();
    const int64_t b = q[0], n = q[1], t = q[2], h = 2 * q[3], s = attributes_.Integer("num_keys");
    if (s < 0) Fail(ffi::ErrorCode::kInvalidArgument, kStep, ": num_keys: expected at least 0, got ", s);
    const auto operand = [&](const char* name, ffi::DataType dtype, const Shape& shape) {
      return arguments_.Operand(name, dtype, shape).untyped_data();
    };
    query_codes_ = query.untyped_data();
    query_pages_ = operand("score_query.scales", U8, {b, n, Tiles(t), h / 64, kPageBytes});
    const ffi::AnyBuffer key = arguments_.Operand("score_key.codes", U8, {b, -1, PaddedRows(s), h / 2});
    const int64_t k = key.dimensions()[1];
    sizes_ = {b, t, s, n, k, h};
    CheckSizes(kStep, b, std::max(t, s), std::max(n, k), h);
    CheckHeads(kStep, n, k);
    key_codes_ = key.untyped_data();
    key_pages_ = operand("score_key.scales", U8, {b, k, Tiles(s), h / 64, kPageBytes});
    query_columns_ = operand("query", U8, {b, n, h, PaddedRows(t)});
    key_columns_ = operand("key", U8, {b, k, h, PaddedRows(s)});
    value_ = operand("value", U8, {b, k, PaddedRows(s), h});
    gradient_ = operand("output_gradient", U8, {b, n, PaddedRows(t), h});
    gradient_columns_ = operand("output_gradient_columns", U8, {b, n, h, PaddedRows(t)});
    row_statistic_ = operand("row_statistic", F32, {b, n, t});
    lse_ = operand("lse", F32, {b, n, t});
    gradient_scale_ = operand("gradient_scale", F32, {b, k});
    limits_ = TakeLimits(arguments_, attributes_, b, t, s);
  }

  void TakeResults() {
    const auto& [b, t, s, n, k, h] = sizes_;
    query_gradient_ = arguments_.Result("query gradient", BF16, {b, t, n, h});
    key_gradient_ = arguments_.Result("key gradient", BF16, {b, s, k, h});
    value_gradient_ = arguments_.Result("value gradient", BF16, {b, s, k, h});
    query_values_ = arguments_.Result("expanded query", F16, {b, n, PaddedRows(t), h});
    key_values_ = arguments_.Result("expanded key", F16, {b, k, PaddedRows(s), h});
    statistics_ = arguments_.Result("row statistics", F32, {b, n, PaddedRows(t) / kStepRows, 2, kStepRows});
    if (!ordered_) query_sums_ = arguments_.Result("sums of the query gradient", F32, {b, n, PaddedRows(t), h});
    arguments_.Finish();
  }

  std::string Kernel(const char* name) const { return std::string(name) + "_h" + std::to_string(sizes_.head_size); }

  void Prepare() const {
    const auto& [b, t, s, n, k, h] = sizes_;
    const int32_t num_queries = t, num_keys = s, query_heads = n, kv_heads = k;
    void *const no_order = nullptr, *const no_counter = nullptr;
    Launch(stream_, Kernel("expand_key"), TileGrid(k, s, b), key_codes_, key_pages_, no_order, key_values_,
           no_counter, num_keys, kv_heads);
    Launch(stream_, Kernel("backward_prepare"), TileGrid(n, t, b), query_codes_, query_pages_, lse_, row_statistic_,
           query_values_, statistics_, query_sums_, num_queries, query_heads, lift_, correction_, factor_);
  }

  void KeysAndValues() const {
    const auto& [b, t, s, n, k, h] = sizes_;
    const CUtensorMap query_map = QueryMap(kStepRows), key_map = KeyMap(kTileRows);
    const CUtensorMap value_map = ValueMap(kTileRows), gradient_map = GradientMap(kStepRows);
    const int64_t rows = std::max(PaddedRows(t), kTileRows);
    const CUtensorMap query_columns_map = Columns(query_columns_, b * n * h, rows, kHalfRow);
    const CUtensorMap gradient_columns_map = Columns(gradient_columns_, b * n * h, rows, kHalfRow);
    const CUtensorMap key_columns_map = Columns(key_columns_, b * k * h, PaddedRows(s), kRow);
    const int32_t num_queries = t, num_keys = s, query_heads = n, kv_heads = k;
    const Grid grid = {static_cast<uint32_t>(b * k * Tiles(s)), 1, 1};
    Launch(stream_, Kernel("backward") + (ordered_ ? "_ordered" : ""), grid, query_map, key_map, value_map,
           gradient_map, query_columns_map, gradient_columns_map, key_columns_map, statistics_, gradient_scale_,
           query_sums_, key_gradient_, value_gradient_, limits_.query_lengths, limits_.key_lengths,
           limits_.query_segments, limits_.key_segments, limits_.key_offset, num_queries, num_keys, query_heads,
           kv_heads, Section(), window_.left, window_.right, log2_scale_, lift_, factor_, unit_);
  }

  // Key/value heads whose thread blocks come together. Their queries are to stay in the L2 cache; but if they have too
  // few key tiles to occupy the device, and attention is causal, the longest of the next ones come late. The sections
  // are about equally large.
  int32_t Section() const {
    const auto& [b, t, s, n, k, h] = sizes_;
    const int64_t head_bytes = std::max<int64_t>(n / k, 1) * std::max(PaddedRows(t), kTileRows) * h * kQueryBytes;
    const int64_t most = window_.right == kUnlimited ? 1 : kMostSectionBytes / head_bytes;
    const int64_t occupying = std::min(Multiprocessors() / Tiles(s), most);
    const int64_t heads = std::clamp<int64_t>(std::max(kSectionBytes / head_bytes, occupying), 1, b * k);
    const int64_t sections = b * k / heads;
    return static_cast<int32_t>((b * k + sections - 1) / sections);
  }

  void FinishQueries() const {
    const auto& [b, t, s, n, k, h] = sizes_;
    const int32_t num_queries = t, query_heads = n, heads_a_group = k == 0 ? 1 : n / k;
    const Grid grid = {static_cast<uint32_t>(n), static_cast<uint32_t>((t + kStepRows - 1) / kStepRows),
                       static_cast<uint32_t>(b)};
    Launch(stream_, Kernel("backward_finish_query"), grid, query_sums_, lse_, gradient_scale_, query_gradient_,
           num_queries, query_heads, heads_a_group, unit_);
  }

  void Queries() const {
    const auto& [b, t, s, n, k, h] = sizes_;
    const int64_t slots = std::max(PaddedRows(s), kTileRows);
    const CUtensorMap query_map = QueryMap(kTileRows), gradient_map = GradientMap(kTileRows);
    const CUtensorMap key_map = KeyMap(kStepRows), value_map = ValueMap(kStepRows);
    const CUtensorMap key_columns_map = Columns(key_columns_, b * k * h, slots, kHalfRow);
    const int32_t num_queries = t, num_keys = s, query_heads = n, kv_heads = k;
    Launch(stream_, Kernel("backward_query"), TileGrid(n, t, b), query_map, gradient_map, key_map, value_map,
           key_columns_map, statistics_, gradient_scale_, query_gradient_, limits_.query_lengths, limits_.key_lengths,
           limits_.query_segments, limits_.key_segments, limits_.key_offset, num_queries, num_keys, query_heads,
           kv_heads, window_.left, window_.right, log2_scale_, lift_, factor_, unit_);
  }

  CUtensorMap QueryMap(uint32_t box_rows) const {
    const int64_t rows = sizes_.batch * sizes_.query_heads * PaddedRows(sizes_.num_queries);
    return MatrixMap(kF16Map, query_values_, rows, sizes_.head_size, box_rows, kRow);
  }
  CUtensorMap KeyMap(uint32_t box_rows) const {
    const int64_t rows = sizes_.batch * sizes_.kv_heads * PaddedRows(sizes_.num_keys);
    return MatrixMap(kF16Map, key_values_, rows, sizes_.head_size, box_rows, kRow);
  }
  CUtensorMap ValueMap(uint32_t box_rows) const {
    return PairedRowsMap(value_, sizes_.batch * sizes_.kv_heads * PaddedRows(sizes_.num_keys), sizes_.head_size,
                         box_rows);
  }
  CUtensorMap GradientMap(uint32_t box_rows) const {
    return PairedRowsMap(gradient_, sizes_.batch * sizes_.query_heads * PaddedRows(sizes_.num_queries),
                         sizes_.head_size, box_rows);
  }
  CUtensorMap Columns(void* data, int64_t rows, int64_t columns, uint32_t box_bytes) const {
    return MatrixMap(kU8Map, data, rows, columns, static_cast<uint32_t>(sizes_.head_size), box_bytes);
  }

  CUstream stream_;
  Arguments arguments_;
  Attributes attributes_;
  Sizes sizes_ = {};
  Window window_ = {};
  Limits limits_ = {};
  bool ordered_ = false;
  float log2_scale_ = 0, lift_ = 0, correction_ = 0, factor_ = 0, unit_ = 0;
  void *query_codes_ = nullptr, *query_pages_ = nullptr, *key_codes_ = nullptr, *key_pages_ = nullptr;
  void *query_columns_ = nullptr, *key_columns_ = nullptr, *value_ = nullptr;
  void *gradient_ = nullptr, *gradient_columns_ = nullptr, *row_statistic_ = nullptr;
  void *lse_ = nullptr, *gradient_scale_ = nullptr;
  void *query_gradient_ = nullptr, *key_gradient_ = nullptr, *value_gradient_ = nullptr;
  void *query_values_ = nullptr, *key_values_ = nullptr, *statistics_ = nullptr, *query_sums_ = nullptr;
};

}  // namespace

void Backward(CUstream stream, ffi::RemainingArgs operands, ffi::RemainingRets results, ffi::Dictionary attributes) {
  BackwardCall(stream, operands, results, attributes).Run();
}

}  // namespace fp4attn
