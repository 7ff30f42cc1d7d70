// The output gradient and the row statistic for the backward.
#include <string>

#include "arguments.h"
#include "kernels.h"
#include "steps.h"
#include "tiles.h"

namespace fp4attn {

void RowOperands(CUstream stream, ffi::RemainingArgs operands, ffi::RemainingRets results,
                 ffi::Dictionary dictionary) {
  constexpr auto BF16 = ffi::DataType::BF16;
  constexpr auto F32 = ffi::DataType::F32;
  constexpr auto U8 = ffi::DataType::U8;
  const Attributes attributes("row_operands", dictionary);
  attributes.Require("recipe_backward", {"fp8"});
  Arguments arguments("row_operands", operands, results);

  const ffi::AnyBuffer output = arguments.Operand("output", BF16, {-1, -1, -1, -1});
  const int64_t b = output.dimensions()[0], t = output.dimensions()[1], n = output.dimensions()[2],
                h = output.dimensions()[3];
  CheckSizes("row_operands", b, t, n, h);
  void* lse = arguments.Operand("lse", F32, {b, n, t}).untyped_data();
  void* output_gradient = arguments.Operand("output_gradient", BF16, {b, t, n, h}).untyped_data();
  void* lse_gradient = arguments.Operand("lse_gradient", F32, {b, n, t}).untyped_data();
  const ffi::AnyBuffer gradient_scale = arguments.Operand("gradient_scale", F32, {b, -1});
  const int64_t kv_heads = gradient_scale.dimensions()[1];
  if (kv_heads == 0 ? n != 0 : n % kv_heads != 0) {
    Fail(ffi::ErrorCode::kInvalidArgument, "row_operands: expected query heads that the key/value heads divide, got ",
         n, " and ", kv_heads);
  }

  void* rows = arguments.Result("output_gradient", U8, {b, n, PaddedRows(t), h});
  void* columns = arguments.Result("output_gradient_columns", U8, {b, n, h, PaddedRows(t)});
  void* row_statistic = arguments.Result("row_statistic", F32, {b, n, t});
  arguments.Finish();

  const int32_t num_rows = t, num_heads = n, heads_a_group = kv_heads == 0 ? 1 : n / kv_heads;
  Launch(stream, "publish_output_gradient_h" + std::to_string(h), TileGrid(n, t, b), output.untyped_data(),
         output_gradient, lse, lse_gradient, gradient_scale.untyped_data(), rows, columns, row_statistic, num_rows,
         num_heads, heads_a_group, attributes.Number("recipe_backward_multiplier"));
}

}  // namespace fp4attn
