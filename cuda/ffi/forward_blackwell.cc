// The forward on Blackwell: puts anchor keys first where the recipe does, then runs the attention kernel.
#include <algorithm>

#include "forward.h"
#include "kernels.h"
#include "tensor_maps.h"
#include "tiles.h"

namespace fp4attn {
namespace {

constexpr int64_t kQueryRows = 256;  // of an item, see cuda/kernels/blackwell/schedule.py

CUtensorMap RowsMap(void* codes, int64_t rows, int64_t row_bytes) {
  return MatrixMap(CU_TENSOR_MAP_DATA_TYPE_UINT8, codes, rows, row_bytes, kTileRows, static_cast<uint32_t>(row_bytes));
}

// Keys lie along the rows of the values, two in a byte if they are MXFP4.
CUtensorMap ValueMap(const ForwardProblem& problem) {
  const auto& [b, t, s, n, k, h] = problem.sizes;
  const int64_t keys_a_byte = problem.is_mxfp4 ? 2 : 1;
  const int64_t row_bytes = std::max(PaddedRows(s), kTileRows) / keys_a_byte;
  return MatrixMap(CU_TENSOR_MAP_DATA_TYPE_UINT8, problem.value, b * k * h, row_bytes, static_cast<uint32_t>(h),
                   static_cast<uint32_t>(kTileRows / keys_a_byte));
}

}  // namespace

void LaunchForwardOnBlackwell(CUstream stream, const ForwardProblem& problem, const OrderedKey& ordered) {
  const auto& [b, t, s, n, k, h] = problem.sizes;
  const Limits& limits = problem.limits;
  const int32_t num_queries = t, num_keys = s, query_heads = n, kv_heads = k, batches = b;
  void *key_codes = problem.key_codes, *key_pages = problem.key_pages;
  if (problem.is_ordered && s > 0) {
    Launch(stream, problem.Kernel("order_key"), TileGrid(k, s, b), key_codes, key_pages, problem.slot_order,
           ordered.codes, ordered.pages, num_keys, kv_heads);
    key_codes = ordered.codes;
    key_pages = ordered.pages;
  }
  const int64_t slots = PaddedRows(s), items = b * n * ((t + kQueryRows - 1) / kQueryRows);
  const CUtensorMap query_map = RowsMap(problem.query_codes, b * n * t, h / 2);
  const CUtensorMap key_map = RowsMap(key_codes, b * k * slots, h / 2), value_map = ValueMap(problem);
  const int32_t num_items = items;
  const int64_t head_bytes = slots * h * (problem.is_mxfp4 ? 2 : 3) / 2;
  const Grid grid = {static_cast<uint32_t>(std::min<int64_t>(items, Multiprocessors())), 1, 1};
  Launch(stream, problem.Kernel("blackwell_forward") + "_" + problem.probabilities, grid, query_map,
         problem.query_pages, key_map, key_pages, value_map, problem.value_pages, problem.output, problem.lse,
         limits.query_lengths, limits.key_lengths, limits.query_segments, limits.key_segments, problem.slot_order,
         limits.key_offset, num_queries, num_keys, query_heads, kv_heads, batches, num_items,
         problem.Section(head_bytes), problem.window.left, problem.window.right, problem.log2_scale,
         problem.block_offset, problem.shift, problem.margin, problem.map.slope, problem.map.intercept,
         problem.map.constant, problem.rescale_threshold, problem.unit);
}

}  // namespace fp4attn
