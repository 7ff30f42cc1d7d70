#include "tensor_maps.h"

#include <algorithm>

#include "driver.h"
#include "failure.h"

namespace fp4attn {
namespace {

uint32_t BytesOf(CUtensorMapDataType type) {
  switch (type) {
    case CU_TENSOR_MAP_DATA_TYPE_UINT8:
      return 1;
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT16:
      return 2;
    default:
      Fail(ffi::ErrorCode::kInternal, "no tensor map of element type ", static_cast<int>(type));
  }
}

CUtensorMapSwizzle SwizzleOf(uint32_t box_bytes) {
  switch (box_bytes) {
    case 32:
      return CU_TENSOR_MAP_SWIZZLE_32B;
    case 64:
      return CU_TENSOR_MAP_SWIZZLE_64B;
    default:
      return CU_TENSOR_MAP_SWIZZLE_128B;
  }
}

template <size_t rank>
CUtensorMap Encode(CUtensorMapDataType type, void* data, const cuuint64_t (&extents)[rank],
                   const cuuint64_t (&strides)[rank - 1], const cuuint32_t (&box)[rank], CUtensorMapSwizzle swizzle) {
  cuuint32_t steps[rank];
  std::fill(steps, steps + rank, 1);
  CUtensorMap map;
  const Driver& driver = Driver::Get();
  driver.Check(driver.tensor_map_encode_tiled(&map, type, rank, data, extents, strides, box, steps,
                                              CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                                              CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
               "cuTensorMapEncodeTiled");
  return map;
}

}  // namespace

CUtensorMap MatrixMap(CUtensorMapDataType type, void* data, int64_t rows, int64_t columns, uint32_t box_rows,
                      uint32_t box_bytes) {
  const uint32_t bytes = BytesOf(type);
  const cuuint64_t row = static_cast<cuuint64_t>(columns);
  // A tensor map has no empty dimension; without rows none is read.
  return Encode<2>(type, data, {row, static_cast<cuuint64_t>(std::max<int64_t>(rows, 1))}, {row * bytes},
                   {box_bytes / bytes, box_rows}, SwizzleOf(box_bytes));
}

CUtensorMap PairedRowsMap(void* data, int64_t rows, int64_t columns, uint32_t box_rows) {
  const cuuint64_t row = static_cast<cuuint64_t>(columns);
  const cuuint64_t sixteens = static_cast<cuuint64_t>(std::max<int64_t>(rows / 16, 1));
  const uint32_t bytes = static_cast<uint32_t>(columns);
  return Encode<4>(CU_TENSOR_MAP_DATA_TYPE_UINT8, data, {row, 8, 2, sixteens}, {2 * row, row, 16 * row},
                   {bytes, 8, 2, box_rows / 16}, SwizzleOf(bytes));
}

}  // namespace fp4attn
