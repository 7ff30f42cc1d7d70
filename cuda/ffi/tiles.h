// Sizes that all kernels share; see cuda/kernels/tile.py.
#pragma once

#include <cstdint>
#include <string_view>

#include "failure.h"
#include "kernels.h"

namespace fp4attn {

constexpr int64_t kTileRows = 128;
constexpr int64_t kPageBytes = 512;

inline int64_t Tiles(int64_t rows) { return (rows + kTileRows - 1) / kTileRows; }
inline int64_t PaddedRows(int64_t rows) { return Tiles(rows) * kTileRows; }

inline Grid TileGrid(int64_t heads, int64_t rows, int64_t batch) {
  return {static_cast<uint32_t>(heads), static_cast<uint32_t>(Tiles(rows)), static_cast<uint32_t>(batch)};
}

// What the grid and the indices of the kernels can hold; jax_fp4attn/native/coverage.py keeps larger batches away.
inline void CheckSizes(std::string_view step, int64_t batch, int64_t rows, int64_t heads, int64_t head_size) {
  constexpr int64_t kMaxBatch = 65535, kMaxRows = 65535 * kTileRows, kMaxHeads = 1 << 20;
  if (head_size != 64 && head_size != 128) {
    Fail(ffi::ErrorCode::kUnimplemented, step, ": expected a head size of 64 or 128, got ", head_size);
  }
  if (batch > kMaxBatch) {
    Fail(ffi::ErrorCode::kInvalidArgument, step, ": expected a batch of at most 65535, got ", batch);
  }
  if (rows > kMaxRows) {
    Fail(ffi::ErrorCode::kInvalidArgument, step, ": expected at most ", kMaxRows, " rows, got ", rows);
  }
  if (heads > kMaxHeads) {
    Fail(ffi::ErrorCode::kInvalidArgument, step, ": expected at most ", kMaxHeads, " heads, got ", heads);
  }
}

}  // namespace fp4attn
