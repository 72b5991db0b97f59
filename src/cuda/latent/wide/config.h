// The kernels of latent attention for many heads over fp8 that are built: a row each.
#pragma once

#include <array>

#include "halftone/cache.h"

namespace halftone::cuda {

/// One kernel over tokens of 656 bytes: 512 latent dims in e4m3, in groups of 128 with f32 scales, and 64
/// rotary ones in bf16.
struct LatentWideConfig {
  DType q_dtype;
  int blocks;  ///< thread blocks of a cluster, for 64 packed rows each: they share the tokens they bring
};

constexpr int rows_of(const LatentWideConfig& c) { return 64 * c.blocks; }

/// Beside a row: us of 256 queries with lists of 2,048 keys on an H200 (docs/kernels/latent-wide.md,
/// Measured).
inline constexpr std::array kLatentWideTable{
    LatentWideConfig{DType::kBFloat16, 1},  // 192
    LatentWideConfig{DType::kBFloat16, 2},  // 324
    LatentWideConfig{DType::kFloat16, 1},   // not timed
    LatentWideConfig{DType::kFloat16, 2},   // not timed
};

/// Whether these kernels are for the format of a latent cache.
constexpr bool is_latent_wide(const KvFormat& f) {
  return f.dtype == DType::kFloat8E4M3 && f.granularity == Granularity::kGroup && f.group_size == 128 &&
         f.scale_dtype == DType::kFloat32;
}

/// Row of the table that serves a valid latent cache in units of `rows` packed rows; -1 if there is none.
constexpr int find_latent_wide_row(const KvCacheSpec& kv, DType q_type, int rows) {
  if (kv.rope_dim != 64 || kv.latent_dim() != 512 || kv.v_dim() != 512) return -1;
  if (!is_latent_wide(kv.k_format)) return -1;
  for (std::size_t row = 0; row < kLatentWideTable.size(); ++row) {
    const LatentWideConfig& c = kLatentWideTable[row];
    if (rows_of(c) == rows && c.q_dtype == q_type) return static_cast<int>(row);
  }
  return -1;
}

}  // namespace halftone::cuda
