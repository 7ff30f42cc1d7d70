// Tensor maps: what the copy engine needs to know of an array.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace fp4attn {

// Of a matrix without padding, in boxes of rows of 32, 64 or 128 bytes, which are swizzled.
CUtensorMap MatrixMap(CUtensorMapDataType type, void* data, int64_t rows, int64_t columns, uint32_t box_rows,
                      uint32_t box_bytes);

// Of rows of 64 or 128 bytes, in swizzled boxes that hold of each 16 rows first the even and then the odd ones.
CUtensorMap PairedRowsMap(void* data, int64_t rows, int64_t columns, uint32_t box_rows);

}  // namespace fp4attn
