// The kernels of latent attention for few query heads, as a table: a row per (format, packed rows). Plain
// C++: host code chooses a row, instances.cu instantiates the rows.
#pragma once

#include <array>

#include "cuda/attention/latent_records.h"

namespace halftone::cuda {

struct LatentFewConfig {
  LatentCodes codes;
  int rows;             ///< packed rows of a unit
  int stages;           ///< of 32 tokens in shared memory
  int tiles;            ///< of 16 tokens that a warp of S takes at a time: 1, or 2 by half as many warps
  bool appends = true;  ///< writes new tokens itself, where it is asked to
};

/// Beside a row: us of 128 queries with as many heads and lists of 2,048 keys on an H200, those of 656
/// bytes by lanes (docs/kernels/latent-measured.md, Few heads). Where writing new tokens takes registers
/// from the scores, which costs 3%, a row of its own does: 8 requests of 8,192 keys, us.
inline constexpr std::array kLatentFewTable{
    LatentFewConfig{LatentCodes::kFp8, 8, 8, 1},          // 57.6
    LatentFewConfig{LatentCodes::kFp8, 16, 8, 1},         // 62.0
    LatentFewConfig{LatentCodes::kFp8, 32, 7, 1, false},  // 87.0
    LatentFewConfig{LatentCodes::kFp8, 32, 7, 1},         // a layer 28.8, with append's own kernel 33.1
    LatentFewConfig{LatentCodes::kFp8Apart, 8, 8, 1},     // 53.8
    LatentFewConfig{LatentCodes::kFp8Apart, 16, 8, 1},    // 61.9
    LatentFewConfig{LatentCodes::kFp8Apart, 32, 7, 2},    // 91.0
    LatentFewConfig{LatentCodes::kInt8, 8, 8, 1},         // 64.1
    LatentFewConfig{LatentCodes::kInt8, 16, 8, 1},        // 77.8
    LatentFewConfig{LatentCodes::kInt8, 32, 7, 2},        // 109.8
    LatentFewConfig{LatentCodes::kInt4, 8, 12, 1},        // 55.5
    LatentFewConfig{LatentCodes::kInt4, 16, 12, 1},       // 67.3
    LatentFewConfig{LatentCodes::kInt4, 32, 12, 2},       // 102.7
    LatentFewConfig{LatentCodes::kBf16, 8, 5, 1},         // 79.3
    LatentFewConfig{LatentCodes::kBf16, 16, 5, 1},        // 81.8
    LatentFewConfig{LatentCodes::kBf16, 32, 4, 2},        // 113.2
};

/// First row of the table that serves a valid latent cache in units of `rows` packed rows (0: of any number)
/// and, if `appends`, writes new tokens; -1 if there is none.
constexpr int find_latent_few_row(const KvCacheSpec& kv, DType q_type, int rows, bool appends = false) {
  for (std::size_t row = 0; row < kLatentFewTable.size(); ++row) {
    const LatentFewConfig& c = kLatentFewTable[row];
    const bool wanted = (rows == 0 || c.rows == rows) && (c.appends || !appends);
    if (wanted && serves(c.codes, kv, q_type)) return static_cast<int>(row);
  }
  return -1;
}

}  // namespace halftone::cuda
