// The decode kernels that exist, as a table: a row per (format pair, head_dim, packed rows). Plain C++: host
// code chooses a row, decode.cu instantiates the rows.
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

/// What a kernel knows of K or V when it is compiled. A `fixed` part has the stated symmetry and
/// groups of `group_blocks` * 32 dims; else these are run-time values, which costs instructions in the inner
/// loop.
struct PartConfig {
  DType dtype;
  ScaleMode mode;
  bool fixed = false;
  bool asymmetric = false;
  int group_blocks = 1;
  friend constexpr bool operator==(const PartConfig&, const PartConfig&) = default;
};

struct DecodeConfig {
  PartConfig k, v;
  int head_dim;     // of K and V
  int row_tiles;    // 8 packed rows each, of one warp
  int row_groups;   // warps that read the same tiles, each for its own rows
  int teams;        // of row_groups warps, each with its own ring
  int piece_tiles;  // tiles of 16 tokens in one copy
  int stages;       // pieces in a team's ring
  friend constexpr bool operator==(const DecodeConfig&, const DecodeConfig&) = default;
};

/// Packed rows of a unit.
constexpr int rows_of(const DecodeConfig& c) { return 8 * c.row_tiles * c.row_groups; }

constexpr bool is_integer(DType t) { return t == DType::kInt8 || t == DType::kInt4; }

constexpr bool serves(const PartConfig& part, const KvFormat& f) {
  if (part.dtype != f.dtype || part.mode != scale_mode(f)) return false;
  if (f.dynamic_scale() && f.scale_dtype != DType::kFloat16) return false;  // P times a scale is f16
  if (!part.fixed) return true;
  return part.asymmetric == f.asymmetric &&
         (part.mode != ScaleMode::kBlock || part.group_blocks * 32 == f.group_size);
}

/// In order of preference: what the named formats use, then the general parts.
inline constexpr std::array kDecodeParts{
    PartConfig{DType::kBFloat16, ScaleMode::kStatic, true},
    PartConfig{DType::kFloat16, ScaleMode::kStatic, true},
    PartConfig{DType::kFloat8E4M3, ScaleMode::kStatic, true},
    PartConfig{DType::kFloat8E4M3, ScaleMode::kToken, true},
    PartConfig{DType::kInt8, ScaleMode::kStatic, true},
    PartConfig{DType::kInt8, ScaleMode::kToken, true},
    PartConfig{DType::kInt8, ScaleMode::kBlock, true, false, 1},
    PartConfig{DType::kInt8, ScaleMode::kBlock, true, false, 2},
    PartConfig{DType::kInt8, ScaleMode::kBlock, true, false, 4},
    PartConfig{DType::kInt4, ScaleMode::kToken, true, true},
    PartConfig{DType::kInt4, ScaleMode::kBlock, true, true, 1},
    PartConfig{DType::kInt4, ScaleMode::kBlock, true, true, 2},
    PartConfig{DType::kInt4, ScaleMode::kBlock, true, true, 4},
    PartConfig{DType::kFloat8E4M3, ScaleMode::kBlock},
    PartConfig{DType::kInt8, ScaleMode::kStatic},
    PartConfig{DType::kInt8, ScaleMode::kToken},
    PartConfig{DType::kInt8, ScaleMode::kBlock},
    PartConfig{DType::kInt4, ScaleMode::kStatic},
    PartConfig{DType::kInt4, ScaleMode::kToken},
    PartConfig{DType::kInt4, ScaleMode::kBlock},
};

inline constexpr std::array<int, 5> kDecodeDims{64, 96, 128, 192, 256};

/// Bytes of a tile with f16 scales, which decide how many tiles a copy brings.
constexpr int typical_tile_bytes(const PartConfig& part, int head_dim) {
  const int scales = part.mode == ScaleMode::kStatic ? 0 : part.mode == ScaleMode::kToken ? 1 : head_dim / 32;
  return 16 * (head_dim * dtype_bits(part.dtype) / 8 + scales * (part.dtype == DType::kInt4 ? 4 : 2));
}

/// How a unit's packed rows are spread over warps.
struct RowShape {
  int row_tiles, row_groups, teams;
};
inline constexpr std::array<RowShape, 5> kRowShapes{{{1, 1, 8}, {2, 1, 8}, {2, 2, 4}, {3, 2, 4}, {2, 4, 2}}};
/// Beyond head_dim 128 the accumulators of 16 rows do not fit into registers.
inline constexpr std::array<RowShape, 3> kWideRowShapes{{{1, 1, 8}, {1, 2, 4}, {1, 4, 2}}};

/// A piece of about 4 to 8 KB, and as many in flight as are useful and fit.
constexpr DecodeConfig make_decode_config(const PartConfig& k, const PartConfig& v, int head_dim,
                                          const RowShape& shape) {
  const int bytes = typical_tile_bytes(k, head_dim) + typical_tile_bytes(v, head_dim);
  const bool tight = shape.row_tiles == 3 && k.mode == ScaleMode::kBlock;  // registers
  const int piece_tiles = bytes <= 4352 && !tight ? 2 : 1, piece_bytes = piece_tiles * bytes;
  const bool heavy =
      head_dim == 256 && is_integer(k.dtype) && k.mode == ScaleMode::kBlock && shape.teams == 8;
  const int teams = heavy || (piece_bytes > 10000 && shape.teams > 2) ? shape.teams / 2 : shape.teams;
  const int stages = teams == 8 ? (piece_bytes <= 5632 ? 3 : 2) : (piece_bytes * teams <= 24000 ? 3 : 2);
  return {k, v, head_dim, shape.row_tiles, shape.row_groups, teams, piece_tiles, stages};
}

/// Rows that do not exist (whole groups only), or that no register budget serves without spills, are left
/// out.
constexpr bool is_built(const DecodeConfig& c) {
  if (c.head_dim == 0) return false;
#ifdef HALFTONE_CUDA_HEAD_DIM  // a smaller build for development
  if (c.head_dim != HALFTONE_CUDA_HEAD_DIM) return false;
#endif
  if (c.k.fixed && c.k.mode == ScaleMode::kBlock && c.head_dim / 32 % c.k.group_blocks != 0) return false;
  const bool run_time_groups = !c.k.fixed && c.k.mode == ScaleMode::kBlock;
  if (run_time_groups && (rows_of(c) > 8 || c.head_dim > 192)) return false;
  if (c.row_tiles == 3 && c.k.mode == ScaleMode::kBlock && c.k.dtype != DType::kInt4) return false;
  return c.k.fixed || rows_of(c) <= 16;
}

/// K and V in the same format.
constexpr auto make_decode_table() {
  std::array<DecodeConfig, kDecodeParts.size() * kDecodeDims.size() * kRowShapes.size()> table{};
  std::size_t row = 0;
  for (const PartConfig& part : kDecodeParts) {
    for (const int dim : kDecodeDims) {
      if (dim <= 128) {
        for (const RowShape& shape : kRowShapes) table[row++] = make_decode_config(part, part, dim, shape);
      } else {
        for (const RowShape& shape : kWideRowShapes)
          table[row++] = make_decode_config(part, part, dim, shape);
      }
    }
  }
  return table;
}
inline constexpr auto kDecodeTable = make_decode_table();

}  // namespace halftone::cuda
