// The kernels of latent attention for few query heads, as a table: a row per (format, packed rows). Plain
// C++: host code chooses a row, instances.cu instantiates the rows.
#pragma once

#include <array>

#include "halftone/cache.h"

namespace halftone::cuda {

/// How a record of the latent cache is stored; its 64 rotary dims are bf16.
enum class LatentCodes : std::uint8_t {
  kFp8,   ///< 512 e4m3, 4 f32 scales: 656 bytes
  kBf16,  ///< 512 bf16: 1152 bytes
};

struct LatentFewConfig {
  LatentCodes codes;
  int rows;    ///< packed rows of a unit
  int stages;  ///< of 32 tokens in shared memory
  int tiles;   ///< of 16 tokens that a warp of S takes at a time: 1, or 2 by half as many warps
};

inline constexpr std::array kLatentFewTable{
    LatentFewConfig{LatentCodes::kFp8, 8, 8, 1},   LatentFewConfig{LatentCodes::kFp8, 16, 8, 1},
    LatentFewConfig{LatentCodes::kFp8, 32, 6, 2},  LatentFewConfig{LatentCodes::kBf16, 8, 5, 1},
    LatentFewConfig{LatentCodes::kBf16, 16, 5, 1}, LatentFewConfig{LatentCodes::kBf16, 32, 4, 2},
};

/// bf16 records are multiplied with queries in bf16.
constexpr bool serves(LatentCodes codes, const KvFormat& f, DType q_type) {
  switch (codes) {
    case LatentCodes::kFp8:
      return f.dtype == DType::kFloat8E4M3 && f.granularity == Granularity::kGroup && f.group_size == 128 &&
             f.scale_dtype == DType::kFloat32;
    case LatentCodes::kBf16:
      return f.dtype == DType::kBFloat16 && q_type == DType::kBFloat16;
  }
  return false;
}

/// Row of the table that serves a valid latent cache in units of `rows` packed rows (0: of any number); -1 if
/// there is none.
constexpr int find_latent_few_row(const KvCacheSpec& kv, DType q_type, int rows) {
  if (kv.rope_dim != 64 || kv.latent_dim() != 512 || kv.v_dim() != 512) return -1;
  for (std::size_t row = 0; row < kLatentFewTable.size(); ++row) {
    const LatentFewConfig& c = kLatentFewTable[row];
    if ((rows == 0 || c.rows == rows) && serves(c.codes, kv.k_format, q_type)) return static_cast<int>(row);
  }
  return -1;
}

}  // namespace halftone::cuda
