// The kernels of latent attention for many heads over pages of bf16 that are built: a row each.
#pragma once

#include <array>

#include "halftone/cache.h"

namespace halftone::cuda {

/// 512 latent dims, which are V, and 64 rotary ones, of 1152 bytes a token, whose tokens follow each other in
/// pages. Q has the same type.
struct LatentDenseConfig {
  DType dtype;
  int blocks;  ///< thread blocks of a cluster, for 64 packed rows each: what one of them brings both get
};

constexpr int rows_of(const LatentDenseConfig& c) { return 64 * c.blocks; }

// Of a step, whose latent comes in two halves: tokens, and columns of 64 dims of a half.
inline constexpr int kLatentDenseTokens = 64, kLatentDenseHalfColumns = 4;

/// Figures: docs/kernels/latent-wide.md, Measured; of 17 to 32 rows latent.md.
inline constexpr std::array kLatentDenseTable{
    LatentDenseConfig{DType::kBFloat16, 1},
    LatentDenseConfig{DType::kBFloat16, 2},
};

/// Row of the table that serves a valid latent cache in units of `rows` packed rows; -1 if there is none.
constexpr int find_latent_dense_row(const KvCacheSpec& kv, DType q_type, int rows) {
  if (kv.rope_dim != 64 || kv.latent_dim() != 512 || kv.v_dim() != 512) return -1;
  for (std::size_t row = 0; row < kLatentDenseTable.size(); ++row) {
    const LatentDenseConfig& c = kLatentDenseTable[row];
    if (rows_of(c) == rows && c.dtype == q_type && c.dtype == kv.k_format.dtype) return static_cast<int>(row);
  }
  return -1;
}

}  // namespace halftone::cuda
