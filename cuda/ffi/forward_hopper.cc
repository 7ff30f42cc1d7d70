// The forward on Hopper: expands key and value, then runs the attention kernel.
#include <algorithm>
#include <string>

#include "forward.h"
#include "kernels.h"
#include "tensor_maps.h"
#include "tiles.h"

namespace fp4attn {
namespace {

constexpr int64_t kQueryRows = 192;  // of an item, see cuda/kernels/hopper/forward.py
constexpr uint32_t kRowBytes = 128;  // of a box

void Expand(CUstream stream, const ForwardProblem& problem, const ExpandedOperands& expanded) {
  const Grid grid = TileGrid(problem.sizes.kv_heads, problem.sizes.num_keys, problem.sizes.batch);
  const int32_t keys = problem.sizes.num_keys, heads = problem.sizes.kv_heads;
  const std::string order = problem.is_mxfp4 ? "_by_block" : "";
  Launch(stream, problem.Kernel("expand_key") + order, grid, problem.key_codes, problem.key_pages, problem.slot_order,
         expanded.key, expanded.counter, keys, heads);
  if (!problem.is_mxfp4) return;
  Launch(stream, problem.Kernel("expand_value"), grid, problem.value, problem.value_pages, expanded.value,
         expanded.value_exponents, keys, heads);
}

}  // namespace

void LaunchForwardOnHopper(CUstream stream, const ForwardProblem& problem, const ExpandedOperands& expanded) {
  const auto& [b, t, s, n, k, h] = problem.sizes;
  const Limits& limits = problem.limits;
  if (s > 0) Expand(stream, problem, expanded);
  const int64_t slots = PaddedRows(s), items = b * n * ((t + kQueryRows - 1) / kQueryRows);
  const CUtensorMap key_map =
      MatrixMap(CU_TENSOR_MAP_DATA_TYPE_FLOAT16, expanded.key, b * k * slots, h, kTileRows, kRowBytes);
  const CUtensorMap value_map =
      MatrixMap(CU_TENSOR_MAP_DATA_TYPE_UINT8, problem.is_mxfp4 ? expanded.value : problem.value, b * k * h,
                std::max(slots, kTileRows), static_cast<uint32_t>(h), kRowBytes);
  const int32_t num_queries = t, num_keys = s, query_heads = n, kv_heads = k, batches = b, num_items = items;
  // Without keys nothing clears the counter, and items take no time.
  void* const counter = s > 0 ? expanded.counter : nullptr;
  const Grid grid = {static_cast<uint32_t>(s > 0 ? std::min<int64_t>(items, Multiprocessors()) : items), 1, 1};
  Launch(stream, problem.Kernel("forward") + "_" + problem.probabilities, grid, problem.query_codes,
         problem.query_pages, key_map, value_map, expanded.value_exponents, problem.output, problem.lse,
         limits.query_lengths, limits.key_lengths, limits.query_segments, limits.key_segments, problem.slot_order,
         limits.key_offset, counter, num_queries, num_keys, query_heads, kv_heads, batches, num_items,
         problem.Section(slots * h * 3), problem.window.left, problem.window.right, problem.log2_scale,
         problem.block_offset, problem.shift, problem.margin, problem.map.slope, problem.map.intercept,
         problem.map.constant, problem.rescale_threshold, problem.unit);
}

}  // namespace fp4attn
