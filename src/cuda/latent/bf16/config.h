// The kernels of latent attention for many heads over bf16 that are built: a row each.
#pragma once

#include <array>

#include "halftone/cache.h"

namespace halftone::cuda {

/// 512 latent dims, which are V, and 64 rotary ones, of 1152 bytes a token. Q has the same type.
struct LatentBf16Config {
  DType dtype;
  int blocks;   ///< thread blocks of a cluster, for 64 packed rows each, which take the same tokens
  bool listed;  ///< tokens come by lists, each on its own; else pages do
};

constexpr int rows_of(const LatentBf16Config& c) { return 64 * c.blocks; }

// Of a step, whose latent comes in two halves: tokens, and columns of 64 dims of a half.
inline constexpr int kLatentBf16Tokens = 64, kLatentBf16HalfColumns = 4;

/// Beside a row: us of 128 requests of 8,192 keys on an H200, of lists those of 256 queries with 2,048 keys
/// on an H100 (docs/kernels/latent-wide-measured.md; of 17 to 32 rows latent-measured.md).
inline constexpr std::array kLatentBf16Table{
    LatentBf16Config{DType::kBFloat16, 1, false},  // 301
    LatentBf16Config{DType::kBFloat16, 2, false},  // 431
    LatentBf16Config{DType::kBFloat16, 1, true},   // 235
    LatentBf16Config{DType::kBFloat16, 2, true},   // 280
};

/// Row of the table for units of `rows` packed rows, whose tokens and queries are of `type`; -1 if there is
/// none.
constexpr int find_latent_bf16_row(int rows, DType type, bool listed) {
  for (std::size_t row = 0; row < kLatentBf16Table.size(); ++row) {
    const LatentBf16Config& c = kLatentBf16Table[row];
    if (rows_of(c) == rows && c.listed == listed && c.dtype == type) return static_cast<int>(row);
  }
  return -1;
}
/// The same, that serves a valid latent cache.
constexpr int find_latent_bf16_row(const KvCacheSpec& kv, DType q_type, int rows, bool listed) {
  if (kv.rope_dim != 64 || kv.latent_dim() != 512 || kv.v_dim() != 512) return -1;
  return kv.k_format.dtype == q_type ? find_latent_bf16_row(rows, q_type, listed) : -1;
}

}  // namespace halftone::cuda
