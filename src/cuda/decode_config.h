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
  int row_tiles;    // packed rows / 8: 1 or 2
  int piece_tiles;  // tiles of 16 tokens in one copy
  int stages;       // pieces in a warp's ring
  int warps;        // that compute; one more loads
  friend constexpr bool operator==(const DecodeConfig&, const DecodeConfig&) = default;
};

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
    PartConfig{DType::kFloat8E4M3, ScaleMode::kToken},
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

/// A piece of about 4 to 8 KB, as many of them in flight as shared memory allows, and 8 warps unless their
/// registers or rings would not fit.
constexpr DecodeConfig make_decode_config(const PartConfig& k, const PartConfig& v, int head_dim,
                                          int row_tiles) {
  const int bytes = typical_tile_bytes(k, head_dim) + typical_tile_bytes(v, head_dim);
  const int piece_tiles = bytes <= 4352 ? 2 : 1, piece_bytes = piece_tiles * bytes;
  const bool heavy = row_tiles == 2 && head_dim == 128 && dtype_bits(k.dtype) == 8;
  return {k,
          v,
          head_dim,
          row_tiles,
          piece_tiles,
          piece_bytes <= 5632 ? 3 : 2,
          piece_bytes <= 10000 && !heavy ? 8 : 4};
}

/// Packed rows / 8 of the largest unit: beyond head_dim 128 the accumulators of 16 rows do not fit into
/// registers.
constexpr int max_row_tiles(int head_dim) { return head_dim <= 128 ? 2 : 1; }

/// Rows that no register budget serves without spills are left out: run-time groups beside large
/// accumulators.
constexpr bool is_built(const DecodeConfig& c) {
  const bool run_time_groups = !c.k.fixed && c.k.mode == ScaleMode::kBlock;
  return !(run_time_groups && ((c.head_dim == 128 && c.row_tiles == 2) || c.head_dim > 192));
}

/// K and V in the same format.
constexpr auto make_decode_table() {
  std::array<DecodeConfig, kDecodeParts.size() * 8> table{};
  std::size_t row = 0;
  for (const PartConfig& part : kDecodeParts) {
    for (const int dim : kDecodeDims) {
      for (int row_tiles = 1; row_tiles <= max_row_tiles(dim); ++row_tiles) {
        table[row++] = make_decode_config(part, part, dim, row_tiles);
      }
    }
  }
  return table;
}
inline constexpr auto kDecodeTable = make_decode_table();

}  // namespace halftone::cuda
