// The kernels of latent attention for many heads over codes that are built: a row each.
#pragma once

#include <array>

#include "cuda/attention/latent_records.h"

namespace halftone::cuda {

struct LatentWideConfig {
  LatentCodes codes;
  DType q_dtype;
  int blocks;  ///< thread blocks of a cluster, for 64 packed rows each: they share the tokens they bring
};

constexpr int rows_of(const LatentWideConfig& c) { return 64 * c.blocks; }

/// Beside a row: us of 256 queries with lists of 2,048 keys on an H200 (docs/measured.md, Latent attention),
/// and on an H100, of earlier kernels.
inline constexpr std::array kLatentWideTable{
    LatentWideConfig{LatentCodes::kFp8, DType::kBFloat16, 1},       // 190; H100: 203
    LatentWideConfig{LatentCodes::kFp8, DType::kBFloat16, 2},       // 329; H100: 331
    LatentWideConfig{LatentCodes::kFp8, DType::kFloat16, 1},        // earlier: 209; by 32 rows at a time: 301
    LatentWideConfig{LatentCodes::kFp8, DType::kFloat16, 2},        // 349; likewise: 593
    LatentWideConfig{LatentCodes::kInt8, DType::kBFloat16, 1},      // 193; H100: 209
    LatentWideConfig{LatentCodes::kInt8, DType::kBFloat16, 2},      // 342; H100: 340
    LatentWideConfig{LatentCodes::kInt4, DType::kBFloat16, 1},      // 201; H100: 205
    LatentWideConfig{LatentCodes::kInt4, DType::kBFloat16, 2},      // 340; H100: 337
    LatentWideConfig{LatentCodes::kFp8Apart, DType::kBFloat16, 1},  // 209; H100: 225
    LatentWideConfig{LatentCodes::kFp8Apart, DType::kBFloat16, 2},  // 347; H100: 349
};

/// Row of the table that serves a valid latent cache in units of `rows` packed rows; -1 if there is none.
constexpr int find_latent_wide_row(const KvCacheSpec& kv, DType q_type, int rows) {
  for (std::size_t row = 0; row < kLatentWideTable.size(); ++row) {
    const LatentWideConfig& c = kLatentWideTable[row];
    if (rows_of(c) == rows && c.q_dtype == q_type && serves(c.codes, kv, q_type))
      return static_cast<int>(row);
  }
  return -1;
}

}  // namespace halftone::cuda
