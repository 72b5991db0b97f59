// The decode kernels that exist, as a table: a row per (format pair, head_dim, packed rows). Plain C++: host code chooses
// a row, decode.cu instantiates the rows.
#pragma once

#include <array>
#include <cstdint>

#include "halftone/format.h"

namespace halftone::cuda {

enum class ScaleMode : std::uint8_t {
  kStatic,  // 16-bit formats, and one scale per tensor or head: nothing is stored in a tile
  kToken,   // one stored scale per token
  kBlock,   // one stored scale per token and group of 32, 64 or 128 dims
};

constexpr ScaleMode scale_mode(const KvFormat& f) {
  if (!f.dynamic_scale()) return ScaleMode::kStatic;
  return f.granularity == Granularity::kGroup ? ScaleMode::kBlock : ScaleMode::kToken;
}

/// What a kernel knows of a format when it is compiled; symmetry, group size and scale dtype are run-time values.
struct PartConfig {
  DType dtype;
  ScaleMode mode;
  friend constexpr bool operator==(const PartConfig&, const PartConfig&) = default;
};

struct DecodeConfig {
  PartConfig k, v;
  int head_dim;     // of K and V
  int row_tiles;    // packed rows / 8: 1 or 2
  int piece_tiles;  // tiles of 16 tokens in one copy
  int stages;       // pieces in a warp's ring
  friend constexpr bool operator==(const DecodeConfig&, const DecodeConfig&) = default;
};

constexpr bool is_integer(DType t) { return t == DType::kInt8 || t == DType::kInt4; }

inline constexpr std::array<PartConfig, 11> kDecodeParts{{
    {DType::kBFloat16, ScaleMode::kStatic},
    {DType::kFloat16, ScaleMode::kStatic},
    {DType::kFloat8E4M3, ScaleMode::kStatic},
    {DType::kFloat8E4M3, ScaleMode::kToken},
    {DType::kFloat8E4M3, ScaleMode::kBlock},
    {DType::kInt8, ScaleMode::kStatic},
    {DType::kInt8, ScaleMode::kToken},
    {DType::kInt8, ScaleMode::kBlock},
    {DType::kInt4, ScaleMode::kStatic},
    {DType::kInt4, ScaleMode::kToken},
    {DType::kInt4, ScaleMode::kBlock},
}};
